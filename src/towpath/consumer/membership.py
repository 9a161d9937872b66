"""One worker's life sign: the lease renewed once a beat, progress out, cancellations and pauses in."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final
from uuid import UUID

from towpath.consumer.settling import until_available
from towpath.errors import LeaseLost, SchemaMismatch, StoreUnavailable
from towpath.store.database import within
from towpath.store.work import Work
from towpath.store.workers import WorkerStore

BEAT: Final = "beat"
DATABASE: Final = "database"
"""Noted when the lease was renewed; the other notes are loops that came round."""


class Membership:
    """Renews until the lease is lost, which ends `run` with LeaseLost.

    A schema that was changed into one this library cannot work with is told to `on_outdated`, once a beat.
    """

    def __init__(
        self,
        store: WorkerStore,
        *,
        lease_seconds: float,
        beat_seconds: float,
        running: Callable[[], Sequence[UUID]],
        on_cancel: Callable[[UUID], None],
        on_beat: Callable[[], Awaitable[None]],
        on_progress: Callable[[str], None],
        on_outdated: Callable[[SchemaMismatch], None],
    ) -> None:
        self._store = store
        self._lease_seconds = lease_seconds
        self._beat_seconds = beat_seconds
        self._running = running
        self._on_cancel = on_cancel
        self._on_beat = on_beat
        self._on_progress = on_progress
        self._on_outdated = on_outdated
        self._progress: dict[tuple[UUID, UUID], Mapping[str, object]] = {}

    async def register(self) -> None:
        """Begin the lease. Raises StoreUnavailable, and GroupMismatch."""
        await self._store.register()

    def report(self, work: Work, progress: Mapping[str, object]) -> None:
        """Goes out with the next beat; the latest wins."""
        if work.token is not None:
            self._progress[work.id, work.token] = progress

    async def run(self) -> None:
        """Beat for ever. Raises LeaseLost when the row lapsed or was not renewed for a lease's time."""
        renewed_at = _boot_seconds()
        while True:
            await asyncio.sleep(self._beat_seconds)
            asked_at = _boot_seconds()
            try:
                await within(self._beat_seconds, self._store.beat())
                renewed_at = asked_at
                self._on_progress(DATABASE)
                await within(self._beat_seconds, self._exchange())
            except SchemaMismatch as error:
                self._on_outdated(error)
            except (StoreUnavailable, TimeoutError) as error:
                if _boot_seconds() - renewed_at > self._lease_seconds:
                    raise LeaseLost("the database was away for longer than the worker's lease") from error
            self._on_progress(BEAT)

    async def _exchange(self) -> None:
        reports, self._progress = self._progress, {}
        try:
            await until_available(lambda: self._store.report_progress(reports))
        except BaseException:
            self._progress = reports | self._progress  # with the next beat, unless there is a later report
            raise
        for task_id in await self._store.cancellations(self._running()):
            self._on_cancel(task_id)
        await self._store.ensure_installed()
        await self._on_beat()


def _boot_seconds() -> float:
    """Runs on while the machine sleeps, unlike the monotonic clock."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
