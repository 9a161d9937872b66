"""When a member may take a task's message for lost."""

import asyncio
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, cast

from towpath.app import App
from towpath.consumer.roster import Roster
from towpath.consumer.upkeep import Reaper, StoreWatch
from towpath.settings import WorkerSettings
from towpath.store.reaping import ReapStore
from towpath.telemetry.metrics import Telemetry

LOST_AFTER = timedelta(hours=1)


@dataclass
class Stores:
    """The reaper's store and roster, where nothing is to be done."""

    redrives: list[float] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        async def nothing(*_: object, **__: object) -> int:
            return 0

        return nothing

    async def redrive_lost(self, seconds: float, limit: int, *, is_ordered: bool) -> int:
        self.redrives.append(seconds)
        return 0


@dataclass
class Link:
    """The broker, and the time."""

    is_connected: bool = True
    now: float = 5000.0

    def clock(self) -> float:
        return self.now


async def test_nothing_is_taken_for_lost_before_a_member_has_listened_as_long() -> None:
    """C10, C21: after an outage of all members, or of the broker, what waits there comes in its order."""
    stores, link = Stores(), Link()
    reaper = Reaper(
        App("depot"),
        WorkerSettings(lost_after=LOST_AFTER),
        reaps=cast(ReapStore, stores),
        roster=cast(Roster, stores),
        watch=cast(StoreWatch, stores),
        wake=asyncio.Event(),
        telemetry=cast(Telemetry, stores),
        is_listening=lambda: link.is_connected,
        on_progress=lambda _: None,
        clock=link.clock,
    )

    async def redrives(*, seconds_later: float, is_connected: bool = True) -> int:
        stores.redrives.clear()
        link.now += seconds_later
        link.is_connected = is_connected
        await reaper._round(is_slow=True)
        return len(stores.redrives)

    assert await redrives(seconds_later=0) == 0, "it has just begun, whatever waits at the broker"
    assert await redrives(seconds_later=3599) == 0
    assert await redrives(seconds_later=1) == 1
    assert await redrives(seconds_later=60, is_connected=False) == 0
    assert await redrives(seconds_later=1) == await redrives(seconds_later=3599) == 0, "it begins anew"
    assert await redrives(seconds_later=1) == 1
