"""The engines' pool: what a session keeps, and what it costs to give one back."""

from typing import Any

import asyncpg
import pytest

from towpath.errors import StoreUnavailable
from towpath.store.database import Database

LAST = "select state, query from pg_stat_activity where pid = $1"


async def test_giving_a_session_back_costs_no_statement(
    db: "asyncpg.Connection[Any]", migrated_url: str
) -> None:
    """The last that a session was asked for is the commit, or the statement itself."""
    database = Database(migrated_url, pool_size=1)
    await database.start()
    try:
        async with database.transaction() as connection:
            pid = await connection.fetchval("select pg_backend_pid()")
        assert tuple(await db.fetchrow(LAST, pid)) == ("idle", "COMMIT;")
        await database.pool.fetchval("select 1")
        assert tuple(await db.fetchrow(LAST, pid)) == ("idle", "select 1")
    finally:
        await database.aclose()


async def test_a_session_given_back_inside_a_transaction_is_rolled_back(
    db: "asyncpg.Connection[Any]", migrated_url: str
) -> None:
    """The next to have it does not find what the last one left open."""
    database = Database(migrated_url, pool_size=1)
    await database.start()
    try:
        async with database.pool.acquire() as connection:
            await connection.execute("begin; create table left_open ()")
        assert await database.pool.fetchval("select to_regclass('left_open')") is None
        assert await db.fetchval("select to_regclass('left_open')") is None
    finally:
        await database.aclose()


async def test_a_thread_that_was_left_to_itself_closes_its_connection_when_it_gives_it_back(
    migrated_url: str,
) -> None:
    """C2: the process goes on without its worker: nothing of the handlers that overstayed may stay open."""
    database = Database(migrated_url, pool_size=1)
    await database.start()
    late = database.sync_engine.connect()
    idle = database.sync_engine.connect()
    ours, others = late.connection.dbapi_connection, idle.connection.dbapi_connection
    idle.close()

    await database.aclose()

    assert ours is not None
    assert others is not None
    assert (ours.closed, others.closed) == (False, True)
    late.close()
    assert ours.closed
    with pytest.raises(StoreUnavailable, match="not open"):
        database.learn_server_in_thread()
