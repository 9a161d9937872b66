"""Whatever is killed, and when: the event exists if and only if the business change does."""

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import pytest
from sqlalchemy import create_engine, event, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session
from sqlalchemy.util import await_only

from tests.docs.pages import REPOSITORY
from tests.integration.shop import ACCOUNT_DDL, Account, Charge, OrderPlaced
from towpath.outbox import emit, submit
from towpath.store import migrate
from towpath.store.database import sqlalchemy_url
from towpath.testing.proxy import Direction, TcpProxy
from towpath.testing.services import PostgresServer, run_sql


def start_producer(url: str, how: str, where: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-m", "tests.integration.dying_producer", url, how, where],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
    )


async def accounts_and_events(db: Any) -> tuple[list[str], list[str]]:
    """Once nobody else is connected: the killed one's transaction has ended."""
    while await db.fetchval("select count(*) > 1 from pg_stat_activity where datname = current_database()"):
        time.sleep(0.02)
    accounts = [row["id"] for row in await db.fetch("select id from account order by length(id), id")]
    events = [row["key"] for row in await db.fetch("select key from towpath.outbox order by id")]
    return accounts, events


@pytest.mark.parametrize("how", ["session", "asyncpg"])
@pytest.mark.parametrize(("where", "count"), [("before COMMIT", 3), ("after COMMIT", 4)])
async def test_a_producer_killed_around_commit_leaves_both_or_neither(
    db: Any, migrated_url: str, how: str, where: str, count: int
) -> None:
    """P1"""
    await db.execute(ACCOUNT_DDL)
    with start_producer(migrated_url, how, where) as producer:
        assert producer.wait(60) == -signal.SIGKILL

    accounts, events = await accounts_and_events(db)

    assert accounts == events == [str(number) for number in range(count)]


async def test_a_producer_killed_at_any_moment_leaves_both_or_neither(
    db: Any, migrated_url: str, scale: float
) -> None:
    """P1: also where COMMIT was sent and its answer never came."""
    for _ in range(int(4 * scale) or 1):
        await db.execute(f"drop table if exists account; {ACCOUNT_DDL}; truncate towpath.outbox")
        with start_producer(migrated_url, "session", "anywhere") as producer:
            assert producer.stdout is not None
            assert producer.stdout.readline() == b"producing\n"
            time.sleep(random.uniform(0, 0.15))
            producer.kill()

        accounts, events = await accounts_and_events(db)

        assert accounts == events
        assert len(accounts) >= 2


@pytest.fixture(scope="module")
def forgetful_server() -> Iterator[PostgresServer]:
    """Loses every asynchronous commit of the last ten seconds when it crashes."""
    settings = {
        "synchronous_commit": "off",
        "wal_writer_delay": "10s",
        "checkpoint_timeout": "1h",
        "autovacuum": "off",
        "max_prepared_transactions": "2",
    }
    with PostgresServer(settings=settings) as server:
        url = server.create_database("forgetful")
        migrate.upgrade(url)
        run_sql(url, "set synchronous_commit = on", ACCOUNT_DDL)
        yield server


def session_emit(url: str) -> None:
    engine = create_engine(sqlalchemy_url(url, "psycopg"))
    with Session(engine) as session, session.begin():
        session.add(Account(id="session"))
        emit(session, OrderPlaced(order_id="session"))
    engine.dispose()


async def async_session_emit(url: str) -> None:
    engine = create_async_engine(sqlalchemy_url(url))
    async with AsyncSession(engine) as session, session.begin():
        session.add(Account(id="async session"))
        emit(session, OrderPlaced(order_id="async session"))
    await engine.dispose()


async def on_connection(url: str, name: str) -> None:
    connection = await asyncpg.connect(url)
    async with connection.transaction():
        await connection.execute("insert into account values ($1, 0)", name)
        if name == "asyncpg":
            await emit(connection, OrderPlaced(order_id=name))
        elif name == "submit":
            await submit(connection, Charge(name))
        elif name == "sql":
            await connection.execute("select towpath.emit('orders', 'order.placed', '', $1)", name)
        else:
            await connection.execute(
                "insert into towpath.outbox (shard, message_id, kind, destination, type, key, content_type)"
                " values (1, gen_random_uuid(), 'event', 'orders', 'order.placed', $1, 'x')",
                name,
            )
    await connection.close()


@pytest.mark.parametrize("how", ["session", "async session", "asyncpg", "submit", "sql", "bare insert"])
async def test_an_asynchronous_commit_with_an_event_survives_the_crash_of_the_server(
    forgetful_server: PostgresServer, how: str
) -> None:
    """P9: a bare insert, whose commit the relay could have seen, is forgotten; an emit is not."""
    url = forgetful_server.url("forgetful")
    writer = run_sql(url, "select pid from pg_stat_activity where backend_type = 'walwriter'")
    os.kill(int(writer), signal.SIGSTOP)  # else it may come round just now, and flush what was not waited for
    if how == "session":
        session_emit(url)
    elif how == "async session":
        await async_session_emit(url)
    else:
        await on_connection(url, how)
    forgetful_server.kill()
    forgetful_server.start()

    connection = await asyncpg.connect(url)
    events = await connection.fetchval("select count(*) from towpath.outbox where key = $1", how)
    accounts = await connection.fetchval("select count(*) from account where id = $1", how)
    await connection.close()

    assert (events, accounts) == ((0, 0) if how == "bare insert" else (1, 1))


async def test_a_lower_commit_level_is_raised_and_a_higher_one_is_kept(db: Any) -> None:
    """P9"""
    for level, expected in (
        ("off", "on"),
        ("local", "local"),
        ("remote_apply", "remote_apply"),
        ("on", "on"),
    ):
        for call in (lambda: emit(db, OrderPlaced(order_id="a")), lambda: submit(db, Charge("a"))):
            transaction = db.transaction()
            await transaction.start()
            await db.execute(f"set local synchronous_commit = {level}")
            await call()
            assert await db.fetchval("show synchronous_commit") == expected
            await transaction.rollback()


def test_a_two_phase_session_prepares_the_event_with_the_change(forgetful_server: PostgresServer) -> None:
    """P1"""
    engine = create_engine(sqlalchemy_url(forgetful_server.url("forgetful"), "psycopg"))
    with Session(engine, twophase=True) as session:
        with session.begin():
            session.add(Account(id="two"))
            emit(session, OrderPlaced(order_id="two"))
        session.begin()
        emit(session, OrderPlaced(order_id="three"))
        session.prepare()
        session.rollback()
    with engine.connect() as connection:
        events = connection.scalars(
            text("select key from towpath.outbox where key in ('two', 'three')")
        ).all()
    engine.dispose()

    assert events == ["two"]


async def test_a_commit_whose_answer_is_lost_has_written_both(
    db: Any, migrated_url: str, postgres_proxy: TcpProxy
) -> None:
    """P1: the producer cannot know, the database does."""
    await db.execute(ACCOUNT_DDL)
    through_proxy = urlsplit(migrated_url)._replace(netloc=f"postgres@127.0.0.1:{postgres_proxy.port}")
    engine = create_async_engine(sqlalchemy_url(through_proxy.geturl()), connect_args={"command_timeout": 3})

    def lose_answers(_: Any) -> None:
        await_only(postgres_proxy.hang(Direction.REPLIES))

    async with AsyncSession(engine) as session:
        await session.begin()
        session.add(Account(id="1"))
        await session.flush()
        emit(session, OrderPlaced(order_id="1"))
        event.listen(engine.sync_engine, "commit", lose_answers)  # behind our own listener
        with pytest.raises((DBAPIError, TimeoutError)):
            await session.commit()
        await postgres_proxy.drop_connections()
    await engine.dispose()

    accounts, events = await accounts_and_events(db)
    assert accounts == events == ["1"]


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
async def test_a_commit_cancelled_while_it_writes_leaves_neither(
    db: Any, migrated_url: str, driver: str
) -> None:
    """P1: and the pool's connection is clean for the next one."""
    await db.execute(ACCOUNT_DDL)
    engine = create_async_engine(sqlalchemy_url(migrated_url, driver), pool_size=1, max_overflow=0)

    async def produce(name: str) -> None:
        async with AsyncSession(engine) as session, session.begin():
            session.add(Account(id=name))
            emit(session, OrderPlaced(order_id=name))

    blocking = db.transaction()
    await blocking.start()
    await db.execute("lock table towpath.outbox in access exclusive mode")
    producing = asyncio.create_task(produce("cancelled"))
    async with asyncio.timeout(30):
        while not await db.fetchval("select exists (select from pg_locks where not granted)"):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    producing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await producing
    await blocking.rollback()
    await produce("next")
    await engine.dispose()

    assert await accounts_and_events(db) == (["next"], ["next"])
