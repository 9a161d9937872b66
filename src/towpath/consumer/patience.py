"""Nothing stays unacknowledged for long: what runs is kept in the database, what waits goes back."""

import asyncio
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Final

from towpath.consumer.held import Held
from towpath.consumer.lanes import Received
from towpath.consumer.roster import Roster
from towpath.consumer.runs import Phase, Run
from towpath.consumer.upkeep import StoreWatch
from towpath.crashpoints import CrashPoint, crash_point
from towpath.errors import StoreUnavailable
from towpath.store.settles import SettleStore

_LONGEST_SECONDS: Final = 5.0


class Patience:
    """Looks for what was received longer than `ack_after` ago."""

    def __init__(
        self,
        ack_after: timedelta,
        *,
        held: Held,
        settles: SettleStore,
        roster: Roster,
        watch: StoreWatch,
        on_progress: Callable[[str], None],
    ) -> None:
        self._limit_seconds = ack_after.total_seconds()
        self._held = held
        self._settles = settles
        self._roster = roster
        self._watch = watch
        self._on_progress = on_progress

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await asyncio.sleep(min(self._limit_seconds / 5, _LONGEST_SECONDS))
            self._on_progress("patience")
            before = time.monotonic() - self._limit_seconds
            try:
                for run in self._roster.runs():
                    if run.received is not None and run.received.received_at < before:
                        await self._keep(run, run.received)
            except StoreUnavailable as error:
                self._watch.failed(error)
            self._held.release_when_older(before)

    async def _keep(self, run: Run, received: Received) -> None:
        """Hours-long work holds back neither a watermark nor a channel; followers of its key are parked."""
        if received.is_acknowledged or run.phase is not Phase.HANDLING:
            return
        if not await self._settles.keep(received.work):
            return
        if self._held.lanes.is_running(received):  # else it ended meanwhile
            crash_point(CrashPoint.KEPT_BEFORE_ACK)
            self._held.acknowledge([received])
            received.is_acknowledged = True
