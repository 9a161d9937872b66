"""Looks whose cost grows while something holds back the vacuum horizon come more seldom then."""

import time
from types import TracebackType
from typing import Final

_SHARE: Final = 0.05
_LONGEST_SECONDS: Final = 600.0


class Pace:
    """Around something done again and again, so that it takes no more than a twentieth of the time."""

    def __init__(self) -> None:
        self._began_at = 0.0
        self._next_at = float("-inf")

    @property
    def is_due(self) -> bool:
        """Whether it may be done again."""
        return time.monotonic() >= self._next_at

    def __enter__(self) -> None:
        self._began_at = time.monotonic()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        now = time.monotonic()
        self._next_at = now + min((now - self._began_at) / _SHARE, _LONGEST_SECONDS)
