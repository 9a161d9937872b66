"""Messages whose worker died: run few of them together, so that a killer takes few with it. Pure.

With d starts and no outcome at most concurrency / 4^(d-1) run together; the last permitted start
runs alone. So a handler that kills its process reaches the catalog and its neighbours do not.
"""

from collections import Counter
from typing import Final

_FACTOR: Final = 4
_MAX_EXPONENT: Final = 16


class Suspects:
    """Who may start now, by the number of starts this one would be."""

    def __init__(self, concurrency: int, max_deliveries: int) -> None:
        self._concurrency = concurrency
        self._max_deliveries = max_deliveries
        self._running: Counter[int] = Counter()
        self._is_alone = False
        self._waits_for_quiet = False

    def limit(self, start: int) -> int:
        """How many messages in their `start`-th start may run together."""
        divisor: int = _FACTOR ** min(start - 1, _MAX_EXPONENT)
        return max(1, self._concurrency // divisor)

    def may_start(self, start: int, others_count: int) -> bool:
        """Whether a message may start for the `start`-th time beside `others_count` running ones.

        Asking for a last start asks for quiet: nothing else should be started meanwhile. Beyond the
        last nothing runs, it only has to be buried.
        """
        if start > self._max_deliveries:
            return True
        if start == self._max_deliveries:
            self._waits_for_quiet = others_count > 0 and not self._is_alone
            return others_count == 0 and not self._is_alone
        return self._running[start] < self.limit(start)

    def started(self, start: int) -> None:
        """It runs."""
        self._running[start] += 1
        if start == self._max_deliveries:
            self._is_alone, self._waits_for_quiet = True, False

    def ended(self, start: int) -> None:
        """It ended, or was taken back."""
        self._running[start] -= 1
        if start == self._max_deliveries:
            self._is_alone = False

    @property
    def wants_quiet(self) -> bool:
        """Whether one runs alone, or waits to: start nothing else."""
        return self._is_alone or self._waits_for_quiet
