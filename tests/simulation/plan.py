"""What happens in a history: steps with their times, made of a seed, few enough to read when it fails."""

import random
from dataclasses import dataclass

SECONDS = 20.0
"""Between the first step and the last."""
HOSTS = 2
KEYS = 5


@dataclass(frozen=True)
class Write:
    """A transaction that holds a hot row from before its first message to its end."""

    at: float
    number: int
    """Of its first message."""
    is_early: bool
    """It has a transaction id before it waits for the row."""
    key: str
    count: int
    seconds: float
    is_rolled_back: bool
    has_ghost: bool
    """A message in a savepoint that is rolled back."""
    is_poison: bool

    def __str__(self) -> str:
        end = "rollback" if self.is_rolled_back else "commit"
        ghost = ", one more in a savepoint that is rolled back" if self.has_ghost else ""
        poison = ", the first refused by the broker" if self.is_poison else ""
        messages = f"{self.count} × key {self.key} from {self.number}"
        return f"write {messages}{poison}{ghost}; {end} after {self.seconds:.2f} s"


@dataclass(frozen=True)
class Fault:
    """Something bad: to a host, or to a server."""

    at: float
    kind: str
    host: int
    seconds: float

    def __str__(self) -> str:
        return f"{self.kind} (host {self.host}, {self.seconds:.2f} s)"


Step = Write | Fault
FAULTS = (
    "kill", "kill before publish", "kill after publish", "kill after journal", "stop",
    "freeze", "freeze", "freeze", "freeze", "cut database", "hang database", "crash database",
    "crash database behind a pooler", "fail over", "broker away", "lose replies", "slow broker",
)  # fmt: skip
LASTING = {"freeze": (5.0, 14.0), "hang database": (0.1, 15.0)}
"""In seconds: a lease is six."""


def plan(seed: int) -> list[Step]:
    """The steps of a seed, by time. One seed in four is calm: without faults and refusals."""
    rnd = random.Random(seed)
    is_calm, refuses = seed % 4 == 0, seed % 2 == 1
    steps: list[Step] = []
    number = 0
    for _ in range(rnd.randint(25, 60)):
        count = rnd.choice((1, 1, 1, 2, 3, 9, 14))
        seconds = rnd.expovariate(1 / 0.2) if rnd.random() < 0.9 else rnd.uniform(1, 8)
        steps.append(
            Write(
                rnd.uniform(0, SECONDS),
                number,
                rnd.random() < 0.5,
                str(rnd.randrange(KEYS)),
                count,
                seconds,
                is_rolled_back=rnd.random() < 0.15,
                has_ghost=rnd.random() < 0.2,
                is_poison=not is_calm and refuses and rnd.random() < 0.15,
            )
        )
        number += count
    if not is_calm:
        for _ in range(rnd.randint(3, 9)):
            kind = rnd.choice(FAULTS)
            shortest, longest = LASTING.get(kind, (0.1, 3.0))
            seconds = rnd.uniform(shortest, longest)
            steps.append(Fault(rnd.uniform(0, SECONDS), kind, rnd.randrange(HOSTS), seconds))
    return sorted(steps, key=lambda step: step.at)
