"""From a seed to a workload and the faults that strike it: the same seed gives the same plan."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Final, get_args

from tests.faults.messages import FATES, Fate, Kind

LANES: Final = 6
"""Producers that run side by side, three to a process."""
_TRANSACTIONS: Final = 30
"""Of each lane."""
_FIRST_SECONDS: Final = 1.0
_FRAME_SECONDS: Final = 8.0
"""When a first fault may begin, and in how much time after that."""
_KINDS: Final[tuple[Kind, ...]] = get_args(Kind)
_RECENT: Final = 20
"""Transactions of a lane that share requests, where they are not shared by all."""


@dataclass(frozen=True)
class Mix:
    """What a workload is made of."""

    hot_keys: int = 5
    cold_keys: int = 40
    requests: int = 12
    are_requests_recent: bool = False
    """Equal ones come soon after each other only: later the group has forgotten them."""
    pause_seconds: float = 0.6
    held: float = 0.3
    """Share of transactions that stay open for a while."""
    fateful: float = 0.2
    """Share of messages with another fate than success."""
    garbled: float = 0.5
    """Weight of messages that nobody can decode, among weights of 24."""


STEADY: Final = Mix(20, 2000, 4, True, pause_seconds=0.0, held=0.05, fateful=0.04, garbled=0.0)
"""For hours: more keys, and little that makes others wait."""


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
        size = sum(len(each.messages) for lane in self.lanes for each in lane)
        head = f"seed {self.seed}: {sum(map(len, self.lanes))} transactions, {size} messages"
        return "\n".join([head, *map(str, self.strikes)])


def make_plan(seed: int, faults: Sequence[str]) -> Plan:
    """The lanes depend on the seed alone; the faults overlap where there are several."""
    return Plan(seed, tuple(lanes(seed)), tuple(_strikes(random.Random(f"{seed}/strikes"), faults)))


def lanes(seed: int) -> Iterator[tuple[Transaction, ...]]:
    """What each lane of producers does, one transaction after another."""
    for lane in range(LANES):
        rng = random.Random(f"{seed}/{lane}")
        yield tuple(_transaction(rng, f"{lane}-{number}", Mix()) for number in range(_TRANSACTIONS))


def steady_lane(seed: int, lane: int) -> Iterator[Transaction]:
    """What one lane does without an end; the same seed and lane give the same."""
    rng = random.Random(f"{seed}/{lane}")
    return (_transaction(rng, f"{lane}-{number}", STEADY, number // _RECENT) for number in count())


def _strikes(rng: random.Random, faults: Sequence[str]) -> Iterator[Strike]:
    at = _FIRST_SECONDS + rng.random() * _FRAME_SECONDS
    for fault in faults:
        lasts = 2.0 + rng.random() * 4.0
        yield Strike(fault, round(at, 2), round(lasts, 2))
        at += rng.random() * lasts


def _transaction(rng: random.Random, name: str, mix: Mix, period: int = 0) -> Transaction:
    is_delayed = rng.random() < 0.08
    hot, cold = f"hot{rng.randrange(mix.hot_keys)}", f"cold{rng.randrange(mix.cold_keys)}"
    size = rng.choice((1, 1, 1, 2, 3))
    requests = f"{name.partition('-')[0]}-{period}-" if mix.are_requests_recent else ""
    return Transaction(
        name,
        # What is delayed has keys of its own: its order is not promised.
        key=f"late{rng.randrange(mix.cold_keys)}" if is_delayed else hot if rng.random() < 0.5 else cold,
        messages=tuple(_message(rng, mix, requests, is_delayed=is_delayed) for _ in range(size)),
        pause_seconds=round(rng.random() * mix.pause_seconds, 3),
        held_seconds=round(rng.random() * 0.3, 3) if rng.random() < mix.held else 0.0,
        is_rolled_back=rng.random() < 0.12,
        by_session=rng.random() < 0.5,
    )


def _message(rng: random.Random, mix: Mix, requests: str, *, is_delayed: bool) -> Message:
    kind = rng.choices(_KINDS, weights=[6, 2, 4, 4, 3, 3, 2, mix.garbled])[0]
    fates = FATES[kind]
    delay = round(0.5 + rng.random() * 3, 2) if is_delayed else 0.0
    return Message(
        kind,
        rng.choice(fates) if fates and rng.random() < mix.fateful else "succeeds",
        delay,
        f"request{requests}{rng.randrange(mix.requests)}" if kind == "requested" else "",
        is_abandoned=kind != "requested" and rng.random() < 0.08,
    )
