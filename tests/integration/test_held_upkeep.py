"""What a transaction that is left open for long costs members: nothing that it made dead can be removed."""

import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import pytest
import pytest_asyncio

from tests.integration.test_held_horizon import held_horizon
from towpath.store import due
from towpath.store.claims import ClaimStore
from towpath.store.database import Database
from towpath.store.groups import Terms
from towpath.store.reaping import ReapStore
from towpath.store.settles import SettleStore
from towpath.store.workers import WorkerStore

RETRIES = 10_000
WORKER = UUID(int=1)
WAITING = """
insert into towpath.task (consumer_group, id, type, kind, source, key, lane, position, state, held_by, due_at,
                          waiting_for)
  select 'g', gen_random_uuid(), $1, 'event', 's', null, null, null, 'WAITING', 'database',
         towpath.clock() + make_interval(secs => $2 + $3 * n), 'retry'
    from generate_series(1, $4::int) n
"""
FINISH = """
update towpath.task set state = 'SUCCEEDED', worker = null, token = null, finished_at = towpath.clock()
 where state = 'RUNNING' and worker = $1
"""
RUNNING = """
insert into towpath.task (consumer_group, id, type, kind, source, state, held_by, worker, token)
  select 'g', gen_random_uuid(), 't', 'event', 's', 'RUNNING', 'database', $1, gen_random_uuid()
    from generate_series(1, $2::int) n
"""


class Counted:
    """A pool that counts the pages of what it reads."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self.pages = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    async def fetch(self, sql: str, *arguments: Any) -> Any:
        begins = next(line for line in sql.splitlines() if not line.startswith("--"))
        if begins.startswith(("select", "with")):
            explained = await self._pool.fetchval(
                f"explain (analyze, buffers, format json) {sql}", *arguments
            )
            plan = json.loads(explained)[0]["Plan"]
            self.pages += plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]
        return await self._pool.fetch(sql, *arguments)


class Member:
    """The stores of one member of the group."""

    def __init__(self, database: Database) -> None:
        self.pool = Counted(database.pool)
        self.database = database
        self.database._pool = self.pool  # type: ignore[assignment]
        self.claims = ClaimStore(self.database, "g", WORKER, types=["t"])
        self.due = self.claims.due
        self.reaps = ReapStore(self.database, "g")
        self.workers = WorkerStore(self.database, "g", WORKER, 3600, Terms("none", None))
        self.settles = SettleStore(self.database, "g", WORKER)

    async def pages(self, look: Any) -> int:
        """Of the least of some looks: pages are split now and then."""
        found = []
        for _ in range(3):
            self.pool.pages = 0
            await look()
            found.append(self.pool.pages)
        return min(found)

    async def starts(self, **how: Any) -> int:
        """How many due rows begin."""
        return len(await self.claims.start_due(1000, **how))


@pytest_asyncio.fixture
async def member(migrated_url: str, db: "asyncpg.Connection[Any]") -> AsyncIterator[Member]:
    await db.execute(
        "insert into towpath.worker (id, consumer_group, host, lease_until) "
        "values ($1, 'g', 'h', 'infinity')",
        WORKER,
    )
    database = Database(migrated_url)
    await database.start()
    yield Member(database)
    await database.aclose()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The member's, which says when a look is wider."""
    clock = SimpleNamespace(now=1000.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(due, "time", clock)
    return clock


async def test_a_look_for_due_rows_reads_as_little_after_many_retries_under_a_held_horizon(
    db: Any, migrated_url: str, member: Member
) -> None:
    """R3: what was started is not stepped over, by no look but that at everything."""
    await db.execute(WAITING, "t", 3600.0, 1.0, RETRIES)
    before = await member.pages(member.starts)
    async with held_horizon(migrated_url):
        await db.execute(WAITING, "t", -3600.0, 0.1, RETRIES)
        assert await member.due.look_everywhere()
        drained = 0
        while started := await member.starts():
            drained += started
            await db.execute(FINISH, WORKER)
        after = await member.pages(member.starts)
    assert drained == RETRIES
    assert after <= before + 10, (before, after)


async def test_rows_of_a_held_type_are_found_when_they_may_start(db: Any, member: Member) -> None:
    """C14: however long that took, and others went on."""
    await db.execute(WAITING, "t", -1800.0, 0.0, 3)
    await db.execute(WAITING, "u", -3600.0, 0.0, 3)
    assert await member.starts(without={"t"}) == 3
    assert await member.starts(without={"t"}) == 0
    assert await member.starts(without={"u"}) == 3


async def test_a_row_whose_lane_runs_something_is_found_when_that_has_ended(
    db: Any, member: Member, clock: SimpleNamespace
) -> None:
    """C10: a delayed task, or a replay, whose key is busy."""
    await db.execute(WAITING, "t", -60.0, 0.0, 1)
    await db.execute("update towpath.task set lane = 'k'")
    await db.execute(RUNNING, WORKER, 1)
    await db.execute("update towpath.task set lane = 'k' where state = 'RUNNING'")
    assert [await member.starts() for _ in range(3)] == [0, 0, 0]
    await db.execute(FINISH, WORKER)
    assert await member.starts() == 1


async def test_rows_committed_after_their_due_time_are_found(
    db: Any, member: Member, clock: SimpleNamespace
) -> None:
    """C3: of a transaction that took long, at the next look that is so wide, in the end at everything."""
    assert await member.starts() == 0
    for late_seconds in (2.0, 8.0, 20.0):
        await db.execute(WAITING, "t", -late_seconds, 0.0, 1)
        clock.now += 64
        assert await member.starts() == 1

    await db.execute(WAITING, "t", -100.0, 0.0, 1)
    await db.execute(WAITING, "unknown here", -100.0, 0.0, 1)
    clock.now += 64
    assert await member.starts() == 0
    assert await member.due.look_everywhere()
    assert await member.starts() == 2
    assert not await member.due.look_everywhere()


async def test_the_reaper_reads_as_little_after_many_messages_under_a_held_horizon(
    db: Any, migrated_url: str, member: Member
) -> None:
    """R3: it steps over what no living worker ran, and over what a dead one did for a minute only."""

    async def look() -> None:
        assert await member.reaps.reap_abandoned(100) == 0
        assert await member.workers.cancellations([UUID(int=7)]) == set()

    before = await member.pages(look)
    async with held_horizon(migrated_url):
        await db.execute(RUNNING, WORKER, RETRIES)
        await db.execute(FINISH, WORKER)
        after = await member.pages(look)
        assert after <= before + 10, (before, after)
        await db.execute("update towpath.worker set lease_until = towpath.clock() - interval '2 minutes'")
        await look()
        assert await member.pages(look) <= before + 10

        await db.execute(RUNNING, WORKER, 1)
        assert await member.reaps.reap_abandoned(100, everywhere=True) == 1
        await db.execute(RUNNING, uuid4(), 1)
        assert await member.reaps.reap_abandoned(100) == 0
        assert await member.reaps.reap_abandoned(100, everywhere=True) == 1
