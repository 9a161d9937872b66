"""One worker from registration to drain."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final
from uuid import UUID

from uuid_utils.compat import uuid7

from towpath.app import App
from towpath.brokers.ports import Bookmark, Subscriber
from towpath.consumer.batches import Batches
from towpath.consumer.bookmarks import Bookmarks
from towpath.consumer.breakers import Breakers
from towpath.consumer.census import CensusLoop
from towpath.consumer.execution import Executor
from towpath.consumer.lanes import Received
from towpath.consumer.loopwatch import LoopWatch
from towpath.consumer.membership import Membership
from towpath.consumer.pauses import Pauses
from towpath.consumer.pump import Pump
from towpath.consumer.reconciling import Reconciler
from towpath.consumer.roster import GRACE_SECONDS, Roster, cancel
from towpath.consumer.running import Runner
from towpath.consumer.settling import GroupCommit
from towpath.consumer.slots import Slots
from towpath.consumer.suspects import Suspects
from towpath.consumer.upkeep import DueLoop, Reaper, StoreWatch, wake_after
from towpath.consumer.waves import Waves
from towpath.errors import SchemaMismatch, StoreUnavailable
from towpath.outbox import Outbox
from towpath.settings import WorkerSettings
from towpath.store.broker_deaths import BrokerDeathStore
from towpath.store.census import CensusStore
from towpath.store.claims import ClaimStore
from towpath.store.database import Database, within
from towpath.store.doubts import DoubtStore
from towpath.store.groups import Terms
from towpath.store.offsets import OffsetStore
from towpath.store.pauses import GroupPauses
from towpath.store.reaping import ReapStore
from towpath.store.settles import SettleStore
from towpath.store.sync_settles import SyncSettleStore
from towpath.store.workers import WorkerStore
from towpath.telemetry.logging import event_logger
from towpath.telemetry.metrics import Telemetry

DATABASE: Final = "database"
"""Noted when the lease was renewed; the other notes are loops that came round."""

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
        self._drain_seconds = settings.drain_timeout.total_seconds()
        self._on_progress = on_progress
        self._subscriber = subscriber
        self._on_paused = on_paused
        self._pauses = Pauses(
            app.name, GroupPauses(database, app.name), telemetry=telemetry, on_change=self._heed
        )
        claims = ClaimStore(
            database,
            app.name,
            self.id,
            is_ordered_by_key=app.ordering == "key",
            max_parked=settings.max_parked_per_key,
        )
        settles = SettleStore(database, app.name, self.id)
        doubts = DoubtStore(database, app.name)
        self._workers = WorkerStore(database, app.name, self.id, settings.lease.total_seconds(), terms)
        self._membership = Membership(
            self._workers,
            lease_seconds=settings.lease.total_seconds(),
            beat_seconds=settings.beat_every.total_seconds(),
            on_cancel=lambda task_id: self._roster.cancel(task_id),  # noqa: PLW0108 - made below
            on_beat=self._pauses.look,
            on_progress=on_progress,
            on_outdated=on_outdated,
        )
        self._types = terms.types
        watch = StoreWatch(app.name)
        breakers = Breakers(app.handlers, time.monotonic)
        suspects = Suspects(
            settings.concurrency, settings.max_deliveries, settings.quiet.total_seconds(), time.monotonic
        )
        wake, wake_pump = self._wakes = asyncio.Event(), asyncio.Event()
        slots = Slots(app.handlers, settings, wake=wake_pump, wake_due=wake)
        self._group_commit = GroupCommit(settles, wake.set)
        sync_settles = SyncSettleStore(database.schema, app.name, self.id)
        executor = Executor(
            app, database, settles, sync_settles, doubts, outbox, resources, self._membership.report
        )
        runner = Runner(
            app,
            claims,
            settles,
            doubts,
            BrokerDeathStore(database, app.name, self.id),
            self._group_commit,
            executor,
            breakers,
            self._pauses,
            telemetry,
            broker_labels,
            lambda seconds: wake_after(wake, seconds),
            settings.max_deliveries,
        )
        self._roster = Roster(app.name, settles, doubts)
        batches = Batches(runner, executor, self._roster)
        waves = Waves(app.handlers, runner, batches, self._roster)
        self._pump = Pump(
            app,
            subscriber,
            settings,
            installation=installation,
            destinations=destinations,
            claims=claims,
            settles=settles,
            runner=runner,
            roster=self._roster,
            waves=waves,
            watch=watch,
            suspects=suspects,
            slots=slots,
            breakers=breakers,
            pauses=self._pauses,
            wake=wake_pump,
            telemetry=telemetry,
            on_progress=on_progress,
        )
        self._due = DueLoop(
            settings,
            claims=claims,
            waves=waves,
            roster=self._roster,
            watch=watch,
            suspects=suspects,
            slots=slots,
            breakers=breakers,
            pauses=self._pauses,
            wake=wake,
            on_progress=on_progress,
        )
        self._reaper = Reaper(
            app,
            settings,
            reaps=ReapStore(database, app.name),
            roster=self._roster,
            watch=watch,
            wake=wake,
            telemetry=telemetry,
            is_listening=lambda: subscriber.is_connected and not self._pauses.is_all,
            on_progress=on_progress,
        )

        self._census = CensusLoop(
            app.name,
            store=CensusStore(database, app.name),
            watch=watch,
            telemetry=telemetry,
            on_progress=on_progress,
        )
        self._bookmarks = Bookmarks(
            app.name,
            subscriber,
            OffsetStore(database, app.name),
            watch=watch,
            telemetry=telemetry,
            every_seconds=settings.beat_every.total_seconds(),
            on_progress=on_progress,
        )
        self._loop_watch = LoopWatch(app.handlers, self._note_blocked)
        self._reconciler = Reconciler(
            app,
            executor.caller,
            doubts,
            watch=watch,
            pauses=self._pauses,
            wake=wake,
            every_seconds=settings.reap_every.total_seconds(),
            on_progress=on_progress,
        )

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop` is set, then drain. Raises LeaseLost, and whatever kills a loop."""
        await self._membership.register()
        self._on_progress(DATABASE)
        await self._pauses.look()
        log.info("worker.registered", group=self._group, worker=str(self.id))
        await self._tell_differences()
        loops = (
            self._pump.receive_loop,
            self._pump.claim_loop,
            self._pump.patience_loop,
            self._due.run,
            self._reaper.run,
            self._reconciler.run,
            self._census.run,
            self._bookmarks.run,
            self._loop_watch.run,
        )
        intake = [asyncio.create_task(loop()) for loop in loops]
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

        self._pump.release(is_leaving)
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
        self._pump.release()
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
