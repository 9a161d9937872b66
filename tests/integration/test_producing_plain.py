"""Producing and asking on connections without a session: SQLAlchemy Core and psycopg 3, sync and async."""

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import asyncpg
import psycopg
import pytest
import sqlalchemy as sa
from psycopg.rows import class_row
from sqlalchemy.ext.asyncio import create_async_engine

from tests.integration.shop import BuildReport, Charge, OrderPlaced, PageViewed
from towpath import tasks
from towpath.errors import DedupeConflict, NoTransaction, UsageError
from towpath.messages import load_headers
from towpath.outbox import emit, emit_many, send, submit
from towpath.store.callers import Caller
from towpath.store.database import sqlalchemy_url


@asynccontextmanager
async def core(url: str) -> AsyncIterator[sa.Connection]:
    engine = sa.create_engine(sqlalchemy_url(url, "psycopg"))
    try:
        with engine.begin() as connection:
            yield connection
    finally:
        engine.dispose()


@asynccontextmanager
async def async_core(url: str) -> AsyncIterator[Caller]:
    engine = create_async_engine(sqlalchemy_url(url))
    try:
        async with engine.begin() as connection:
            yield connection
    finally:
        await engine.dispose()


@dataclass
class Strange:
    """A row factory of the caller's that fits none of our rows."""

    nothing_of_ours: int


@asynccontextmanager
async def sync_psycopg(url: str) -> AsyncIterator[Caller]:
    with psycopg.connect(url, row_factory=class_row(Strange)) as connection:
        yield connection


@asynccontextmanager
async def async_psycopg(url: str) -> AsyncIterator[Caller]:
    async with await psycopg.AsyncConnection.connect(url, row_factory=class_row(Strange)) as connection:
        yield connection


Open = Callable[[str], AbstractAsyncContextManager[Any]]
KINDS = [core, async_core, sync_psycopg, async_psycopg]


async def done(result: Any) -> Any:
    """The result of a call, awaited where it has to be."""
    return await result if inspect.isawaitable(result) else result


@pytest.mark.parametrize("opened", KINDS)
async def test_what_is_written_at_the_call_goes_with_the_transaction(
    opened: Open, migrated_url: str, db: Any
) -> None:
    """P1 P4"""
    with suppress(ZeroDivisionError):
        async with opened(migrated_url) as target:
            await done(emit(target, OrderPlaced(order_id="dropped")))
            await done(submit(target, Charge("dropped")))
            raise ZeroDivisionError
    async with opened(migrated_url) as target:
        first = await done(emit(target, OrderPlaced(order_id="a"), headers={"tenant": b"\xff"}))
        ids = await done(emit_many(target, [OrderPlaced(order_id="b"), PageViewed("/")]))
        later = await done(emit(target, OrderPlaced(order_id="c"), delay="1h"))
        sent = await done(send(target, Charge("d")))
        handle = await done(submit(target, Charge("e"), owner="u1", deadline="1h"))
        again = await done(submit(target, Charge("e"), owner="u1"))
        assert await db.fetchval("select count(*) from towpath.outbox") == 0, "nobody sees it before COMMIT"

    rows = await db.fetch("select message_id, key, headers::text as pairs from towpath.outbox order by id")
    assert [row["message_id"] for row in rows] == [first, *ids, sent, handle.id]
    assert [row["key"] for row in rows] == ["a", "b", None, "d", "e"]
    assert ("tenant", b"\xff") in load_headers(rows[0]["pairs"])
    assert await db.fetchval("select message_id from towpath.scheduled") == later
    assert (handle.created, again.created, again.id) == (True, False, handle.id)
    assert [row["key"] for row in await db.fetch("select key from towpath.task")] == ["e"]


@pytest.mark.parametrize("opened", KINDS)
async def test_a_task_can_be_read_listed_and_cancelled(opened: Open, migrated_url: str) -> None:
    async with opened(migrated_url) as target:
        handle = await done(submit(target, BuildReport(name="x"), owner="u1"))
        other = await done(submit(target, BuildReport(name="y")))
        await done(submit(target, Charge("a", 1), dedupe_key="k"))
        with pytest.raises(DedupeConflict):
            await done(submit(target, Charge("a", 2), dedupe_key="k"))
        found = await done(tasks.get(target, handle.id, group="reports"))
        assert (found.owner, found.state, found.progress) == ("u1", "ACCEPTED", None)
        assert await done(tasks.get(target, handle.id, group="billing")) is None
        assert await done(tasks.cancel(target, other.id, group="reports")) == "CANCELLED"
        listed = await done(tasks.list(target, group="reports"))
        assert [(task.id, task.state) for task in listed] == [
            (other.id, "CANCELLED"),
            (handle.id, "ACCEPTED"),
        ]


FINISH = """
update towpath.task
   set state = 'SUCCEEDED', result = '42', finished_at = clock_timestamp(), version = version + 1
 where id = $1"""


@pytest.mark.parametrize("connect", [psycopg.connect, psycopg.AsyncConnection.connect], ids=["sync", "async"])
async def test_a_result_is_waited_for_on_the_connection_after_the_commit(
    connect: Callable[[str], Any], migrated_url: str, db: Any
) -> None:
    connection = await done(connect(migrated_url))
    handle = await done(submit(connection, BuildReport(name="x")))
    with pytest.raises(UsageError, match="commit first"):
        await done(handle.result("10s"))
    await done(connection.commit())
    with pytest.raises(TimeoutError):
        await done(handle.result("1s"))
    assert not connection.info.transaction_status, "no transaction is left open between two looks"

    async def finish() -> None:
        await db.execute(FINISH, handle.id)

    waiting = asyncio.to_thread(handle.result, "30s") if isinstance(handle, tasks.SyncTaskHandle) else None
    result, _ = await asyncio.gather(handle.result("30s") if waiting is None else waiting, finish())
    assert result == 42
    await done(connection.close())


async def test_core_waits_on_the_engine(migrated_url: str, db: Any) -> None:
    engine = create_async_engine(sqlalchemy_url(migrated_url))
    async with engine.begin() as connection:
        handle = await submit(connection, BuildReport(name="x"))
    await db.execute(FINISH, handle.id)
    assert await handle.result("30s") == 42
    await engine.dispose()


async def test_a_connection_without_a_transaction_is_refused(migrated_url: str, db: Any) -> None:
    """P4 P10"""
    engine = sa.create_engine(sqlalchemy_url(migrated_url, "psycopg"), isolation_level="AUTOCOMMIT")
    async_engine = create_async_engine(sqlalchemy_url(migrated_url))
    message = PageViewed("/")
    with psycopg.connect(migrated_url, autocommit=True) as connection:
        with pytest.raises(NoTransaction, match=r"with connection.transaction\(\)"):
            emit(connection, message)
        with connection.transaction():
            emit(connection, message)
    async with await psycopg.AsyncConnection.connect(migrated_url, autocommit=True) as awaited:
        with pytest.raises(NoTransaction, match=r"with connection.transaction\(\)"):
            await submit(awaited, Charge("a"))
    with engine.begin() as core_connection, pytest.raises(NoTransaction, match="AUTOCOMMIT"):
        emit(core_connection, message)
    optional = sa.create_engine(sqlalchemy_url(migrated_url, "psycopg"), poolclass=sa.NullPool)
    with optional.connect() as optioned, pytest.raises(NoTransaction, match="AUTOCOMMIT"):
        emit(optioned.execution_options(isolation_level="AUTOCOMMIT"), message)
    with pytest.raises(NoTransaction, match="not open"):
        await emit(async_engine.connect(), message)
    async with async_engine.connect() as level, level.begin():
        await emit(level, message)
    sqlite_engine = sa.create_engine("sqlite://", poolclass=sa.NullPool)
    with sqlite_engine.begin() as sqlite, pytest.raises(NoTransaction, match="sqlite"):
        emit(sqlite, message)
    engine.dispose()
    await async_engine.dispose()

    assert await db.fetchval("select count(*) from towpath.outbox") == 2


async def test_nothing_stays_behind_on_a_psycopg_connection_for_a_pooler_to_mix_up(migrated_url: str) -> None:
    """P4: with `prepare_threshold=None`, as its documentation asks for behind a transaction pooler."""
    settings = "select name, setting from pg_settings where name !~ '^plpgsql'"
    with psycopg.connect(migrated_url, prepare_threshold=None) as connection:
        connection.execute("set synchronous_commit = off")
        connection.commit()
        before = dict(connection.execute(settings).fetchall())
        connection.commit()
        for _ in range(10):
            emit(connection, PageViewed("/"))
            submit(connection, Charge("a"))
            connection.commit()
        assert dict(connection.execute(settings).fetchall()) == before
        assert connection.execute("select count(*) from pg_prepared_statements").fetchone() == (0,)


async def test_the_sql_function_submits_as_the_library_does(migrated_url: str, db: Any) -> None:
    """P4 P5: the same dedupe key from either side is the same task."""
    submitted = "select * from towpath.submit_task('reports', 'report.build', '{\"name\":\"x\"}', %s)"
    row = await db.fetchrow(
        submitted % ("key => 'k', owner => 'u1', dedupe_key => 'd', headers => $1::text::json"),
        '{"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}',
    )
    async with db.transaction():
        again = await submit(db, BuildReport(name="x"), owner="u1", dedupe_key="d")
        other = await submit(db, BuildReport(name="x"), owner="u2", dedupe_key="d")
    repeated = await db.fetchrow(submitted % ("owner => 'u2', dedupe_key => 'd'"))
    waiting = await db.fetchrow(submitted % ("due_at => clock_timestamp() + interval '1 hour'"))
    with pytest.raises(asyncpg.UniqueViolationError, match="another payload"):
        await db.execute(
            "select towpath.submit_task('reports', 'report.build', '{}', owner => 'u1', dedupe_key => 'd')"
        )

    assert (row["created"], again.created, again.id) == (True, False, row["task_id"])
    assert (repeated["created"], repeated["task_id"]) == (False, other.id)
    found = await db.fetch(
        "select id, state, key, owner, source, trace, shard from towpath.task order by created_at"
    )
    assert [task["id"] for task in found] == [row["task_id"], other.id, waiting["task_id"]]
    assert [task["state"] for task in found] == ["ACCEPTED", "ACCEPTED", "WAITING"]
    assert (found[0]["key"], found[0]["owner"], found[0]["source"]) == ("k", "u1", "tasks.reports")
    assert found[0]["trace"] == "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    sent = await db.fetch(
        "select message_id, kind, destination, shard, payload from towpath.outbox order by id"
    )
    assert [message["message_id"] for message in sent] == [row["task_id"], other.id]
    assert (sent[0]["kind"], sent[0]["destination"], sent[0]["payload"]) == ("task", "tasks.reports", None)
    assert sent[0]["shard"] == found[0]["shard"]


async def test_the_sql_function_emits_for_later(db: Any) -> None:
    message_id = await db.fetchval("select towpath.emit('d', 't', 'x', due_at => now() + interval '1 hour')")
    assert await db.fetchval("select message_id from towpath.scheduled") == message_id
    assert await db.fetchval("select count(*) from towpath.outbox") == 0
