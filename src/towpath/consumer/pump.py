"""From lanes to running handlers and back: claim heads in batches, start them, acknowledge or hold them."""

import asyncio
import random
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Final
from uuid import UUID

from towpath.consumer.breakers import Breakers
from towpath.consumer.burials import UNSTORABLE, Burials
from towpath.consumer.held import Held
from towpath.consumer.lanes import Received
from towpath.consumer.pauses import Pauses
from towpath.consumer.repeats import Repeats
from towpath.consumer.roster import Roster, wait_for
from towpath.consumer.running import Runner
from towpath.consumer.runs import Phase, Run
from towpath.consumer.suspects import Suspects
from towpath.consumer.takeovers import Takeovers
from towpath.consumer.upkeep import StoreWatch
from towpath.consumer.waves import Waves
from towpath.crashpoints import CrashPoint, crash_point
from towpath.errors import StoreUnavailable
from towpath.settings import WorkerSettings
from towpath.store.claims import Claimed, ClaimStore
from towpath.store.work import Standing, Work
from towpath.telemetry.logging import event_logger

_IDLE_SECONDS: Final = 0.5
_GATHER_SECONDS: Final = 0.002
"""While others run, heads and slots that become free one by one gather into one claim: a claim of ten
costs nearly as much as one of two hundred. Whoever comes to an idle worker is claimed at once."""
_BUSY_SECONDS: Final = 0.1
_OUTAGE_SECONDS: Final = 0.5
_FULL_SECONDS: Final = 0.5
_STOPPED_SECONDS: Final = 0.5
_PAUSED_SHARE: Final = 0.25
"""Of the intake. When so much waits, messages of a paused handler make way: they wait in the database."""
log = event_logger(__name__)


class Pump:
    """Claims at most one message per lane at a time, and only for slots that are free."""

    def __init__(
        self,
        settings: WorkerSettings,
        *,
        group: str,
        held: Held,
        claims: ClaimStore,
        takeovers: Takeovers,
        runner: Runner,
        burials: Burials,
        roster: Roster,
        waves: Waves,
        watch: StoreWatch,
        suspects: Suspects,
        breakers: Breakers,
        pauses: Pauses,
        repeats: Repeats,
        wake: asyncio.Event,
        on_progress: Callable[[str], None],
    ) -> None:
        self._settings = settings
        self._group = group
        self._held = held
        self._claims = claims
        self._takeovers = takeovers
        self._runner = runner
        self._burials = burials
        self._roster = roster
        self._waves = waves
        self._watch = watch
        self._suspects = suspects
        self._breakers = breakers
        self._pauses = pauses
        self._repeats = repeats
        self._wake = wake
        self._on_progress = on_progress

    async def run(self) -> None:
        """Start the heads of ready lanes while slots are free, until cancelled."""
        while True:
            self._wake.clear()
            self._on_progress("claim")
            if self._pauses.is_all:
                self._held.release()
                await wait_for(self._wake, _IDLE_SECONDS)
                continue
            now = time.monotonic()
            held_until = self._held.lanes.release_due(now)
            await self._takeovers.look(self._dispatch)
            if self._roster.count and self._held.lanes.ready_count < self._settings.claim_batch:
                await asyncio.sleep(_GATHER_SECONDS)
            heads = [] if self._suspects.wants_quiet() else self._held.take_heads(self._settings.claim_batch)
            if heads:
                with self._suspects.claiming(1):
                    await self._start(heads)
            else:
                self._waves.hurry()
                patience = _IDLE_SECONDS if held_until is None else min(_IDLE_SECONDS, held_until - now)
                await wait_for(self._wake, patience)

    async def _start(self, heads: list[Received]) -> None:
        by_id: dict[UUID, Received] = {}
        for received in heads:
            if not self._held.is_current(received):
                self._held.drop(received)
            elif received.delivery.death is not None:
                self._spawn(received, self._burials.ingest(received, received.delivery.death))
            elif received.undecodable is not None:
                self._spawn(received, self._burials.bury(received, received.undecodable))
            elif received.work.id in by_id:
                self._held.hold(received, _BUSY_SECONDS)
            elif self._admits(received.work.type):
                self._breakers.started(received.work.type, received.work)
                received.is_postponed = False
                by_id[received.work.id] = received
            elif self._makes_way(received.work.type):
                received.is_postponed = True
                by_id[received.work.id] = received
            else:
                self._held.hold(received, self._rest_seconds(received.work.type))
        if by_id:
            await self._claim([received.work for received in by_id.values()], by_id)

    def _admits(self, type_: str) -> bool:
        return not self._pauses.holds(type_) and self._breakers.admits(type_)

    def _makes_way(self, type_: str) -> bool:
        """Whether what may not start waits in the database, where it holds nothing back at the broker."""
        is_crowded = len(self._held.lanes) > self._settings.max_in_flight * _PAUSED_SHARE
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
                self._held.hold(by_id[work.id], _OUTAGE_SECONDS * (0.5 + random.random()))
            return
        except UNSTORABLE as error:
            await self._isolate(works, by_id, error)
            return
        self._watch.answered()
        if claimed.started:
            crash_point(CrashPoint.CLAIMED_BEFORE_HANDLE)
        self._dispatch(claimed, by_id)
        if claimed.lost:
            await self._look_up(claimed.lost, by_id)

    async def _isolate(self, works: list[Work], by_id: Mapping[UUID, Received], error: Exception) -> None:
        """One message of the batch cannot be stored as it is: find it, bury it alone."""
        if len(works) == 1:
            received = by_id[works[0].id]
            self._spawn(received, self._burials.bury(received, error))
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
            log.info("task.parked", group=self._group, message_id=str(work.id), type=work.type)
            self._held.finish([by_id[work.id]])
        for work in claimed.contended:
            self._held.give_way(by_id[work.id], _BUSY_SECONDS)
        for work in claimed.full:
            self._held.hold(by_id[work.id], _FULL_SECONDS)

    async def _look_up(self, lost: Sequence[Work], by_id: Mapping[UUID, Received]) -> None:
        """What became of messages that somebody else had claimed."""
        try:
            findings = await self._claims.findings([work.id for work in lost])
        except StoreUnavailable as error:
            self._watch.failed(error)
            for work in lost:
                self._held.hold(by_id[work.id], _OUTAGE_SECONDS)
            return
        settled = sum(finding.standing is Standing.SETTLED for finding in findings.values())
        self._repeats.note(settled, len(by_id))
        for work in lost:
            received, finding = by_id[work.id], findings[work.id]
            if self._burials.is_of_another_database(work, finding.standing):
                self._spawn(received, self._burials.bury_foreign(received))
            elif self._runner.may_acknowledge(work, finding.standing):
                self._held.finish([received])
            elif finding.standing is Standing.ABANDONED:
                self._held.suspect(received, finding.deliveries + 1)
            else:
                self._held.hold(received, _BUSY_SECONDS)

    def handled(self, runs: Sequence[Run]) -> None:
        """Their handlers are through: others may start while they are settled."""
        for run in runs:
            if run.received is not None:
                self._held.leave_slot(run.received)

    def settled(self, runs: Sequence[Run]) -> None:
        """Their outcome is durable: acknowledge."""
        crash_point(CrashPoint.COMMITTED_BEFORE_ACK)
        self._held.finish([run.received for run in runs if run.received is not None])

    async def _postpone(self, received: Received) -> None:
        if await self._runner.postpone(received.work):
            self._held.finish([received])
        else:
            self._held.hold(received, _BUSY_SECONDS)

    def unsettled(self, run: Run) -> None:
        """It lost its token and has not ended: ask again."""
        if run.received is not None:
            self._held.hold(run.received, _BUSY_SECONDS)

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
            if run.phase is not Phase.HANDED_BACK and self._held.lanes.is_running(run.received):
                self._held.hold(run.received, _BUSY_SECONDS)
            self._held.leave_slot(run.received)
            self._held.lanes.make_way(run.received)
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
