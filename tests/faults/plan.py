"""From a seed to a workload and the faults that strike it: the same seed gives the same plan."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, get_args

from tests.faults.messages import FATES, Fate, Kind

LANES: Final = 6
"""Producers that run side by side, three to a process."""
_TRANSACTIONS: Final = 30
"""Of each lane."""
_HOT_KEYS: Final = 5
_COLD_KEYS: Final = 40
_REQUESTS: Final = 12
_PAUSE_SECONDS: Final = 0.6
_FIRST_SECONDS: Final = 1.0
_FRAME_SECONDS: Final = 8.0
"""When a first fault may begin, and in how much time after that."""
_KINDS: Final[tuple[Kind, ...]] = get_args(Kind)


@dataclass(frozen=True)
class Message:
    """One message of a transaction."""

    kind: Kind
    fate: Fate
    delay_seconds: float = 0.0
    request: str = ""
    is_abandoned: bool = False


@dataclass(frozen=True)
class Transaction:
    """All messages have its key; `n` is drawn under the lock of the key's row."""

    name: str
    key: str
    messages: tuple[Message, ...]
    pause_seconds: float
    held_seconds: float
    """Before its end."""
    is_rolled_back: bool
    by_session: bool
    """Through SQLAlchemy; else through asyncpg."""


@dataclass(frozen=True)
class Strike:
    """One fault."""

    fault: str
    at_seconds: float
    """After the first message was handled."""
    lasts_seconds: float


@dataclass(frozen=True)
class Plan:
    """One run."""

    seed: int
    lanes: tuple[tuple[Transaction, ...], ...]
    strikes: tuple[Strike, ...]

    def __str__(self) -> str:
        count = sum(len(each.messages) for lane in self.lanes for each in lane)
        head = f"seed {self.seed}: {sum(map(len, self.lanes))} transactions, {count} messages"
        return "\n".join([head, *map(str, self.strikes)])


def make_plan(seed: int, faults: Sequence[str]) -> Plan:
    """The lanes depend on the seed alone; the faults overlap where there are several."""
    return Plan(seed, tuple(lanes(seed)), tuple(_strikes(random.Random(f"{seed}/strikes"), faults)))


def lanes(seed: int) -> Iterator[tuple[Transaction, ...]]:
    """What each lane of producers does, one transaction after another."""
    for lane in range(LANES):
        rng = random.Random(f"{seed}/{lane}")
        yield tuple(_transaction(rng, f"{lane}-{number}") for number in range(_TRANSACTIONS))


def _strikes(rng: random.Random, faults: Sequence[str]) -> Iterator[Strike]:
    at = _FIRST_SECONDS + rng.random() * _FRAME_SECONDS
    for fault in faults:
        lasts = 2.0 + rng.random() * 4.0
        yield Strike(fault, round(at, 2), round(lasts, 2))
        at += rng.random() * lasts


def _transaction(rng: random.Random, name: str) -> Transaction:
    is_delayed = rng.random() < 0.08
    hot, cold = f"hot{rng.randrange(_HOT_KEYS)}", f"cold{rng.randrange(_COLD_KEYS)}"
    count = rng.choice((1, 1, 1, 2, 3))
    return Transaction(
        name,
        # What is delayed has keys of its own: its order is not promised.
        key=f"late{rng.randrange(_COLD_KEYS)}" if is_delayed else hot if rng.random() < 0.5 else cold,
        messages=tuple(_message(rng, is_delayed=is_delayed) for _ in range(count)),
        pause_seconds=round(rng.random() * _PAUSE_SECONDS, 3),
        held_seconds=round(rng.random() * 0.3, 3) if rng.random() < 0.3 else 0.0,
        is_rolled_back=rng.random() < 0.12,
        by_session=rng.random() < 0.5,
    )


def _message(rng: random.Random, *, is_delayed: bool) -> Message:
    kind = rng.choices(_KINDS, weights=[6, 2, 4, 4, 3, 3, 2, 0.5])[0]
    fates = FATES[kind]
    delay = round(0.5 + rng.random() * 3, 2) if is_delayed else 0.0
    return Message(
        kind,
        rng.choice(fates) if fates and rng.random() < 0.2 else "succeeds",
        delay,
        f"request{rng.randrange(_REQUESTS)}" if kind == "requested" else "",
        is_abandoned=kind != "requested" and rng.random() < 0.08,
    )
