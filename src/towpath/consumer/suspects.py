"""Messages whose worker died: few of them run together, so that a killer takes few with it. Clock given.

With d starts and no outcome at most concurrency / 4^(d-1) run together. The last permitted start decides
whether a message is a killer, so nobody who could be one runs beside it: it begins when nothing runs that
began within the last `quiet` seconds, and nothing begins until it ended or has run as long itself; what is
being claimed counts as begun. So a handler that kills its process reaches the catalog and its neighbours
do not; and a worker full of handlers that run for hours neither waits for them nor stands still.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, Literal, TypeAlias

_FACTOR: Final = 4
_MAX_EXPONENT: Final = 16

Asker: TypeAlias = Literal["broker", "database"]


class Suspects:
    """Who may start now, by the number of starts this one would be."""

    def __init__(
        self, concurrency: int, max_deliveries: int, quiet_seconds: float, clock: Callable[[], float]
    ) -> None:
        self._concurrency = concurrency
        self._max_deliveries = max_deliveries
        self._clock = clock
        self.quiet_seconds = quiet_seconds
        """Whoever runs for so long is taken for harmless."""
        self._running: Counter[int] = Counter()
        self._claimed: Counter[int] = Counter()
        """Who was admitted and does not run yet: a claim is on its way."""
        self._askers: set[Asker] = set()
        """Who has a last start that waits for quiet."""
        self._renewed: set[Asker] = set()
        """Who said so since it looked last."""
        self._alone_until: float | None = None
        """Until then the last start that began last is watched; None: in this quiet there was none."""
        self._quiet_since: float | None = None
        self._open_until = clock()
        """It was quiet until now: everybody else has as long a turn."""

    def limit(self, start: int) -> int:
        """How many messages in their `start`-th start may run together."""
        divisor: int = _FACTOR ** min(start - 1, _MAX_EXPONENT)
        return max(1, self._concurrency // divisor)

    @contextmanager
    def look(self, asker: Asker) -> Iterator[None]:
        """Somebody looks anew at what is to start: what it asked for before may be gone.

        It counts until the look is over, or the others would take what is a question to the database for
        the end of the quiet.
        """
        self._renewed.discard(asker)
        try:
            yield
        finally:
            if asker not in self._renewed:
                self._askers.discard(asker)

    def may_start(self, start: int, young_count: int, asker: Asker) -> bool:
        """Whether a message may start for the `start`-th time beside `young_count` that began of late.

        Asking for a last start asks for quiet: nothing else is started meanwhile. Beyond the last nothing
        runs, it only has to be buried. Whoever may start is to be claimed within `claiming`.
        """
        if start > self._max_deliveries:
            return True
        if start == 1 or start < self._max_deliveries:
            has_room = start == 1 or self._running[start] + self._claimed[start] < self.limit(start)
            return has_room and not self.wants_quiet()
        now = self._clock()
        if now < self._open_until or self._is_quiet_over(now):
            return False
        if self._quiet_since is None:
            self._quiet_since = now
        if young_count or self._claimed.total():
            self._askers.add(asker)
            self._renewed.add(asker)
            return False
        return True

    @contextmanager
    def claiming(self, start: int) -> Iterator[None]:
        """One, or a batch of those that never lost a worker, is being claimed: until it runs or does not."""
        self._claimed[start] += 1
        try:
            yield
        finally:
            self._claimed[start] -= 1

    def _is_quiet_over(self, now: float) -> bool:
        """Whether it was quiet for long enough. The first last start of a quiet is always waited for."""
        since = self._quiet_since
        return since is not None and self._alone_until is not None and now - since >= self.quiet_seconds

    def started(self, start: int) -> float:
        """It runs. Returns when it began, for `ended`."""
        now = self._clock()
        self._running[start] += 1
        if start == self._max_deliveries > 1:
            self._alone_until = now + self.quiet_seconds
        return now

    def ended(self, start: int, began_at: float) -> None:
        """It ended, or was taken back."""
        self._running[start] -= 1
        if start == self._max_deliveries and self._alone_until == began_at + self.quiet_seconds:
            self._alone_until = min(self._alone_until, self._clock())  # else another one is watched

    def wants_quiet(self) -> bool:
        """Whether a last start is claimed, watched, or waits for its turn: start nothing else."""
        now = self._clock()
        is_claimed = self._max_deliveries > 1 and self._claimed[self._max_deliveries] > 0
        if self._askers or is_claimed or (self._alone_until is not None and now < self._alone_until):
            return True
        if self._quiet_since is not None:
            self._open_until = now + (now - self._quiet_since)
            self._quiet_since = self._alone_until = None
        return False
