"""Tells metrics what the database knows of the group: waiting work shows in no broker's lag.

Every member does it, so that the figures are there as long as one lives: aggregate with `max`, not `sum`.
"""

import asyncio
import random
from collections.abc import Callable
from typing import Final

from towpath.consumer.pace import Pace
from towpath.consumer.upkeep import StoreWatch
from towpath.errors import StoreUnavailable
from towpath.store.census import CensusStore
from towpath.telemetry import names
from towpath.telemetry.metrics import Telemetry

_EVERY_SECONDS: Final = 15.0


class CensusLoop:
    """Looks every 15 seconds; more seldom where counting takes long."""

    def __init__(
        self,
        group: str,
        *,
        store: CensusStore,
        watch: StoreWatch,
        telemetry: Telemetry,
        on_progress: Callable[[str], None],
    ) -> None:
        self._group = group
        self._store = store
        self._watch = watch
        self._telemetry = telemetry
        self._on_progress = on_progress

    async def run(self) -> None:
        """Count until cancelled."""
        pace = Pace()
        while True:
            self._on_progress("census")
            if pace.is_due:
                try:
                    with pace:
                        await self._look()
                except StoreUnavailable as error:
                    self._watch.failed(error)
            await asyncio.sleep(_EVERY_SECONDS * (0.75 + random.random() / 2))

    async def _look(self) -> None:
        census = await self._store.take()
        for state in ("accepted", "running", "waiting", "parked", "unknown"):
            self._telemetry.set(
                names.TASKS_OPEN, getattr(census, state), group=self._group, state=state.upper()
            )
        self._telemetry.set(names.TASKS_DUE, census.due, group=self._group)
        self._telemetry.set(names.TASKS_OLDEST_DUE_AGE, census.oldest_due_seconds, group=self._group)
        self._telemetry.set(names.TASKS_OLDEST_RUNNING_AGE, census.oldest_running_seconds, group=self._group)
        self._telemetry.set(names.DEAD_LETTERS_OPEN, census.dead_letters, group=self._group)
