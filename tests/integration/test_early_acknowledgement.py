"""Work that runs longer than `ack_after` is kept by the database, so that the broker may forget it."""

import asyncio
import threading
from datetime import timedelta
from typing import Any
from uuid import uuid4

import asyncpg
import pytest
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from tests.integration.engine import Posted, bench, depot, until
from towpath import App, Call, RetryPolicy
from towpath.failures import Failure
from towpath.states import TaskState
from towpath.store.database import Database
from towpath.store.settles import SettleStore
from towpath.store.sync_settles import SyncSettleStore
from towpath.store.work import Work

PROMPT = {"ack_after": timedelta(milliseconds=50)}


class Slow:
    """A handler that takes as long as a test wants."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.may_end = asyncio.Event()

    def app(self) -> App:
        app = depot(retry=RetryPolicy(attempts=3, base="5ms", cap="10ms"))

        @app.idempotent()
        async def carry(posted: Posted, call: Call) -> None:
            self.begun.append(posted.number)
            if posted.number == 1:
                await self.may_end.wait()

        return app


async def test_long_work_is_acknowledged_while_it_runs_and_its_key_waits(migrated_url: str) -> None:
    """S7: nothing stays unacknowledged; followers are parked and run afterwards, in order."""
    slow = Slow()
    async with bench(slow.app(), migrated_url, **PROMPT) as depot_, depot_.member():
        first = await depot_.publish(Posted("a", 1))
        second, third = [await depot_.publish(Posted("a", number)) for number in (2, 3)]
        other = await depot_.publish(Posted("b", 4))
        await depot_.reaches(other, "SUCCEEDED")
        await depot_.reaches(second, "PARKED")
        await depot_.reaches(third, "PARKED")
        await depot_.is_drained()
        row = await depot_.row(first)
        assert (row["state"], row["held_by"]) == ("RUNNING", "database")
        assert row["payload"] is not None
        slow.may_end.set()
        for message_id in (first, second, third):
            await depot_.reaches(message_id, "SUCCEEDED")
        assert [number for number in slow.begun if number != 4] == [1, 2, 3]
        assert await depot_.gates() == 0


async def test_a_worker_lost_after_the_acknowledgement_is_followed_by_the_reaper(migrated_url: str) -> None:
    """S7: the message is gone from the broker, its row starts it again."""
    slow = Slow()
    async with bench(slow.app(), migrated_url, **PROMPT) as depot_:
        async with depot_.member():
            message_id = await depot_.publish(Posted("a", 1))
            await depot_.is_drained()
            await depot_.db.execute("update towpath.worker set lease_until = '-infinity'")
            slow.may_end.set()
            await depot_.reaches(message_id, "SUCCEEDED")
        assert await depot_.gates() == 0


async def test_at_shutdown_kept_work_waits_in_the_database(migrated_url: str) -> None:
    """S4: handed back unspent, due at once for the next member."""
    slow = Slow()
    async with bench(slow.app(), migrated_url, **PROMPT, drain_timeout=timedelta(milliseconds=50)) as depot_:
        async with depot_.member():
            message_id = await depot_.publish(Posted("a", 1))
            await depot_.is_drained()
        row = await depot_.row(message_id)
        assert (row["state"], row["attempt"]) == ("WAITING", 0)
        slow.may_end.set()
        async with depot_.member():
            await depot_.reaches(message_id, "SUCCEEDED")


async def settled(way: str, database: Database, work: Work) -> None:
    """Its last move, by the statements of each kind of effect."""
    settles = SettleStore(database, "depot", uuid4())
    if way == "batch":
        await settles.succeed([(work, None)])
    elif way == "end":
        await settles.end(work, TaskState.DEAD, Failure("dead", "told_to"), spent=1)
    elif way == "transaction":
        async with AsyncSession(database.engine) as session:
            await settles.settle_in(session, work, TaskState.SUCCEEDED, commit=Session.commit)
    else:
        with Session(database.sync_engine) as plain, plain.begin():
            SyncSettleStore("towpath", "depot", uuid4()).settle_in(
                plain, work, TaskState.SUCCEEDED, None, None
            )


@pytest.mark.parametrize("way", ["batch", "end", "transaction", "plain function"])
async def test_what_settles_while_it_is_kept_leaves_no_gate_behind(
    migrated_url: str, db: Any, way: str
) -> None:
    """C10, S7: the gate comes up after the settling transaction looked for one; followers would park."""
    work = Work(uuid4(), "parcel.posted", "event", "parcels", "a", "a", 1, b"{}", "", (), None)
    work.token = uuid4()
    await db.execute(
        "insert into towpath.task (consumer_group, id, type, kind, source, key, lane, state, held_by, "
        "worker, token) values ('depot', $1, 't', 'event', 'parcels', 'a', 'a', 'RUNNING', 'broker', $2, $3)",
        *(work.id, uuid4(), work.token),
    )
    async with db.transaction():
        await db.execute("insert into towpath.key_gate values ('depot', 'parcels', 'a', $1)", work.id)
        await db.execute("update towpath.task set held_by = 'database'")
        settling = threading.Thread(target=lambda: asyncio.run(_alone(way, migrated_url, work)))
        settling.start()
        await until(lambda: waits_for_a_lock(migrated_url))
    await asyncio.to_thread(settling.join, 30)
    assert await db.fetchval("select state from towpath.task") in ("SUCCEEDED", "DEAD")
    assert await db.fetchval("select count(*) from towpath.key_gate") == 0


async def _alone(way: str, url: str, work: Work) -> None:
    """On a loop of its own, since the plain function's way blocks it."""
    database = Database(url, pool_size=2)
    await database.start()
    try:
        await settled(way, database, work)
    finally:
        await database.aclose()


async def waits_for_a_lock(url: str) -> bool:
    connection = await asyncpg.connect(url, timeout=30)
    try:
        return bool(
            await connection.fetchval(
                "select count(*) from pg_stat_activity "
                "where datname = current_database() and wait_event_type = 'Lock'"
            )
        )
    finally:
        await connection.close()
