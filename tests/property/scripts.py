"""What the messages of a random history are told to do, and in which weather they do it."""

import random
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Literal
from uuid import UUID

from uuid_utils.compat import uuid7

from tests.property.sim_broker import TOPIC
from towpath.messages import event

KEYS: Final = 4
PER_KEY: Final = 5
ATTEMPTS: Final = 4


@event("protocol.step", destination=TOPIC)
@dataclass(frozen=True)
class Step:
    """Its effect is in the database."""


@event("protocol.call", destination=TOPIC)
@dataclass(frozen=True)
class Outward:
    """Its effect is outside, under a stable key."""


@event("protocol.charge", destination=TOPIC)
@dataclass(frozen=True)
class Charge:
    """Its effect is outside and may not be repeated."""


@event("protocol.tally", destination=TOPIC)
@dataclass(frozen=True)
class Tally:
    """Its effect is in the database, together with others."""


Kind = Literal["step", "call", "charge", "tally"]
End = Literal["succeeds", "dies", "kills"]


@dataclass(frozen=True)
class Script:
    """One message. Nobody who has no part in a death may die: failures stay below the attempts."""

    id: UUID
    kind: Kind
    key: str
    sequence: int
    end: End = "succeeds"
    failing_attempts: int = 0
    seconds: float = 0.002
    is_silent: bool = False
    """Its provider never answers: an operator decides."""

    @property
    def type(self) -> str:
        return f"protocol.{self.kind}"


class Weather(StrEnum):
    """What goes wrong besides the messages themselves."""

    STORM = "storm"
    """Processes crash and freeze anywhere."""
    KILLERS = "killers"
    """Only messages that kill their process, every time they are started."""
    BOTH = "both"


def weather_of(rnd: random.Random) -> Weather:
    """Mostly storms."""
    return rnd.choices(list(Weather), (5, 3, 2))[0]


def scripts_of(rnd: random.Random, weather: Weather) -> dict[UUID, Script]:
    """Messages of some keys, each key in the order of its commits."""
    ends: tuple[End, ...] = ("succeeds",) * 17 + ("dies",)
    killers = set[tuple[int, int]]()
    if weather is not Weather.STORM:
        killers = {(rnd.randrange(KEYS), rnd.randrange(PER_KEY))}
    scripts = dict[UUID, Script]()
    for sequence in range(PER_KEY):
        for key in range(KEYS):
            id_: UUID = uuid7()
            is_killer = (key, sequence) in killers
            scripts[id_] = Script(
                id_,
                rnd.choices(("step", "call", "charge", "tally"), (4, 2, 2, 3))[0],
                f"k{key}",
                sequence,
                "kills" if is_killer else rnd.choice(ends),
                rnd.choice((0, 0, 0, 1, 2)),
                rnd.uniform(0.3, 0.45) if rnd.random() < 0.08 else rnd.uniform(0, 0.005),
                rnd.random() < 0.5,
            )
    return scripts


@dataclass
class Account:
    """What a history did, to be judged."""

    group: str
    weather: Weather
    scripts: dict[UUID, Script]
    stat: Counter[str]
    condemned: set[UUID]
    """Ended DEAD by an operator's word."""
    early: set[UUID]
    """Acknowledged while neither finished nor held by the database."""
