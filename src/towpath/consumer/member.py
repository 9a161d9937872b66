"""One worker from registration to drain: lanes in, claims in batches, handlers side by side, settled, acknowledged."""

import asyncio
import random
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final
from uuid import UUID

import asyncpg
from uuid_utils.compat import uuid7

from towpath.app import App
from towpath.backoff import parse_duration
from towpath.brokers.ports import Delivery, Subscriber
from towpath.consumer.execution import Executor
from towpath.consumer.intake import Undecodable, read
from towpath.consumer.lanes import Lanes, Received
from towpath.consumer.membership import Membership
from towpath.consumer.running import Runner
from towpath.consumer.settling import GroupCommit
from towpath.crashpoints import CrashPoint, crash_point
from towpath.errors import StoreUnavailable
from towpath.outbox import Outbox
from towpath.settings import WorkerSettings
from towpath.store.claims import Claimed, ClaimStore
from towpath.store.database import Database
from towpath.store.reaping import ReapStore
from towpath.store.settles import SettleStore
from towpath.store.work import Standing, Work
from towpath.store.workers import WorkerStore
from towpath.telemetry import names
from towpath.telemetry.logging import event_logger
from towpath.telemetry.metrics import Telemetry

DATABASE: Final = "database"
"""Noted when the lease was renewed; the other notes are loops that came round."""
_RECEIVE_COUNT: Final = 500
_IDLE_SECONDS: Final = 0.5
_BUSY_SECONDS: Final = 0.1
_OUTAGE_SECONDS: Final = 0.5
_DUE_BATCH: Final = 100
_REAP_BATCH: Final = 100
_EXPIRE_BATCH: Final = 1000
_SLOW_REAP_EVERY: Final = 12
_GRACE_SECONDS: Final = 2.0

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
        outbox: Outbox,
        resources: Mapping[type, object],
        telemetry: Telemetry,
        on_progress: Callable[[str], None],
    ) -> None:
        self.id: UUID = uuid7()
        self._app = app
        self._subscriber = subscriber
        self._settings = settings
        self._telemetry = telemetry
        self._on_progress = on_progress
        self._claims = ClaimStore(database, app.name, self.id)
        self._settles = SettleStore(database, app.name, self.id)
        self._reaps = ReapStore(database, app.name)
        self._workers = WorkerStore(database, app.name, self.id, settings.lease.total_seconds())
        self._membership = Membership(
            self._workers,
            lease_seconds=settings.lease.total_seconds(),
            beat_seconds=settings.beat_every.total_seconds(),
            on_cancel=self._cancel_one,
            on_progress=on_progress,
        )
        self._lanes = Lanes()
        self._wake = asyncio.Event()
        self._due_wake = asyncio.Event()
        self._group_commit = GroupCommit(self._settles, self._due_wake.set)
        executor = Executor(app, database, self._settles, outbox, resources, self._membership.report)
        self._runner = Runner(
            app, self._claims, self._settles, self._group_commit, executor, telemetry, self._wake_due_after
        )
        self._running: dict[Work, tuple[asyncio.Task[None], Received | None]] = {}
        self._due_running = 0
        self._outage_began: float | None = None

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop` is set, then drain. Raises LeaseLost, and whatever kills a loop."""
        await self._membership.register()
        self._on_progress(DATABASE)
        log.info("worker.registered", group=self._app.name, worker=str(self.id))
        intake = [
            asyncio.create_task(loop(), name=loop.__name__)
            for loop in (self._receive_loop, self._pump_loop, self._due_loop, self._reap_loop)
        ]
        upkeep = [asyncio.create_task(self._membership.run()), asyncio.create_task(self._group_commit.run())]
        stopping = asyncio.create_task(stop.wait())
        try:
            done, _ = await asyncio.wait([*intake, *upkeep, stopping], return_when=asyncio.FIRST_COMPLETED)
            await _cancel(intake)
            failed = next((task for task in done if task is not stopping), None)
            patience = self._settings.drain_timeout.total_seconds() if failed is None else 0.0
            await self._drain(patience)
            if failed is not None:
                failed.result()
        finally:
            await _cancel([*intake, stopping])
            await self._abandon()
            await _cancel(upkeep)

    async def revoking(self, partitions: frozenset[str], *, timeout_seconds: float) -> None:
        """Partitions leave: let their running work end, hand back the rest."""

        def is_leaving(received: Received | None) -> bool:
            return received is not None and received.delivery.partition in partitions

        queued = self._lanes.remove(is_leaving)
        self._subscriber.release([received.delivery for received in queued])
        leaving = {work: task for work, (task, received) in self._running.items() if is_leaving(received)}
        await self._finish(leaving, timeout_seconds)

    # Intake ------------------------------------------------------------------------------------

    async def _receive_loop(self) -> None:
        while True:
            deliveries = await self._subscriber.receive(_RECEIVE_COUNT, timeout_seconds=_IDLE_SECONDS)
            self._on_progress("receive")
            if deliveries:
                crash_point(CrashPoint.RECEIVED_BEFORE_CLAIM)
                self._accept(deliveries)
                self._wake.set()

    def _accept(self, deliveries: Sequence[Delivery]) -> None:
        now = datetime.now(UTC)
        for delivery in deliveries:
            self._telemetry.add(names.CONSUMED_MESSAGES, 1, destination=delivery.source, group=self._app.name)
            asked = read(self._app, delivery, now)
            if isinstance(asked, Undecodable):
                self._lanes.add(Received(asked.work, delivery, undecodable=asked.error))
            elif asked[0].type in self._app.ignored_types:
                self._subscriber.acknowledge([delivery])
            else:
                work, envelope = asked
                self._lanes.add(Received(work, delivery, envelope=envelope))

    async def _pump_loop(self) -> None:
        while True:
            self._wake.clear()
            self._on_progress("pump")
            now = time.monotonic()
            held_until = self._lanes.release_due(now)
            free = self._settings.concurrency - (len(self._running) - self._due_running)
            heads = self._lanes.take(min(free, self._settings.claim_batch)) if free > 0 else []
            if heads:
                await self._start(heads)
            else:
                patience = _IDLE_SECONDS if held_until is None else min(_IDLE_SECONDS, held_until - now)
                await _wait(self._wake, patience)

    async def _start(self, heads: list[Received]) -> None:
        """Claim the heads that are still ours and run what was won."""
        by_id: dict[UUID, Received] = {}
        for received in heads:
            if not self._subscriber.is_current(received.delivery):
                self._lanes.finish(received)
            elif received.undecodable is not None:
                self._spawn(received.work, self._bury(received), received)
            elif received.work.id in by_id:
                self._hold(received, _BUSY_SECONDS)
            else:
                by_id[received.work.id] = received
        if by_id:
            await self._claim([received.work for received in by_id.values()], by_id)

    async def _claim(self, works: list[Work], by_id: Mapping[UUID, Received]) -> None:
        try:
            claimed = await self._claims.claim(works)
            standings = (
                await self._claims.standings([work.id for work in claimed.lost]) if claimed.lost else {}
            )
        except StoreUnavailable as error:
            self._note_outage(error)
            for work in works:
                self._hold(by_id[work.id], _OUTAGE_SECONDS * (0.5 + random.random()))
            return
        except asyncpg.DataError as error:
            await self._isolate(works, by_id, error)
            return
        self._note_recovery()
        if claimed.started:
            crash_point(CrashPoint.CLAIMED_BEFORE_HANDLE)
        self._dispatch(claimed, standings, by_id)

    async def _isolate(self, works: list[Work], by_id: Mapping[UUID, Received], error: Exception) -> None:
        """One message of the batch cannot be stored as it is: find it, bury it alone."""
        if len(works) == 1:
            received = by_id[works[0].id]
            self._spawn(received.work, self._bury(received, error), received)
            return
        middle = len(works) // 2
        await self._claim(works[:middle], by_id)
        await self._claim(works[middle:], by_id)

    def _dispatch(
        self, claimed: Claimed, standings: Mapping[UUID, Standing], by_id: Mapping[UUID, Received]
    ) -> None:
        for work in claimed.started:
            self._spawn(work, self._run(work, by_id[work.id]), by_id[work.id])
        for work in claimed.parked:
            log.info("task.parked", group=self._app.name, message_id=str(work.id), type=work.type)
            self._finish_delivery(by_id[work.id])
        for work in claimed.contended:
            self._hold(by_id[work.id], _BUSY_SECONDS)
        for work in claimed.lost:
            received = by_id[work.id]
            if self._runner.may_acknowledge(work, standings[work.id], received.envelope):
                self._finish_delivery(received)
            else:
                self._hold(received, _BUSY_SECONDS)

    # Running -----------------------------------------------------------------------------------

    def _spawn(self, work: Work, run: Coroutine[Any, Any, None], received: Received | None) -> None:
        task = asyncio.create_task(run)
        self._running[work] = (task, received)
        task.add_done_callback(lambda _: self._forget(work, received))

    def _forget(self, work: Work, received: Received | None) -> None:
        self._running.pop(work, None)
        self._due_running -= received is None
        (self._wake if received is not None else self._due_wake).set()

    async def _run(self, work: Work, received: Received) -> None:
        if await self._runner.run(work, self._settings.max_deliveries, received.delivery):
            crash_point(CrashPoint.COMMITTED_BEFORE_ACK)
            self._finish_delivery(received)
        else:
            self._hold(received, _BUSY_SECONDS)

    async def _run_due(self, work: Work) -> None:
        await self._runner.run(work, self._settings.max_deliveries, None)

    async def _bury(self, received: Received, error: Exception | None = None) -> None:
        cause = error or received.undecodable
        if cause is None or await self._runner.bury(received.work, cause, received.delivery):
            self._finish_delivery(received)
        else:
            self._hold(received, _OUTAGE_SECONDS)

    def _finish_delivery(self, received: Received) -> None:
        """Its outcome is durable: acknowledge, and let the lane go on."""
        self._subscriber.acknowledge([received.delivery])
        self._lanes.finish(received)
        self._wake.set()

    def _hold(self, received: Received, seconds: float) -> None:
        self._lanes.hold(received, time.monotonic() + seconds)

    def _cancel_one(self, task_id: UUID) -> None:
        for work, (task, _) in list(self._running.items()):
            if work.id == task_id and self._runner.cancel(work):
                task.cancel()

    # From Postgres -----------------------------------------------------------------------------

    async def _due_loop(self) -> None:
        shortest = self._settings.due_poll_min.total_seconds()
        longest = self._settings.due_poll_max.total_seconds()
        interval = shortest
        limit = max(1, self._settings.concurrency // 4)
        while True:
            self._due_wake.clear()
            self._on_progress("due")
            started: list[Work] = []
            free = limit - self._due_running
            if free > 0:
                try:
                    started = await self._claims.start_due(min(free, _DUE_BATCH))
                    self._note_recovery()
                except StoreUnavailable as error:
                    self._note_outage(error)
            for work in started:
                crash_point(CrashPoint.DUE_STARTED)
                self._due_running += 1
                self._spawn(work, self._run_due(work), None)
            interval = shortest if started else min(interval * 2, longest)
            if not started or free <= len(started):
                await _wait(self._due_wake, interval * (0.75 + random.random() / 2))

    def _wake_due_after(self, delay_seconds: float) -> None:
        if delay_seconds <= self._settings.due_poll_max.total_seconds() * 2:
            asyncio.get_running_loop().call_later(delay_seconds, self._due_wake.set)

    async def _reap_loop(self) -> None:
        retention = parse_duration(self._app.retention).total_seconds()
        lost_after = self._settings.lost_after.total_seconds()
        rounds = 0
        while True:
            await asyncio.sleep(self._settings.reap_every.total_seconds() * (0.5 + random.random()))
            self._on_progress("reap")
            try:
                abandoned = await self._reaps.reap_abandoned(_REAP_BATCH)
                gates = await self._reaps.repair_gates(_REAP_BATCH)
                lost = 0
                if rounds % _SLOW_REAP_EVERY == 0:
                    is_ordered = self._app.ordering == "key"
                    lost = await self._reaps.redrive_lost(lost_after, _REAP_BATCH, is_ordered=is_ordered)
                    await self._reaps.expire_finished(retention, _EXPIRE_BATCH)
                    await self._reaps.forget_workers()
            except StoreUnavailable as error:
                self._note_outage(error)
                continue
            rounds += 1
            for reason, count in (("abandoned", abandoned), ("lost", lost)):
                if count:
                    log.warning("task.reaped", group=self._app.name, count=count, reason=reason)
                    self._telemetry.add(names.TASKS_REAPED, count, group=self._app.name, reason=reason)
            if abandoned or gates or lost:
                self._due_wake.set()

    def _note_outage(self, error: StoreUnavailable) -> None:
        if self._outage_began is None:
            self._outage_began = time.monotonic()
            log.warning("worker.store_unavailable", group=self._app.name, error=str(error))

    def _note_recovery(self) -> None:
        if self._outage_began is not None:
            seconds = round(time.monotonic() - self._outage_began, 3)
            self._outage_began = None
            log.info("worker.store_recovered", group=self._app.name, seconds=seconds)

    # Ending ------------------------------------------------------------------------------------

    async def _drain(self, patience_seconds: float) -> None:
        """Nothing new; what runs may end within its patience, the rest goes back unspent."""
        queued = self._lanes.remove(lambda _: True)
        self._subscriber.release([received.delivery for received in queued])
        await self._finish({work: task for work, (task, _) in self._running.items()}, patience_seconds)

    async def _finish(self, works: Mapping[Work, asyncio.Task[None]], patience_seconds: float) -> None:
        """Wait for these; cancel those still in a handler and hand them back; let settling ones try their token."""
        if works:
            await asyncio.wait(works.values(), timeout=patience_seconds)
        unfinished = {work: task for work, task in works.items() if not task.done()}
        handling = [work for work in unfinished if self._runner.hand_back(work)]
        for work in handling:
            unfinished[work].cancel()
        if unfinished:
            await asyncio.wait(unfinished.values(), timeout=_GRACE_SECONDS)
        await self._give_back(handling)

    async def _give_back(self, works: Sequence[Work]) -> None:
        claimed = [work for work in works if work.token is not None]
        if not claimed:
            return
        try:
            async with asyncio.timeout(_GRACE_SECONDS):
                await self._settles.hand_back(claimed)
        except (StoreUnavailable, TimeoutError):
            log.warning("worker.store_unavailable", group=self._app.name, error="work is left to its lease")

    async def _abandon(self) -> None:
        """Nothing of this worker runs on; its lease ends now if the database can be told."""
        await _cancel([task for task, _ in list(self._running.values())])
        try:
            async with asyncio.timeout(_GRACE_SECONDS):
                await self._workers.leave()
        except (StoreUnavailable, TimeoutError):
            log.warning("worker.store_unavailable", group=self._app.name, error="the lease is left to lapse")


async def _wait(event: asyncio.Event, seconds: float) -> None:
    """Until the event is set, at most this long."""
    try:
        async with asyncio.timeout(max(seconds, 0.0)):
            await event.wait()
    except TimeoutError:
        return


async def _cancel(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=_GRACE_SECONDS)
