"""What dead workers and vanished messages left behind, and what is over, looked for now and then."""

import asyncio
import random
import time
from collections.abc import Callable
from typing import Final

from towpath.app import App
from towpath.backoff import parse_duration
from towpath.consumer.pace import Pace
from towpath.consumer.roster import Roster
from towpath.consumer.upkeep import StoreWatch
from towpath.errors import StoreUnavailable
from towpath.settings import WorkerSettings
from towpath.store.claims import ClaimStore
from towpath.store.reaping import ReapStore
from towpath.telemetry import names
from towpath.telemetry.logging import event_logger
from towpath.telemetry.metrics import Telemetry

_REAP_BATCH: Final = 100
_GATE_BATCH: Final = 5000
_EXPIRE_BATCH: Final = 1000
_SLOW_EVERY: Final = 12
_STRAY_SECONDS: Final = 60.0
"""So long after its answer was lost a claim may still arrive."""

log = event_logger(__name__)


class Reaper:
    """Takes back what nobody runs any more; every member does it, jittered, without a leader."""

    def __init__(
        self,
        app: App,
        settings: WorkerSettings,
        *,
        reaps: ReapStore,
        claims: ClaimStore,
        roster: Roster,
        watch: StoreWatch,
        wake: asyncio.Event,
        telemetry: Telemetry,
        is_listening: Callable[[], bool],
        on_progress: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._app = app
        self._settings = settings
        self._reaps = reaps
        self._claims = claims
        self._roster = roster
        self._is_listening = is_listening
        self._clock = clock
        self._listening_since: float | None = None
        self._pace, self._gate_pace = Pace(), Pace()
        self._watch = watch
        self._wake = wake
        self._telemetry = telemetry
        self._on_progress = on_progress

    async def run(self) -> None:
        """Look every now and then until cancelled."""
        rounds = 0
        while True:
            await asyncio.sleep(self._settings.reap_every.total_seconds() * (0.5 + random.random()))
            self._on_progress("reap")
            try:
                await self._round(is_slow=rounds % _SLOW_EVERY == 0 and self._pace.is_due)
            except StoreUnavailable as error:
                self._watch.failed(error)
            else:
                rounds += 1

    def _has_listened(self, seconds: float) -> bool:
        """Whether messages could come for so long: with the broker away or the group paused none is lost."""
        if not self._is_listening():
            self._listening_since = None
            return False
        if self._listening_since is None:
            self._listening_since = self._clock()
        return self._clock() - self._listening_since >= seconds

    async def _round(self, *, is_slow: bool) -> None:
        lost_after = self._settings.lost_after.total_seconds()
        may_be_lost = self._has_listened(lost_after)
        self._note(await self._reaps.reap_abandoned(_REAP_BATCH), "abandoned")
        if self._roster.has_strays or self._claims.lost_answer_at is not None:
            await self._look_for_strays()
        if self._gate_pace.is_due:
            with self._gate_pace:
                if await self._reaps.repair_gates(_GATE_BATCH):
                    self._wake.set()
        if is_slow:
            with self._pace:
                await self._slow_round(lost_after if may_be_lost else None)

    async def _look_for_strays(self) -> None:
        now, lost_at = time.monotonic(), self._claims.lost_answer_at
        self._note(await self._roster.hand_back_strays(), "stray")
        if lost_at is not None and lost_at == self._claims.lost_answer_at and now - lost_at > _STRAY_SECONDS:
            self._claims.lost_answer_at = None

    async def _slow_round(self, lost_after: float | None) -> None:
        """What reads more the longer vacuum is held back, or is in no hurry."""
        if await self._claims.due.look_everywhere():
            self._wake.set()
        self._note(await self._reaps.reap_abandoned(_REAP_BATCH, everywhere=True), "abandoned")
        await self._look_for_strays()
        self._on_progress("reap")
        if lost_after is not None:
            self._note(await self._reaps.release_lost(lost_after, _REAP_BATCH), "lost")
            is_ordered = self._app.ordering == "key"
            self._note(await self._reaps.redrive_lost(lost_after, _REAP_BATCH, is_ordered=is_ordered), "lost")
            self._on_progress("reap")
        retention = parse_duration(self._app.retention).total_seconds()
        while await self._reaps.expire_finished(retention, _EXPIRE_BATCH) == _EXPIRE_BATCH:
            self._on_progress("reap")
        await self._reaps.forget_workers()

    def _note(self, count: int, reason: str) -> None:
        if count:
            self._wake.set()
            log.warning("task.reaped", group=self._app.name, count=count, reason=reason)
            self._telemetry.add(names.TASKS_REAPED, count, group=self._app.name, reason=reason)
