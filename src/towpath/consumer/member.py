"""One worker from registration to drain."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from uuid import UUID

from uuid_utils.compat import uuid7

from towpath.app import App
from towpath.brokers.ports import Bookmark, Subscriber
from towpath.consumer.lanes import Received
from towpath.consumer.membership import DATABASE
from towpath.consumer.pauses import Pauses
from towpath.consumer.roster import GRACE_SECONDS, cancel
from towpath.consumer.wiring import wire
from towpath.errors import SchemaMismatch, StoreUnavailable
from towpath.outbox import Outbox
from towpath.settings import WorkerSettings
from towpath.store.database import Database, within
from towpath.store.groups import Terms
from towpath.store.pauses import GroupPauses
from towpath.telemetry.logging import event_logger
from towpath.telemetry.metrics import Telemetry

log = event_logger(__name__)


class Member:
    """One incarnation of a worker. It ends by `stop`, or with LeaseLost; a successor has a new id."""

    def __init__(
        self,
        app: App,
        database: Database,
        subscriber: Subscriber,
        settings: WorkerSettings,
        *,
        terms: Terms,
        installation: str,
        destinations: Mapping[str, str],
        outbox: Outbox,
        resources: Mapping[type, object],
        telemetry: Telemetry,
        broker_labels: Mapping[str, str | int],
        on_progress: Callable[[str], None],
        on_outdated: Callable[[SchemaMismatch], None],
        on_paused: Callable[[Sequence[str]], None],
    ) -> None:
        self.id: UUID = uuid7()
        self._group = app.name
        self._types = terms.types
        self._drain_seconds = settings.drain_timeout.total_seconds()
        self._on_progress = on_progress
        self._subscriber = subscriber
        self._on_paused = on_paused
        self._pauses = Pauses(
            app.name, GroupPauses(database, app.name), telemetry=telemetry, on_change=self._heed
        )
        parts = wire(
            self.id,
            app,
            database,
            subscriber,
            settings,
            pauses=self._pauses,
            terms=terms,
            installation=installation,
            destinations=destinations,
            outbox=outbox,
            resources=resources,
            telemetry=telemetry,
            broker_labels=broker_labels,
            on_progress=on_progress,
            on_outdated=on_outdated,
            on_blocked=self._note_blocked,
        )
        self._workers = parts.workers
        self._membership = parts.membership
        self._roster = parts.roster
        self._held = parts.held
        self._group_commit = parts.group_commit
        self._bookmarks = parts.bookmarks
        self._wakes = parts.wakes
        self._loops = parts.loops

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop` is set, then drain. Raises LeaseLost, and whatever kills a loop."""
        await self._membership.register()
        self._on_progress(DATABASE)
        await self._pauses.look()
        log.info("worker.registered", group=self._group, worker=str(self.id))
        await self._tell_differences()
        intake = [asyncio.create_task(loop()) for loop in self._loops]
        upkeep = [asyncio.create_task(loop()) for loop in (self._membership.run, self._group_commit.run)]
        stopping = asyncio.create_task(stop.wait())
        try:
            watched: list[asyncio.Future[Any]] = [*intake, *upkeep, stopping, self._roster.broke]
            done, _ = await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
            failed = next((task for task in done if task is not stopping), None)
            await cancel(intake)
            await self._drain(self._drain_seconds if failed is None else 0.0)
            if failed is not None:
                if failed.cancelled():  # else it would look as if this worker had been told to stop
                    raise RuntimeError(f"a loop of the worker was cancelled from within: {failed!r}")
                failed.result()
            await self._roster.hand_back_rest()
        finally:
            await cancel([*intake, stopping])
            await self._abandon()
            await cancel(upkeep)
            self._roster.broke.cancel()

    async def _tell_differences(self) -> None:
        """Say which handlers this member and the others do not share: a deployment, or another app."""
        for host, types in await self._workers.others():
            log.warning(
                "worker.handlers_differ",
                group=self._group,
                host=host,
                only_here=sorted(set(self._types).difference(types)),
                only_there=sorted(set(types).difference(self._types)),
            )

    def _heed(self, pauses: Pauses) -> None:
        """Pauses began or ended."""
        if pauses.is_all:
            self._subscriber.pause()
        else:
            self._subscriber.resume()
        self._on_paused(pauses.names)
        for wake in self._wakes:
            wake.set()

    async def revoking(self, partitions: frozenset[str], *, timeout_seconds: float) -> None:
        """Partitions leave: let their running work end, hand back the rest."""

        def is_leaving(received: Received | None) -> bool:
            if received is None or received.is_acknowledged:
                return False
            return received.delivery.partition in partitions

        self._held.release(is_leaving)
        await self._roster.finish(timeout_seconds, is_leaving)

    async def bookmarks(self, partitions: frozenset[str]) -> Mapping[str, Bookmark]:
        """What the group noted of these partitions. Raises StoreUnavailable."""
        return await self._bookmarks.take(partitions)

    def lost(self, partition: str, first_offset: int, count: int) -> None:  # noqa: ARG002 - the subscriber logs it
        """The broker deleted records that nobody had read."""
        self._bookmarks.lost(partition, count)

    def _note_blocked(self, handler: str, seconds: float) -> None:
        log.warning("worker.loop_blocked", group=self._group, handler=handler, seconds=seconds)

    async def _drain(self, patience_seconds: float) -> None:
        """Nothing new; what runs may end within its patience, the rest goes back unspent."""
        self._held.release()
        await self._roster.finish(patience_seconds)

    async def _take_leave(self) -> None:
        await self._workers.leave()
        await self._bookmarks.note()

    async def _abandon(self) -> None:
        """Nothing of this worker runs on; its lease ends now if the database can be told."""
        await self._roster.cancel_all()
        try:
            await within(GRACE_SECONDS, self._take_leave())
        except (StoreUnavailable, TimeoutError) as error:
            log.warning("worker.store_unavailable", group=self._group, error=str(error))
