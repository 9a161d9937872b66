"""Producers behind a pooler for transactions; the relay behind one for sessions, and nowhere else."""

import asyncio
from contextlib import suppress
from typing import Any
from uuid import uuid4

import asyncpg
import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool

from tests.integration.relaying import RecordingBroker, emit, eventually, relaying
from tests.integration.shop import Charge, OrderPlaced
from tests.integration.test_relay_wakeup import NEVER, QUICK, sleeping
from towpath import outbox
from towpath.errors import ConfigurationError
from towpath.relay import Relay
from towpath.relay.link import READS, Link
from towpath.store.database import PLANNER_PINS, sqlalchemy_url
from towpath.testing.services import PgBouncerServer

ASYNC_ARGUMENTS = {
    "statement_cache_size": 0,
    "prepared_statement_cache_size": 0,
    "prepared_statement_name_func": lambda: f"__asyncpg_{uuid4()}__",
}
"""As docs/producing.md has them."""
CLIENTS, EACH = 8, 5


async def by_asyncpg(url: str, name: str) -> None:
    connection = await asyncpg.connect(url, timeout=30, statement_cache_size=0)
    try:
        for number in range(EACH):
            with suppress(ZeroDivisionError):
                async with connection.transaction():
                    await outbox.emit(connection, OrderPlaced(order_id="never"))
                    raise ZeroDivisionError
            async with connection.transaction():
                await outbox.emit(connection, OrderPlaced(order_id=f"{name}-{number}"))
                await outbox.submit(connection, Charge(f"{name}-{number}-task"))
    finally:
        await connection.close(timeout=10)


async def by_async_session(url: str, name: str) -> None:
    engine = create_async_engine(sqlalchemy_url(url), poolclass=NullPool, connect_args=ASYNC_ARGUMENTS)
    for number in range(EACH):
        async with AsyncSession(engine) as session, session.begin():
            outbox.emit(session, OrderPlaced(order_id=f"{name}-{number}"))
            await outbox.submit(session, Charge(f"{name}-{number}-task"))
    await engine.dispose()


async def by_session(url: str, name: str) -> None:
    def produce() -> None:
        engine = sa.create_engine(
            sqlalchemy_url(url, "psycopg"), poolclass=NullPool, connect_args={"prepare_threshold": None}
        )
        for number in range(EACH):
            with Session(engine) as session, session.begin():
                outbox.emit(session, OrderPlaced(order_id=f"{name}-{number}"))
                outbox.submit(session, Charge(f"{name}-{number}-task"))
        engine.dispose()

    await asyncio.to_thread(produce)


@pytest.mark.parametrize("produce", [by_asyncpg, by_async_session, by_session])
async def test_producers_share_the_sessions_of_a_pooler_for_transactions(
    db: Any, migrated_url: str, transaction_pooler: PgBouncerServer, produce: Any
) -> None:
    """P4: eight clients on three sessions; each keeps to its own transactions."""
    through = transaction_pooler.before(migrated_url)
    async with asyncio.TaskGroup() as clients:
        for client in range(CLIENTS):
            clients.create_task(produce(through, f"c{client}"))
    found = {row["key"] for row in await db.fetch("select key from towpath.outbox")}
    names = {f"c{client}-{number}" for client in range(CLIENTS) for number in range(EACH)}
    assert found == names | {f"{name}-task" for name in names}
    assert await db.fetchval("select count(*) from towpath.outbox") == 2 * CLIENTS * EACH
    assert await db.fetchval("select count(*) from towpath.task") == CLIENTS * EACH


async def test_a_relay_behind_a_pooler_for_sessions_sleeps_and_is_notified(
    db: Any, migrated_url: str, session_pooler: PgBouncerServer
) -> None:
    """R13"""
    broker = RecordingBroker()
    async with relaying(session_pooler.before(migrated_url), broker, NEVER) as relay:
        await sleeping(db, relay)
        await emit(db, "k", b"1")
        await eventually(lambda: len(broker.arrivals) == 1)


async def test_settings_that_a_pooler_takes_from_no_new_client_are_made_in_the_session(
    migrated_url: str, session_pooler: PgBouncerServer
) -> None:
    """R1, R13: the planner's pins and the rest hold as on a direct connection."""
    link = Link(session_pooler.before(migrated_url), "test", READS, command_timeout_seconds=10)
    connection = await link.connection()
    found = {
        name: await connection.fetchval("select current_setting($1)", name)
        for name in (*PLANNER_PINS, *READS)
    }
    link.drop()
    assert found == {**PLANNER_PINS, **READS}


async def test_a_session_that_ends_behind_the_pooler_changes_nothing(
    db: Any, migrated_url: str, session_pooler: PgBouncerServer
) -> None:
    """R19: the relay begins again from the journal, on whatever session it is given."""
    broker = RecordingBroker()
    async with relaying(session_pooler.before(migrated_url), broker, QUICK) as relay:
        for number in range(5):
            await emit(db, "k", b"%d" % number)
            await eventually(lambda count=number + 1: len(set(broker.payloads)) == count)  # type: ignore[misc]
            await db.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity where datname = current_database() "
                "and application_name like 'towpath relay %'"
            )
        await eventually(lambda: relay.status().is_ready)
    assert list(dict.fromkeys(broker.payloads)) == [b"0", b"1", b"2", b"3", b"4"]


async def refused(url: str) -> str:
    """The one reason for which a relay does not run."""
    with pytest.raises(BaseExceptionGroup) as raised:
        async with asyncio.timeout(60):
            await Relay(url, RecordingBroker(), QUICK).run(asyncio.Event())
    ours, others = raised.value.split(ConfigurationError)
    assert others is None
    assert ours is not None
    return str(ours.exceptions[0])


async def test_a_relay_behind_a_pooler_for_transactions_is_refused_and_spoils_nothing(
    db: Any, migrated_url: str, postgres_url: str, transaction_pooler: PgBouncerServer
) -> None:
    """R19: it names the fix; its settings do not stay behind in the sessions of producers.

    Also where the pooler is told to ignore settings that it does not know.
    """
    ignored = "plan_cache_mode,enable_seqscan,enable_bitmapscan,enable_hashjoin,enable_mergejoin,jit"
    ignored += ",max_parallel_workers_per_gather,default_transaction_isolation,tcp_keepalives_idle"
    ignored += (
        ",tcp_keepalives_interval,tcp_keepalives_count,default_transaction_read_only,synchronous_commit"
    )
    ignored += ",lock_timeout,statement_timeout,idle_in_transaction_session_timeout"
    with PgBouncerServer(
        postgres_url, pool_mode="transaction", settings={"ignore_startup_parameters": ignored}
    ) as careless:
        for pooler in (transaction_pooler, careless):
            through = pooler.before(migrated_url)
            assert "give the relay a direct URL" in await refused(through)
            await by_asyncpg(through, str(pooler.port))
    assert await db.fetchval("select count(*) from towpath.outbox") == 4 * EACH
    assert await db.fetchval("select count(*) from towpath.shard_lease where relay is not null") == 0
