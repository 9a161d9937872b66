"""The two who start messages: what one lets the other start while a claim of its own is on its way."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import pytest

from tests.unit.test_lanes import received
from tests.unit.test_suspects import Clock
from towpath.consumer.breakers import Breakers
from towpath.consumer.held import Held, Suspect
from towpath.consumer.pump import Pump
from towpath.consumer.slots import Slots
from towpath.consumer.suspects import Suspects
from towpath.consumer.takeovers import Takeovers
from towpath.consumer.upkeep import DueLoop
from towpath.settings import WorkerSettings
from towpath.store.claims import Claimed

LAST = 5


class Idle:
    """Everything around a worker's loops, where nothing runs and each claim comes too late."""

    types: Sequence[str] = ()
    is_all = False
    count = 0

    def __init__(self, suspects: Suspects) -> None:
        self.suspects = suspects
        self.due: Sequence[int] = ()
        """Starts that rows which are due would be."""
        self.admitted: list[int] = []
        self.beside: list[list[int]] = []
        """At each claim: the starts that the other side might begin."""
        self.has_claimed = asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: 0

    def claimed(self) -> None:
        self.has_claimed.set()
        self.beside.append([start for start in (1, 2, LAST) if self.suspects.may_start(start, 0, "database")])

    async def claim(self, works: object, takes_over: bool = False) -> Claimed:
        self.claimed()
        return Claimed()

    async def start_due(self, limit: int, *, may_start: Callable[[str, int], bool], **_: object) -> list[Any]:
        self.admitted = [start for start in self.due if may_start("crate.lifted", start)]
        self.claimed()
        return []


class Worker:
    """The loops themselves."""

    def __init__(self) -> None:
        clock, settings, wake = Clock(), WorkerSettings(), asyncio.Event()
        self.suspects = Suspects(64, LAST, 30, clock)
        self.idle = Idle(self.suspects)
        slots = Slots({}, settings, wake=wake, wake_due=wake)
        self.held = Held(cast(Any, self.idle), slots, wake)
        parts: Mapping[str, Any] = {
            "claims": self.idle,
            "roster": self.idle,
            "watch": self.idle,
            "suspects": self.suspects,
            "pauses": self.idle,
        }
        loop: Mapping[str, Any] = {
            "waves": self.idle,
            "breakers": Breakers({}, clock),
            "wake": wake,
            "on_progress": lambda _: None,
        }
        ends: Mapping[str, Any] = {"runner": self.idle, "burials": self.idle, "repeats": self.idle}
        self.due = DueLoop(settings, slots=slots, **parts, **loop)
        self.takeovers = Takeovers(self.held, slots=slots, **parts)
        self.pump = Pump(
            settings, group="g", held=self.held, takeovers=self.takeovers, **ends, **parts, **loop
        )


@pytest.mark.parametrize(
    ("due", "admitted", "beside"),
    [
        ([LAST, 1, 2, LAST], [LAST], []),
        ([1, LAST, 1], [1], []),
        ([2, LAST], [2], []),
        ([1, 4, 4, 3, 1], [1, 4, 3, 1], [1, 2]),
        ([3] * 7, [3] * 4, [1, 2]),
    ],
)
async def test_one_look_at_the_database_admits_a_last_start_beside_nobody(
    due: Sequence[int], admitted: list[int], beside: list[int]
) -> None:
    """C19, D5: nor begins the broker's side anything until it runs. Others up to their limits."""
    worker = Worker()
    worker.idle.due = due
    with worker.suspects.look("database"):
        await worker.due._look(100)
    assert worker.idle.admitted == admitted
    assert worker.idle.beside == [beside]


@pytest.mark.parametrize(("start", "beside"), [(LAST, []), (2, [1, 2])])
async def test_a_takeover_counts_while_it_is_claimed(start: int, beside: list[int]) -> None:
    """C19, D5: no last start begins beside it, and nothing beside a last start."""
    worker = Worker()
    worker.held.is_current = lambda _: True  # type: ignore[method-assign]
    worker.held.suspects = [Suspect(received("a"), start), Suspect(received("b"), LAST)]
    await worker.takeovers.look(lambda *_: None)
    assert worker.idle.beside[0] == beside


async def test_a_claim_of_new_messages_counts_until_they_run() -> None:
    """C19, D5: a last start in the database is not admitted meanwhile."""
    worker = Worker()
    worker.held.is_current = lambda _: True  # type: ignore[method-assign]
    worker.held.lanes.add(received("a"))
    running = asyncio.create_task(worker.pump.run())
    await asyncio.wait_for(worker.idle.has_claimed.wait(), 60)
    running.cancel()
    await asyncio.wait([running])
    assert worker.idle.beside[0] == [1, 2]
