"""Each role can do its work and nothing else: tested by logging in as it."""

import asyncio
import re
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import pytest
import pytest_asyncio
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from tests.integration.shop import Charge, OrderPlaced
from tests.integration.test_retention import Heard, clearing_of
from towpath import tasks
from towpath.outbox import emit, emit_many, send, submit
from towpath.store import migrate
from towpath.store.database import sqlalchemy_url
from towpath.store.retention import Retention
from towpath.store.roles import grants
from towpath.store.statements import load
from towpath.store.wakeup import WakeupStore

LogIn = Callable[[str], Awaitable[str]]
"""`await log_in("producer")` is the URL of a new user with that role."""


@pytest_asyncio.fixture
async def log_in(db: Any, migrated_url: str) -> AsyncIterator[LogIn]:
    prefix = f"t{uuid.uuid4().hex[:10]}"
    users: list[str] = []
    await db.execute(grants("towpath", prefix))
    await db.execute(grants("towpath", prefix))  # again changes nothing

    async def make(role: str) -> str:
        user = f"{prefix}_user_{len(users)}"
        await db.execute(f"create role {user} login password 'x' in role {prefix}_{role}")
        users.append(user)
        parts = urlsplit(migrated_url)
        host = f"{user}:x@{parts.hostname}:{parts.port}"
        return urlunsplit(parts._replace(netloc=host))

    yield make
    for name in [
        *users,
        *(f"{prefix}_{role}" for role in ("producer", "reader", "relay", "worker", "operator")),
    ]:
        await db.execute(f"drop owned by {name}; drop role {name}")


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[Any]:
    connection = await asyncpg.connect(url)
    try:
        yield connection
    finally:
        await connection.close()


async def test_a_producer_can_produce_in_every_way(db: Any, log_in: LogIn) -> None:
    """X5 P4"""
    url = await log_in("producer")
    async with connected(url) as connection, connection.transaction():
        await emit_many(connection, [OrderPlaced(order_id="1"), OrderPlaced(order_id="2")])
        await send(connection, Charge("3"))
        handle = await submit(connection, Charge("4"))
        await submit(connection, Charge("4"))
        await connection.execute("select towpath.emit('orders', 'order.placed', '{}', '5')")
        await connection.execute(
            "select towpath.submit_task('billing', 'payment.charge', '{}', due_at => now())"
        )
        await emit(connection, OrderPlaced(order_id="later"), delay="1h")
        await submit(connection, Charge("later"), delay="1h")
        assert await tasks.cancel(connection, handle.id, group="billing") == "CANCELLED"
    async_engine = create_async_engine(sqlalchemy_url(url))
    async with AsyncSession(async_engine) as session, session.begin():
        emit(session, OrderPlaced(order_id="6"))
        await submit(session, Charge("7"))
    await async_engine.dispose()
    engine = sa.create_engine(sqlalchemy_url(url, "psycopg"))
    with Session(engine) as plain, plain.begin():
        emit(plain, OrderPlaced(order_id="8"))
        submit(plain, Charge("9"))
    engine.dispose()

    found = await db.fetch("select key from towpath.outbox order by id")
    assert [row["key"] for row in found] == [str(number) for number in range(1, 10)]


OUTBOX = "shard, message_id, kind, destination, type, key, content_type, headers, payload"
VALUES = "1, gen_random_uuid(), 'event', 'd', 't', null, 'c', '[]', ''"

FORBIDDEN = {
    "producer": [
        "select * from towpath.outbox",
        "select * from towpath.scheduled",
        "delete from towpath.scheduled",
        "select count(*) from towpath.outbox_0",
        f"insert into towpath.outbox ({OUTBOX}, xid) values ({VALUES}, '1')",
        f"insert into towpath.outbox ({OUTBOX}, slot) values ({VALUES}, 1)",
        f"insert into towpath.outbox ({OUTBOX}, id) overriding system value values ({VALUES}, 1)",
        f"insert into towpath.outbox ({OUTBOX}, created_at) values ({VALUES}, now())",
        f"insert into towpath.outbox_0 ({OUTBOX}) values ({VALUES})",
        "select * from towpath.task",
        "update towpath.task set state = 'ACCEPTED'",
        "delete from towpath.outbox",
        "truncate towpath.outbox",
        "insert into towpath.destination values ('d', 0, 'd')",
        "select * from towpath.dead_letter",
        "select * from towpath.meta",
        "select nextval('towpath.outbox_id_seq')",
        "select setval('towpath.relays_asleep_until', 0)",
    ],
    "reader": [
        "select * from towpath.outbox",
        "update towpath.task set state = 'ACCEPTED'",
        "select towpath.emit('d', 't', '')",
        "select towpath.cancel_task('billing', gen_random_uuid())",
        "select * from towpath.dead_letter",
    ],
    "relay": [
        "select * from towpath.task",
        "select towpath.cancel_task('billing', gen_random_uuid())",
        "select towpath.accept_task('g', gen_random_uuid(), 't', 'd', '', '', '', null, '', 'c', '[]', '')",
        "insert into towpath.task default values",
        f"insert into towpath.outbox ({OUTBOX}, xid) values ({VALUES}, '1')",
        "update towpath.outbox set shard = 1",
        "delete from towpath.outbox",
        "insert into towpath.scheduled default values",
        "update towpath.scheduled_progress set due_upto = now()",
        "delete from towpath.dead_letter",
        "select * from towpath.key_gate",
        "update towpath.pause set resumed_at = now()",
        "select nextval('towpath.outbox_id_seq')",
    ],
    "worker": [
        "update towpath.outbox set shard = 1",
        "select * from towpath.outbox",
        "update towpath.shard_lease set epoch = 1",
        "insert into towpath.journal default values",
        "delete from towpath.dead_letter",
        "update towpath.pause set resumed_at = now()",
        "update towpath.task_event set event = 'x'",
        f"insert into towpath.outbox ({OUTBOX}, xid) values ({VALUES}, '1')",
    ],
    "operator": [
        "update towpath.outbox set shard = 1",
        "insert into towpath.journal default values",
        "update towpath.shard_lease set epoch = 1",
        "delete from towpath.audit",
        "delete from towpath.pause",
        "delete from towpath.dead_letter",
    ],
}
DDL = [
    "create table towpath.mine ()",
    "alter table towpath.outbox add column mine text",
    "drop table towpath.task",
    "create or replace function towpath.clock() returns timestamptz language sql as 'select now()'",
    "create function towpath.mine() returns integer language sql as 'select 1'",
    "alter table towpath.outbox disable trigger all",
]


@pytest.mark.parametrize("role", FORBIDDEN)
async def test_what_a_role_does_not_need_is_denied(db: Any, log_in: LogIn, role: str) -> None:
    """X5"""
    async with connected(await log_in(role)) as connection:
        for statement in [*FORBIDDEN[role], *DDL]:
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                await connection.execute(statement)


async def test_strangers_see_nothing(db: Any, log_in: LogIn, migrated_url: str) -> None:
    """X5"""
    async with connected(await log_in("reader")) as connection:
        user = await connection.fetchval("select user")
        await db.execute(f"revoke {user.partition('_')[0]}_reader from {user}")
        for statement in (
            "select * from towpath.task",
            "select towpath.clock()",
            "select towpath.emit('d', 't', '')",
        ):
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                await connection.execute(statement)


@pytest.mark.parametrize(
    ("role", "family"),
    [
        ("producer", "producer"),
        ("reader", "tasks"),
        ("relay", "relay"),
        ("relay", "scheduled"),
        ("relay", "wakeup"),
        ("relay", "parking"),
        ("relay", "canary"),
        ("relay", "provenance"),
        ("relay", "status.backlog"),
        ("relay", "pauses.open"),
        ("worker", "work"),
        ("worker", "producer"),
        ("worker", "doubts"),
        ("worker", "groups"),
        ("worker", "offsets"),
        ("worker", "pauses.of_group"),
        ("operator", "operator"),
        ("operator", "tasks"),
        ("operator", "status"),
        ("operator", "pauses"),
        ("operator", "repairs"),
        ("operator", "revisions"),
        ("operator", "republish"),
        ("operator", "audit"),
        ("operator", "lineage"),
        ("operator", "doubts"),
        ("operator", "groups"),
        ("operator", "offsets"),
    ],
)
async def test_each_statement_of_a_role_may_be_run_by_it(
    db: Any, log_in: LogIn, role: str, family: str
) -> None:
    """X5: EXPLAIN checks the grants as execution does."""
    denied: list[str] = []
    family, _, only = family.partition(".")
    async with connected(await log_in(role)) as connection:
        for name, statement in load(family).items():
            if (role == "reader" and name == "cancel_task") or (only and name != only):
                continue
            prepared = await connection.prepare(statement)
            nulls = ", ".join("null" for _ in prepared.get_parameters())
            await connection.execute(f"prepare probe as {statement}")
            try:
                await connection.execute(f"explain execute probe{f'({nulls})' if nulls else ''}")
            except asyncpg.InsufficientPrivilegeError as error:
                denied.append(f"{name}: {error}")
            await connection.execute("deallocate probe")
    assert denied == []


async def test_a_relay_asks_to_be_notified_and_a_producer_notifies(db: Any, log_in: LogIn) -> None:
    """X5 R13: a producer needs no grant for it, and cannot ask itself."""
    store, heard = WakeupStore(), asyncio.Event()
    async with connected(await log_in("relay")) as relay, connected(await log_in("producer")) as producer:
        await relay.add_listener(store.channel, lambda *_: heard.set())
        async with asyncio.timeout(60):
            while not heard.is_set():  # a request lasts for a second, which a busy machine may miss
                assert (await store.stay_asleep(relay, None)).seconds_left is not None
                async with producer.transaction():
                    await emit(producer, OrderPlaced(order_id="1"))
                await asyncio.sleep(0.1)


async def test_a_relay_may_clear_a_slot_and_a_worker_may_not(db: Any, log_in: LogIn) -> None:
    """X5 R22: blocks cannot be explained, so the retention's statements are run."""
    store = Retention()
    await db.execute(
        "insert into towpath.outbox (slot, shard, message_id, kind, destination, type, content_type, "
        "created_at) select (towpath.ring_slot() + 2) % 4, 1, gen_random_uuid(), 'event', 'd', 't', 'c', "
        "towpath.clock() - interval '7 hours' from generate_series(1, 2)"
    )
    slot = await db.fetchval("select min(slot) from towpath.outbox")
    await db.execute(
        "insert into towpath.journal (shards, epochs, last_ids, snapshot_from, snapshot_to) "
        "values ('{1}', '{1}', '{null}', pg_current_snapshot(), pg_current_snapshot())"
    )
    async with connected(await log_in("worker")) as worker:
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await store.clear(worker, slot, 1, hold_seconds=5)
    async with connected(await log_in("relay")) as relay:
        assert len((await store.survey(relay)).slots) == 4
        assert (await store.verdict(relay, slot, 1)).reason is None
        assert await store.holders(relay, slot) == []
        assert await store.oldest_age(relay, slot) == pytest.approx(7 * 3600, abs=600)
        assert (await store.delete_sent(relay, slot, 1, 1, limit=1)).count == 1
        assert await store.shards(relay) == list(range(16))
        assert await store.clear(relay, slot, 1, hold_seconds=5) is None
    assert await db.fetchval("select count(*) from towpath.outbox") == 0


async def test_a_relay_that_may_not_clear_says_so_and_goes_on(db: Any, log_in: LogIn) -> None:
    """X5: an upgrade without the new grants must not stop publishing."""
    await db.execute("select towpath.emit('d', 't', '')")
    heard = Heard()
    clearing = clearing_of(await log_in("reader"), heard)
    await clearing.look()
    clearing.close()
    slot = await db.fetchval("select min(slot) from towpath.outbox")
    assert heard.told == [("blocked", slot, "denied")]


async def test_the_roles_of_another_schema_are_granted_that_schema_alone(db: Any, migrated_url: str) -> None:
    """X5"""
    sql = grants("tenant_b", "tenant_b")
    assert not re.search(r"\btowpath\b", sql)
    await asyncio.to_thread(migrate.upgrade, migrated_url, "tenant_b")
    transaction = db.transaction()
    await transaction.start()
    await db.execute(sql)
    assert await db.fetchval("select has_schema_privilege('tenant_b_producer', 'tenant_b', 'usage')")
    assert not await db.fetchval("select has_table_privilege('tenant_b_operator', 'towpath.task', 'select')")
    await transaction.rollback()
