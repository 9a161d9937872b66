"""What of its group's work a member does not start for now, because a person said so."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from towpath.store.pauses import EVERY_TYPE, EVERYTHING, GroupPause, GroupPauses
from towpath.telemetry import names
from towpath.telemetry.logging import event_logger
from towpath.telemetry.metrics import Telemetry

log = event_logger(__name__)


class Pauses:
    """The pauses of one group as of the last beat. What runs already is left alone."""

    def __init__(
        self,
        group: str,
        store: GroupPauses,
        *,
        telemetry: Telemetry,
        on_change: Callable[[Pauses], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._group = group
        self._store = store
        self._telemetry = telemetry
        self._on_change = on_change
        self._clock = clock
        self._known: Sequence[GroupPause] = ()
        self._known_at = clock()
        self.is_all = False
        """Whether nothing is started."""
        self.types: frozenset[str] = frozenset()
        """Message types of which nothing is started."""

    async def look(self) -> None:
        """Ask the database. Raises StoreUnavailable."""
        self.told(await self._store.read())

    def told(self, pauses: Sequence[GroupPause]) -> None:
        """What the database knows now."""
        before = self.names
        self._known, self._known_at = pauses, self._clock()
        paused = {pause.type for pause in pauses if pause.is_open}
        self.is_all, self.types = EVERY_TYPE in paused, frozenset(paused - {EVERY_TYPE})
        self._telemetry.set(names.WORKER_PAUSES, self.is_all, group=self._group, scope="everything")
        self._telemetry.set(names.WORKER_PAUSES, len(self.types), group=self._group, scope="type")
        if self.names != before:
            log.warning("worker.pauses_changed", group=self._group, types=self.names)
            self._on_change(self)

    @property
    def names(self) -> list[str]:
        """Types, and `*` while that is every one."""
        return [EVERYTHING] * self.is_all + sorted(self.types)

    def holds(self, type_: str) -> bool:
        """Whether a message of this type must not start."""
        return self.is_all or type_ in self.types

    def free_seconds(self, type_: str, age_seconds: float) -> float:
        """How much of its age a message has spent behind pauses: that does not count."""
        passed = self._clock() - self._known_at
        spans = [
            (pause.paused_ago + passed, 0.0 if pause.is_open else pause.resumed_ago + passed)
            for pause in self._known
            if pause.type in (EVERY_TYPE, type_)
        ]
        free, left = 0.0, age_seconds
        for began, ended in sorted(spans, reverse=True):
            free += max(0.0, min(began, left) - ended)
            left = min(left, ended)
        return free
