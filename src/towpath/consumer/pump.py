"""From the broker to running handlers: receive, lane by key, claim in batches, acknowledge."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final
from uuid import UUID

import asyncpg

from towpath.app import App
from towpath.brokers.ports import BrokerDeath, Delivery, Subscriber
from towpath.consumer.breakers import Breakers
from towpath.consumer.intake import Undecodable, read, skipped
from towpath.consumer.lanes import Lanes, Received
from towpath.consumer.pauses import Pauses
from towpath.consumer.roster import Roster, wait_for
from towpath.consumer.running import Runner
from towpath.consumer.runs import Phase, Run
from towpath.consumer.slots import Limit, Slots
from towpath.consumer.suspects import Suspects
from towpath.consumer.upkeep import StoreWatch
from towpath.consumer.waves import Waves
from towpath.crashpoints import CrashPoint, crash_point
from towpath.errors import DecodeError, StoreUnavailable
from towpath.settings import WorkerSettings
from towpath.store.claims import Claimed, ClaimStore
from towpath.store.settles import SettleStore
from towpath.store.work import Standing, Work
from towpath.telemetry import names
from towpath.telemetry.logging import event_logger
from towpath.telemetry.metrics import Telemetry

_RECEIVE_COUNT: Final = 500
_IDLE_SECONDS: Final = 0.5
_GATHER_SECONDS: Final = 0.002
"""While others run, heads and slots that become free one by one gather into one claim: a claim of ten
costs nearly as much as one of two hundred. Whoever comes to an idle worker is claimed at once."""
_BUSY_SECONDS: Final = 0.1
_OUTAGE_SECONDS: Final = 0.5
_FULL_SECONDS: Final = 0.5
_STOPPED_SECONDS: Final = 0.5
_PATIENCE_SECONDS: Final = 5.0
_PAUSED_SHARE: Final = 0.25
"""Of the intake. When so much waits, messages of a paused handler make way: they wait in the database."""
_UNSTORABLE: Final = (
    asyncpg.DataError,
    asyncpg.IntegrityConstraintViolationError,
    asyncpg.ProgramLimitExceededError,
)
"""What the database says about one message of a batch."""
_WRONG_DATABASE: Final = (
    "the task's row is in another installation's database: submit works within one database, send between two"
)

log = event_logger(__name__)


class Pump:
    """Claims at most one message per lane at a time, and only for slots that are free."""

    def __init__(
        self,
        app: App,
        subscriber: Subscriber,
        settings: WorkerSettings,
        *,
        installation: str,
        destinations: Mapping[str, str],
        claims: ClaimStore,
        settles: SettleStore,
        runner: Runner,
        roster: Roster,
        waves: Waves,
        watch: StoreWatch,
        suspects: Suspects,
        slots: Slots,
        breakers: Breakers,
        pauses: Pauses,
        wake: asyncio.Event,
        telemetry: Telemetry,
        on_progress: Callable[[str], None],
    ) -> None:
        self._app = app
        self._subscriber = subscriber
        self._settings = settings
        self._installation = installation
        self._destinations = destinations
        self._claims = claims
        self._settles = settles
        self._runner = runner
        self._roster = roster
        self._waves = waves
        self._watch = watch
        self._suspects = suspects
        self._slots = slots
        self._breakers = breakers
        self._pauses = pauses
        self._suspected: list[tuple[Received, int]] = []
        """Heads whose worker died, with the number of starts the next one is."""
        self._telemetry = telemetry
        self._on_progress = on_progress
        self._lanes = Lanes()
        self._wake = wake

    def release(self, which: Callable[[Received], bool] = lambda _: True) -> None:
        """Give queued messages back to the broker."""
        queued = self._lanes.remove(which)
        leaving = [received for received, _ in self._suspected if which(received)]
        self._suspected = [suspect for suspect in self._suspected if suspect[0] not in leaving]
        for received in leaving:
            self._lanes.finish(received)
        queued += leaving
        self._subscriber.release([received.delivery for received in queued])

    async def receive_loop(self) -> None:
        """Fill the lanes; the subscriber bounds what is in flight."""
        while True:
            self._on_progress("receive")
            if self._pauses.is_all:
                await asyncio.sleep(_IDLE_SECONDS)
                continue
            deliveries = await self._subscriber.receive(_RECEIVE_COUNT, timeout_seconds=_IDLE_SECONDS)
            if deliveries:
                crash_point(CrashPoint.RECEIVED_BEFORE_CLAIM)
                self._accept(deliveries)
                self._wake.set()

    def _accept(self, deliveries: Sequence[Delivery]) -> None:
        now = datetime.now(UTC)
        for source, amount in Counter(delivery.source for delivery in deliveries).items():
            self._telemetry.add(
                names.CONSUMED_MESSAGES,
                amount,
                operation="receive",
                destination=source,
                group=self._app.name,
            )
        for delivery in deliveries:
            name = self._destinations.get(delivery.source)
            asked = read(self._app, delivery, now, destination=name)
            if delivery.death is not None:
                work = asked.work if isinstance(asked, Undecodable) else asked
                self._lanes.add(Received(work, delivery))
            elif reason := skipped(self._app, delivery, asked, name or delivery.source):
                self._skip(delivery, reason)
            elif isinstance(asked, Undecodable):
                self._lanes.add(Received(asked.work, delivery, undecodable=asked.error))
            else:
                self._lanes.add(Received(asked, delivery))

    def _skip(self, delivery: Delivery, reason: str) -> None:
        self._subscriber.acknowledge([delivery])
        self._telemetry.add(
            names.SKIPPED_MESSAGES, 1, destination=delivery.source, group=self._app.name, reason=reason
        )

    async def claim_loop(self) -> None:
        """Start the heads of ready lanes while slots are free."""
        while True:
            self._wake.clear()
            self._on_progress("claim")
            if self._pauses.is_all:
                self.release()
                await wait_for(self._wake, _IDLE_SECONDS)
                continue
            now = time.monotonic()
            held_until = self._lanes.release_due(now)
            await self._start_suspects()
            if self._roster.count and self._lanes.ready_count < self._settings.claim_batch:
                await asyncio.sleep(_GATHER_SECONDS)
            is_quiet = self._suspects.wants_quiet()
            heads = [] if is_quiet else self._lanes.take(self._settings.claim_batch, self._take_slot)
            if heads:
                await self._start(heads)
            else:
                patience = _IDLE_SECONDS if held_until is None else min(_IDLE_SECONDS, held_until - now)
                await wait_for(self._wake, patience)

    async def patience_loop(self) -> None:
        """Leave nothing unacknowledged for long: keep running work in the database, give the rest back."""
        limit = self._settings.ack_after.total_seconds()
        while True:
            await asyncio.sleep(min(limit / 5, _PATIENCE_SECONDS))
            self._on_progress("patience")
            before = time.monotonic() - limit
            try:
                for run in self._roster.runs():
                    if run.received is not None and run.received.received_at < before:
                        await self._keep(run, run.received)
            except StoreUnavailable as error:
                self._watch.failed(error)
            waiting = (*self._lanes, *(received for received, _ in self._suspected))
            if any(received.received_at < before for received in waiting):
                self.release()

    async def _keep(self, run: Run, received: Received) -> None:
        """Hours-long work holds back neither a watermark nor a channel; followers of its key are parked."""
        if received.is_acknowledged or run.phase is not Phase.HANDLING:
            return
        if not await self._settles.keep(received.work):
            return
        if self._lanes.is_running(received):  # else it ended meanwhile
            crash_point(CrashPoint.KEPT_BEFORE_ACK)
            self._acknowledge([received])
            received.is_acknowledged = True

    def _take_slot(self, received: Received) -> Limit | None:
        obstacle = self._slots.obstacle(received.work.type)
        if obstacle is None:
            self._slots.take(received.work.type)
            received.slot = received.work.type
        return obstacle

    def _leave_slot(self, received: Received) -> None:
        type_, received.slot = received.slot, None
        if type_ is not None:
            self._slots.give_back(type_)

    async def _start(self, heads: list[Received]) -> None:
        by_id: dict[UUID, Received] = {}
        for received in heads:
            if not self._subscriber.is_current(received.delivery):
                self._drop(received)
            elif received.delivery.death is not None:
                self._spawn(received, self._ingest(received, received.delivery.death))
            elif received.undecodable is not None:
                self._spawn_burial(received, received.undecodable)
            elif received.work.id in by_id:
                self._hold(received, _BUSY_SECONDS)
            elif self._admits(received.work.type):
                self._breakers.started(received.work.type, received.work)
                received.is_postponed = False
                by_id[received.work.id] = received
            elif self._makes_way(received.work.type):
                received.is_postponed = True
                by_id[received.work.id] = received
            else:
                self._hold(received, self._rest_seconds(received.work.type))
        if by_id:
            await self._claim([received.work for received in by_id.values()], by_id)

    def _admits(self, type_: str) -> bool:
        return not self._pauses.holds(type_) and self._breakers.admits(type_)

    def _makes_way(self, type_: str) -> bool:
        """Whether what may not start waits in the database, where it holds nothing back at the broker."""
        is_crowded = len(self._lanes) > self._settings.max_in_flight * _PAUSED_SHARE
        return is_crowded or self._breakers.outlasted_a_probe(type_)

    def _rest_seconds(self, type_: str) -> float:
        return _STOPPED_SECONDS if self._pauses.holds(type_) else self._breakers.seconds_until_probe(type_)

    async def _claim(self, works: list[Work], by_id: Mapping[UUID, Received]) -> None:
        try:
            claimed = await self._claims.claim(works)
        except StoreUnavailable as error:
            self._watch.failed(error)
            for work in works:
                self._breakers.over(work)
                self._hold(by_id[work.id], _OUTAGE_SECONDS * (0.5 + random.random()))
            return
        except _UNSTORABLE as error:
            await self._isolate(works, by_id, error)
            return
        self._watch.answered()
        if claimed.started:
            crash_point(CrashPoint.CLAIMED_BEFORE_HANDLE)
        self._dispatch(claimed, by_id)
        await self._look_up(claimed.lost, by_id)

    async def _isolate(self, works: list[Work], by_id: Mapping[UUID, Received], error: Exception) -> None:
        """One message of the batch cannot be stored as it is: find it, bury it alone."""
        if len(works) == 1:
            self._spawn_burial(by_id[works[0].id], error)
            return
        middle = len(works) // 2
        await self._claim(works[:middle], by_id)
        await self._claim(works[middle:], by_id)

    def _dispatch(self, claimed: Claimed, by_id: Mapping[UUID, Received]) -> None:
        for work in (*claimed.parked, *claimed.contended, *claimed.full, *claimed.lost):
            self._breakers.over(work)
        started = [by_id[work.id] for work in claimed.started]
        for received in started:
            if received.is_postponed:
                self._spawn(received, self._postpone(received), Phase.SETTLING)
        self._waves.start([self._run_of(received) for received in started if not received.is_postponed])
        for work in claimed.parked:
            log.info("task.parked", group=self._app.name, message_id=str(work.id), type=work.type)
            self._finish([by_id[work.id]])
        for work in claimed.contended:
            self._hold(by_id[work.id], _BUSY_SECONDS)
        for work in claimed.full:
            self._hold(by_id[work.id], _FULL_SECONDS)

    async def _look_up(self, lost: Sequence[Work], by_id: Mapping[UUID, Received]) -> None:
        """What became of messages that somebody else had claimed."""
        if not lost:
            return
        try:
            findings = await self._claims.findings([work.id for work in lost])
        except StoreUnavailable as error:
            self._watch.failed(error)
            for work in lost:
                self._hold(by_id[work.id], _OUTAGE_SECONDS)
            return
        for work in lost:
            received, finding = by_id[work.id], findings[work.id]
            if self._is_of_another_database(work, finding.standing):
                self._spawn_burial(received, DecodeError("wrong_database", _WRONG_DATABASE))
            elif self._runner.may_acknowledge(work, finding.standing):
                self._finish([received])
            elif finding.standing is Standing.ABANDONED:
                self._suspected.append((received, finding.deliveries + 1))
                self._leave_slot(received)
            else:
                self._hold(received, _BUSY_SECONDS)

    async def _start_suspects(self) -> None:
        """Take over what dead workers left, as many at once as is safe for their neighbours."""
        with self._suspects.look("broker"):
            for suspect in list(self._suspected):
                received, start = suspect
                if suspect not in self._suspected:
                    continue  # given back to the broker while another was taken over
                if not self._subscriber.is_current(received.delivery):
                    self._suspected.remove(suspect)
                    self._drop(received)
                elif self._may_start(received, start):
                    self._suspected.remove(suspect)
                    self._take_slot(received)
                    await self._take_over(received)

    def _may_start(self, suspect: Received, start: int) -> bool:
        type_ = suspect.work.type
        if self._pauses.holds(type_) or self._slots.obstacle(type_) is not None:
            return False
        young_count = self._roster.young_count(self._suspects.quiet_seconds)
        return self._suspects.may_start(start, young_count, "broker")

    async def _take_over(self, received: Received) -> None:
        work = received.work
        try:
            claimed = await self._claims.claim([work], takes_over=True)
        except StoreUnavailable as error:
            self._watch.failed(error)
            self._hold(received, _OUTAGE_SECONDS)
            return
        self._dispatch(claimed, {work.id: received})
        if claimed.lost:
            self._hold(received, _BUSY_SECONDS)

    def _is_of_another_database(self, work: Work, standing: Standing) -> bool:
        """A task whose body is in a row that this database never had."""
        if standing is not Standing.MISSING or work.envelope is None or work.envelope.body != "row":
            return False
        return work.envelope.installation != self._installation

    def handled(self, runs: Sequence[Run]) -> None:
        """Their handlers are through: others may start while they are settled."""
        for run in runs:
            if run.received is not None:
                self._leave_slot(run.received)

    def settled(self, runs: Sequence[Run]) -> None:
        """Their outcome is durable: acknowledge."""
        crash_point(CrashPoint.COMMITTED_BEFORE_ACK)
        self._finish([run.received for run in runs if run.received is not None])

    async def _postpone(self, received: Received) -> None:
        if await self._runner.postpone(received.work):
            self._finish([received])
        else:
            self._hold(received, _BUSY_SECONDS)

    def unsettled(self, run: Run) -> None:
        """It lost its token and has not ended: ask again."""
        if run.received is not None:
            self._hold(run.received, _BUSY_SECONDS)

    def ended(self, runs: Sequence[Run]) -> None:
        """They run no more; one that was handed back makes way, and may come again.

        One that has no outcome and was not handed back (its handler cancelled the task) is asked for again:
        the broker takes it to be in good hands.
        """
        for run in runs:
            self._breakers.over(run.work)
            self._suspects.ended(run.work.deliveries, run.started_at)
            if run.received is None:
                continue
            if run.phase is not Phase.HANDED_BACK and self._lanes.is_running(run.received):
                self._hold(run.received, _BUSY_SECONDS)
            self._leave_slot(run.received)
            self._lanes.make_way(run.received)
        self._wake.set()

    def _spawn(
        self, received: Received, act: Coroutine[Any, Any, None], phase: Phase = Phase.HANDLING
    ) -> None:
        """What runs no handler: a task of its own."""
        run = self._run_of(received)
        run.phase, run.began_at = phase, run.started_at
        self._roster.spawn([run], act)

    def _run_of(self, received: Received) -> Run:
        return Run(received.work, self, received, self._suspects.started(received.work.deliveries))

    def _spawn_burial(self, received: Received, error: Exception) -> None:
        self._spawn(received, self._bury(received, error))

    async def _bury(self, received: Received, error: Exception) -> None:
        if await self._runner.bury(received.work, error, received.delivery):
            self._finish([received])
        else:
            self._hold(received, _OUTAGE_SECONDS)

    async def _ingest(self, received: Received, death: BrokerDeath) -> None:
        """The broker dead-lettered it by itself: into the catalog, unless its task goes on without it."""
        standing = await self._runner.ingest(received.work, death, received.delivery)
        if self._is_of_another_database(received.work, standing):
            await self._bury(received, DecodeError("wrong_database", _WRONG_DATABASE))
        elif self._runner.may_acknowledge(received.work, standing):
            self._finish([received])
        else:
            self._hold(received, _OUTAGE_SECONDS)

    def _finish(self, all_received: Sequence[Received]) -> None:
        """Their outcome is durable: acknowledge, and let their lanes go on."""
        for received in all_received:
            self._leave_slot(received)
        self._acknowledge([received for received in all_received if not received.is_acknowledged])

    def _acknowledge(self, all_received: Sequence[Received]) -> None:
        self._subscriber.acknowledge([received.delivery for received in all_received])
        for received in all_received:
            self._lanes.finish(received)
        self._wake.set()

    def _drop(self, received: Received) -> None:
        """It is not this member's any more."""
        self._leave_slot(received)
        self._lanes.finish(received)

    def _hold(self, received: Received, seconds: float) -> None:
        self._leave_slot(received)
        if not received.is_acknowledged:  # else the database holds it
            self._lanes.hold(received, time.monotonic() + seconds)
