"""Durations and retry delays: pure arithmetic, no clock."""

import random
import re
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

_UNITS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h|d)")
_MAX_EXPONENT: Final = 62
_LONGEST: Final = timedelta(days=36525)
"""A century: what is longer is a mistake, and would leave the range of a timestamp."""


def parse_duration(value: str | timedelta) -> timedelta:
    """A duration from `timedelta` or text such as "250ms", "90s", "5m", "24h", "7d", "1h30m".

    Raises ValueError with the text shown when it is malformed, negative or longer than a century.
    """
    if isinstance(value, timedelta):
        if value < timedelta(0):
            raise ValueError(f"a duration cannot be negative, got {value!r}")
        if value > _LONGEST:
            raise ValueError(f"the duration {value!r} is too long")
        return value
    if not isinstance(value, str):
        raise ValueError(f"a duration is a timedelta or text such as '90s', got {value!r}")  # noqa: TRY004
    text = value.strip()
    position, seconds = 0, 0.0
    while match := _DURATION.match(text, position):
        seconds += float(match[1]) * _UNITS[match[2]]
        position = match.end()
    if not text or position != len(text):
        raise ValueError(f"cannot read {value!r} as a duration: write '250ms', '90s', '5m' or '24h'")
    if seconds > _LONGEST.total_seconds():
        raise ValueError(f"the duration {value!r} is too long")
    return timedelta(seconds=seconds)


def duration_text(value: timedelta) -> str:
    """The duration as `parse_duration` reads it, in the largest unit that needs no fraction."""
    for unit, size in reversed(_UNITS.items()):
        span = timedelta(seconds=size)
        if value >= span and not value % span:
            return f"{value // span}{unit}"
    return f"{value.total_seconds():g}s"


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often and how late a failed message is tried again. Attempts AND age bound it.

    `RetryPolicy(attempts=8, max_age="24h", base="1s", cap="10m", in_place=2)`: eight tries in all
    (the first included), none later than 24 hours after the first (but for the time for which it was
    due and could not start), delays between `base` and `cap`; `in_place` of the tries of a clearly
    transient error run at once in the same process.
    """

    attempts: int = 8
    max_age: str | timedelta = "24h"
    base: str | timedelta = "1s"
    cap: str | timedelta = "10m"
    in_place: int = 0

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ValueError(f"attempts must be at least 1, got {self.attempts}")
        if self.in_place < 0:
            raise ValueError(f"in_place cannot be negative, got {self.in_place}")
        for name in ("max_age", "base", "cap"):
            object.__setattr__(self, name, parse_duration(getattr(self, name)))
        if not self.base_delay:
            raise ValueError("base must be longer than zero: retries would run hot")
        if self.base_delay > self.cap_delay:
            raise ValueError(f"base {self.base!r} is longer than cap {self.cap!r}")

    @property
    def base_delay(self) -> timedelta:
        """The shortest delay."""
        return parse_duration(self.base)

    @property
    def cap_delay(self) -> timedelta:
        """The longest delay, except where a Retry-After asks for more."""
        return parse_duration(self.cap)

    @property
    def age_limit(self) -> timedelta:
        """How long after its first try a message may still be tried."""
        return parse_duration(self.max_age)

    def is_exhausted(self, attempts_spent: int, age: timedelta) -> bool:
        """Whether no further try is allowed after `attempts_spent` tries at `age`."""
        return attempts_spent >= self.attempts or age >= self.age_limit

    def delay(
        self, attempts_spent: int, *, retry_after: timedelta | None = None, rng: random.Random | None = None
    ) -> timedelta:
        """The wait before the next try: `max(retry_after, uniform(base, min(cap, base * 2^n)))`.

        `n` counts the tries already spent. Above a Retry-After there is jitter too, so that many
        messages told the same time do not return in one instant.
        """
        base, cap = self.base_delay.total_seconds(), self.cap_delay.total_seconds()
        exponent = min(max(attempts_spent, 0), _MAX_EXPONENT)
        uniform = (rng or random).uniform
        jittered = uniform(base, max(base, min(cap, base * 2.0**exponent)))
        floor = 0.0 if retry_after is None else retry_after.total_seconds()
        return timedelta(seconds=max(jittered, floor + uniform(0.0, min(jittered, floor * 0.25))))
