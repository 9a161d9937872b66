"""When a member may take a task's message for lost."""

import asyncio
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID

import pytest

from towpath.app import App
from towpath.consumer.reaper import Reaper
from towpath.consumer.roster import Roster
from towpath.consumer.upkeep import StoreWatch
from towpath.errors import StoreUnavailable
from towpath.settings import WorkerSettings
from towpath.store.claims import ClaimStore
from towpath.store.database import Database
from towpath.store.reaping import ReapStore
from towpath.telemetry.metrics import Telemetry

LOST_AFTER = timedelta(hours=1)


@dataclass
class Stores:
    """The reaper's store and roster, where nothing is to be done."""

    redrives: list[float] = field(default_factory=list)
    looks: int = 0
    """For strays."""
    has_strays: bool = False
    lost_answer_at: float | None = None

    @property
    def due(self) -> "Stores":
        return self

    def __getattr__(self, name: str) -> Any:
        async def nothing(*_: object, **__: object) -> int:
            return 0

        return nothing

    async def hand_back_strays(self) -> int:
        self.looks += 1
        return 0

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


def reaper_of(stores: Stores, link: Link) -> Reaper:
    return Reaper(
        App("depot"),
        WorkerSettings(lost_after=LOST_AFTER),
        reaps=cast(ReapStore, stores),
        claims=cast(ClaimStore, stores),
        roster=cast(Roster, stores),
        watch=cast(StoreWatch, stores),
        wake=asyncio.Event(),
        telemetry=cast(Telemetry, stores),
        is_listening=lambda: link.is_connected,
        on_progress=lambda _: None,
        clock=link.clock,
    )


async def test_nothing_is_taken_for_lost_before_a_member_has_listened_as_long() -> None:
    """C10, C21: after an outage of all members, or of the broker, what waits there comes in its order."""
    stores, link = Stores(), Link()
    reaper = reaper_of(stores, link)

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


async def test_claims_without_an_answer_are_looked_for_when_there_may_be_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """C13, R3: for as long as it may arrive, else in slow rounds only: a look steps over all it ever ran."""
    clock = SimpleNamespace(now=1000.0, monotonic=lambda: clock.now)
    monkeypatch.setattr("towpath.consumer.reaper.time", clock)
    stores = Stores()
    reaper = reaper_of(stores, Link())

    async def looks(*, seconds_later: float, is_slow: bool = False) -> int:
        clock.now += seconds_later
        stores.looks = 0
        await reaper._round(is_slow=is_slow)
        return stores.looks

    assert await looks(seconds_later=0) == 0
    assert await looks(seconds_later=5, is_slow=True) == 1
    stores.lost_answer_at = clock.now
    assert [await looks(seconds_later=25) for _ in range(4)] == [1, 1, 1, 0]
    stores.has_strays = True
    assert await looks(seconds_later=5) == 1


async def test_a_claim_whose_answer_is_lost_is_noted() -> None:
    """C13: nobody knows whether it was committed."""

    class Away:
        schema = "towpath"

        @property
        def pool(self) -> Any:
            raise StoreUnavailable("away")

        transaction = pool

    claims = ClaimStore(cast(Database, Away()), "g", UUID(int=1))
    assert claims.lost_answer_at is None
    with pytest.raises(StoreUnavailable):
        await claims.claim([])
    assert claims.lost_answer_at is not None
