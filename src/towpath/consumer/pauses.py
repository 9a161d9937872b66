"""What of its group's work a member does not start for now, because a person said so."""

from __future__ import annotations

from collections.abc import Callable

from towpath.store.pauses import EVERY_TYPE, EVERYTHING, GroupPauses
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
    ) -> None:
        self._group = group
        self._store = store
        self._telemetry = telemetry
        self._on_change = on_change
        self.is_all = False
        """Whether nothing is started."""
        self.types: frozenset[str] = frozenset()
        """Message types of which nothing is started."""

    async def look(self) -> None:
        """Ask the database. Raises StoreUnavailable."""
        before, paused = self.names, await self._store.read()
        self.is_all, self.types = EVERY_TYPE in paused, paused - {EVERY_TYPE}
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
