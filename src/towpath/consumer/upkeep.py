"""What starts from Postgres: the due rows."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Final

from towpath.consumer.breakers import Breakers
from towpath.consumer.pauses import Pauses
from towpath.consumer.roster import Roster, wait_for
from towpath.consumer.runs import Run
from towpath.consumer.slots import Slots
from towpath.consumer.suspects import Suspects
from towpath.consumer.waves import Waves
from towpath.crashpoints import CrashPoint, crash_point
from towpath.errors import StoreUnavailable
from towpath.settings import WorkerSettings
from towpath.store.claims import ClaimStore
from towpath.telemetry.logging import event_logger

_DUE_BATCH: Final = 100
_HINT_SECONDS: Final = 5.0
"""Due times further away are left to the poll."""

log = event_logger(__name__)


class StoreWatch:
    """Tells once that the database went away, and once that it came back."""

    def __init__(self, group: str) -> None:
        self._group = group
        self._failed_at: float | None = None

    def failed(self, error: StoreUnavailable) -> None:
        """A statement found the database away."""
        if self._failed_at is None:
            self._failed_at = time.monotonic()
            log.warning("worker.store_unavailable", group=self._group, error=str(error))

    def answered(self) -> None:
        """A statement was answered."""
        if self._failed_at is not None:
            seconds = round(time.monotonic() - self._failed_at, 3)
            self._failed_at = None
            log.info("worker.store_recovered", group=self._group, seconds=seconds)


class DueLoop:
    """Starts due rows beside the broker's messages, so that neither starves the other."""

    def __init__(
        self,
        settings: WorkerSettings,
        *,
        claims: ClaimStore,
        waves: Waves,
        roster: Roster,
        watch: StoreWatch,
        suspects: Suspects,
        slots: Slots,
        breakers: Breakers,
        pauses: Pauses,
        wake: asyncio.Event,
        on_progress: Callable[[str], None],
    ) -> None:
        self._settings = settings
        self._suspects = suspects
        self._slots = slots
        self._breakers = breakers
        self._pauses = pauses
        self._claims = claims
        self._waves = waves
        self._roster = roster
        self._watch = watch
        self._wake = wake
        self._on_progress = on_progress

    async def run(self) -> None:
        """Poll until cancelled: often while rows come, seldom when idle, at once on a hint."""
        shortest = self._settings.due_poll_min.total_seconds()
        longest = self._settings.due_poll_max.total_seconds()
        interval = shortest
        while True:
            self._wake.clear()
            self._on_progress("due")
            free = 0 if self._pauses.is_all else self._slots.due_room
            with self._suspects.look("database"):
                started = await self._look(min(free, _DUE_BATCH)) if free > 0 else 0
            if free <= 0:
                self._slots.break_promises()
            interval = shortest if started else min(interval * 2, longest)
            if not started or started >= free:
                await wait_for(self._wake, interval * (0.75 + random.random() / 2))

    async def _look(self, limit: int) -> int:
        promised = self._slots.promise()
        admitted: Counter[str] = Counter()
        try:
            started = await self._start(limit, admitted)
        except StoreUnavailable as error:
            self._watch.failed(error)
            started = Counter()
        else:
            self._watch.answered()
        finally:
            self._slots.redeem(promised)
        for type_ in (admitted - started).elements():
            self._slots.give_back_due(type_)
        return started.total()

    async def _start(self, limit: int, admitted: Counter[str]) -> Counter[str]:
        """Types of what started; `admitted` are those that were given a slot for it."""
        without = {*self._breakers.closed_types(), *self._slots.full_types(), *self._pauses.types}
        with ExitStack() as claims:
            may_start = self._admission(admitted, claims)
            works = await self._claims.start_due(limit, without=without, may_start=may_start)
            for work in works:
                crash_point(CrashPoint.DUE_STARTED)
                self._breakers.started(work.type, work)
            runs = [Run(work, self, None, self._suspects.started(work.deliveries)) for work in works]
            self._waves.start(runs)
        return Counter(work.type for work in works)

    def _admission(self, admitted: Counter[str], claims: ExitStack) -> Callable[[str, int], bool]:
        """Who may start in this round: who never lost a worker, suspects up to their limits, one probe."""

        def may_start(type_: str, start: int) -> bool:
            if admitted[type_] and self._breakers.is_open(type_):
                return False
            if not self._slots.has_due(type_):
                return False
            young_count = self._young_count() if start > 1 else 0  # it is not asked for then
            if not self._suspects.may_start(start, young_count, "database"):
                return False
            claims.enter_context(self._suspects.claiming(start))
            self._slots.take_due(type_)
            admitted[type_] += 1
            return True

        return may_start

    def _young_count(self) -> int:
        return self._roster.young_count(self._suspects.quiet_seconds)

    def handled(self, runs: Sequence[Run]) -> None:
        """They keep their slots until they are settled."""

    def settled(self, runs: Sequence[Run]) -> None:
        """The database has it."""

    def unsettled(self, run: Run) -> None:
        """Whoever took it over goes on with it."""

    def ended(self, runs: Sequence[Run]) -> None:
        """They run no more."""
        for run in runs:
            self._breakers.over(run.work)
            self._suspects.ended(run.work.deliveries, run.started_at)
            self._slots.give_back_due(run.work.type)
        self._wake.set()


def wake_after(wake: asyncio.Event, seconds: float) -> None:
    """Something of this process is due then: look before the next poll."""
    if seconds <= _HINT_SECONDS:
        asyncio.get_running_loop().call_later(seconds, wake.set)
