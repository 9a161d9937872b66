"""What happens in a history of members: messages and faults with their times, made of a seed."""

import random
from dataclasses import dataclass
from typing import Final

SECONDS: Final = 15.0
"""Between the first step and the last."""
HOSTS: Final = 2
"""And one more that joins for a while."""
KEYS: Final = 6
WIDE: Final = "5"
"""The key whose messages come by several partitions, as after a topic has grown: they have no order."""
FOR_EVER: Final = -1


@dataclass(frozen=True)
class Arrive:
    """Messages of one key, of which the first may fail."""

    at: float
    number: int
    """Of the first."""
    key: str
    count: int
    seconds: float
    """How long the handler takes for each."""
    failures: int
    """How often it fails, for the first."""
    is_repeated: bool
    """The broker gets all of them twice."""

    def __str__(self) -> str:
        often = "always" if self.failures == FOR_EVER else f"{self.failures} times"
        fails = f", the first fails {often}" if self.failures else ""
        twice = ", sent twice" if self.is_repeated else ""
        messages = f"{self.count} × key {self.key} from {self.number}"
        return f"arrive {messages}, {self.seconds:.2f} s each{fails}{twice}"


@dataclass(frozen=True)
class Fault:
    """Something bad: to a host, or to a server."""

    at: float
    kind: str
    host: int
    seconds: float

    def __str__(self) -> str:
        return f"{self.kind} (host {self.host}, {self.seconds:.2f} s)"


Step = Arrive | Fault
FAULTS: Final = (
    "kill", "kill received", "kill claimed", "kill handled", "kill settled", "kill waiting", "kill kept",
    "kill due", "kill buried", "stop", "freeze", "freeze", "freeze", "cut database",
    "lose answers of the database", "lose answers of the database",
    "hang database", "crash database", "crash database behind a pooler", "cut broker", "cut broker",
    "broker away", "lose answers of the broker", "move", "join",
)  # fmt: skip
LASTING: Final = {
    "freeze": (2.0, 14.0),
    "cut broker": (2.0, 8.0),
    "hang database": (0.1, 12.0),
    "lose answers of the database": (1.0, 6.0),
    "join": (1.0, 8.0),
}
"""In seconds: a lease is six."""


def plan(seed: int) -> list[Step]:
    """The steps of a seed, by time. One seed in four is calm: without faults."""
    rnd = random.Random(f"members {seed}")
    steps: list[Step] = []
    number = 0
    for at in sorted(rnd.uniform(0, SECONDS) for _ in range(rnd.randint(10, 24))):
        count = rnd.choice((1, 1, 1, 2, 3, 6))
        key = "0" if rnd.random() < 0.3 else str(rnd.randrange(KEYS))
        seconds = rnd.choice((0.0, 0.0, rnd.expovariate(1 / 0.3), rnd.uniform(2, 5) if count == 1 else 0.5))
        failures = rnd.choice((0, 0, 0, 1, 2, FOR_EVER))
        is_repeated = rnd.random() < 0.1
        steps.append(Arrive(at, number, key, count, seconds, failures, is_repeated))
        number += count
    if seed % 4:
        for _ in range(rnd.randint(4, 12)):
            kind = rnd.choice(FAULTS)
            shortest, longest = LASTING.get(kind, (0.1, 3.0))
            seconds = rnd.uniform(shortest, longest)
            steps.append(Fault(rnd.uniform(0, SECONDS), kind, rnd.randrange(HOSTS), seconds))
    return sorted(steps, key=lambda step: step.at)
