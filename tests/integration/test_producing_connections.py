"""Emitting on asyncpg connections and by SQL: one statement at the call, through any pooler."""

import asyncio
from contextlib import suppress
from typing import Any
from uuid import UUID

import asyncpg
import pytest
from asyncpg.pool import PoolConnectionProxy

from tests.integration.shop import Charge, OrderPlaced, PageViewed
from towpath.errors import NoTransaction
from towpath.messages import RawMessage, load_headers
from towpath.outbox import Outbox, emit, emit_many, send, submit
from towpath.store import migrate


async def test_it_is_written_at_the_call_and_goes_with_the_transaction(db: Any) -> None:
    """P1 P4"""
    with pytest.raises(NoTransaction, match=r"async with connection.transaction\(\)"):
        await emit(db, PageViewed("/"))
    with suppress(ZeroDivisionError):
        async with db.transaction():
            await emit(db, PageViewed("/"))
            raise ZeroDivisionError
    async with db.transaction():
        message_id = await emit(db, OrderPlaced(order_id="a"))
        assert await db.fetchval("select message_id from towpath.outbox") == message_id
        with suppress(ZeroDivisionError):
            async with db.transaction():
                await emit(db, OrderPlaced(order_id="dropped"))
                raise ZeroDivisionError

    assert [row["key"] for row in await db.fetch("select key from towpath.outbox")] == ["a"]


async def test_many_are_one_statement_in_order(db: Any) -> None:
    """P4"""
    queries: list[str] = []
    db.add_query_logger(lambda record: queries.append(record.query))
    async with db.transaction():
        ids = await emit_many(db, (OrderPlaced(order_id=str(number)) for number in range(1000)))
        await emit_many(db, [])

    assert [query for query in queries if "outbox" in query] == [q for q in queries if q.startswith("insert")]
    assert sum("outbox" in query for query in queries) == 1
    rows = await db.fetch("select message_id, key from towpath.outbox order by id")
    assert [row["message_id"] for row in rows] == ids
    assert [row["key"] for row in rows] == [str(number) for number in range(1000)]


async def test_what_is_too_much_for_one_statement_takes_several_in_order(db: Any) -> None:
    """P4: an array in Postgres holds no more than 1 GB."""
    queries: list[str] = []
    db.add_query_logger(lambda record: queries.append(record.query))
    large = [RawMessage("t", b"x" * 1_000_000, "d", str(number)) for number in range(70)]
    async with db.transaction():
        ids = await emit_many(db, [*large, *(PageViewed("/") for _ in range(10_500))])

    assert sum("outbox" in query for query in queries) == 4
    rows = await db.fetch("select message_id from towpath.outbox order by id")
    assert [row["message_id"] for row in rows] == ids


@pytest.mark.parametrize("cache", [0, 100])
async def test_nothing_stays_behind_for_a_pooler_to_mix_up(migrated_url: str, cache: int) -> None:
    """P4: no session settings, locks or (without a statement cache) prepared statements."""
    settings = "select name, setting from pg_settings where name !~ '^plpgsql'"
    async with (
        asyncpg.create_pool(migrated_url, min_size=1, max_size=1, statement_cache_size=cache) as pool,
        pool.acquire() as connection,
    ):
        assert isinstance(connection, PoolConnectionProxy)
        await connection.execute("set synchronous_commit = off")
        before = dict(await connection.fetch(settings))
        async with connection.transaction():
            await emit_many(connection, [PageViewed("/"), OrderPlaced(order_id="ü")])
            await send(connection, Charge("a"))
            await submit(connection, Charge("a"))
        assert before == dict(await connection.fetch(settings))
        assert await connection.fetchval("select count(*) from pg_locks where locktype = 'advisory'") == 0
        if cache == 0:
            assert await connection.fetchval("select count(*) from pg_prepared_statements") == 0
        assert await connection.fetchval("select count(*) from towpath.outbox") == 4


async def test_codecs_that_the_caller_has_set_change_nothing(db: Any) -> None:
    """P4"""
    for type_ in ("json", "uuid", "text"):
        await db.set_type_codec(
            type_, schema="pg_catalog", encoder=lambda value: f"broken {value}", decoder=lambda text: text
        )
    await db.reset_type_codec("text", schema="pg_catalog")
    async with db.transaction():
        message_id = await emit(db, OrderPlaced(order_id="a"), headers=[("a", "1"), ("a", b"\xff\0")])

    found = await db.fetchrow("select message_id::text, headers::text from towpath.outbox")
    assert found[0] == str(message_id)
    assert load_headers(found[1]) == (("a", b"1"), ("a", b"\xff\0"))


async def test_another_schema_is_written_by_its_own_outbox(db: Any, migrated_url: str) -> None:
    await asyncio.to_thread(migrate.upgrade, migrated_url, "tenant_b")
    async with db.transaction():
        await Outbox(schema="tenant_b").emit(db, PageViewed("/"))
        await Outbox(schema="tenant_b").submit(db, Charge("a"))

    assert await db.fetchval("select count(*) from towpath.outbox") == 0
    assert await db.fetchval("select count(*) from tenant_b.outbox") == 2
    assert await db.fetchval("select count(*) from tenant_b.task") == 1


async def test_shards_follow_the_key_and_the_broker_of_the_destination(db: Any) -> None:
    await db.execute("""
        insert into towpath.broker values (1, 'second');
        insert into towpath.destination values ('orders', 1, 'orders')""")
    async with db.transaction():
        await emit_many(db, [OrderPlaced(order_id=key) for key in "abcabc"])
        await emit_many(db, [PageViewed("/") for _ in range(200)])

    rows = await db.fetch("select key, array_agg(distinct shard) as shards from towpath.outbox group by key")
    shards = {row["key"]: set(row["shards"]) for row in rows}
    assert all(len(shards[key]) == 1 and shards[key] <= set(range(16, 32)) for key in "abc")
    assert shards[None] == set(range(16))


async def test_the_sql_function_writes_the_same_row(db: Any) -> None:
    """P4"""
    message_id = await db.fetchval("""
        select towpath.emit('orders', 'order.placed', '{"order_id":"a"}', 'a',
                            '{"tenant": "t1", "plain": "ü"}'::json)""")

    row = await db.fetchrow("select *, headers::text as pairs from towpath.outbox")
    assert (row["message_id"], row["kind"], row["type"], row["key"]) == (
        message_id,
        "event",
        "order.placed",
        "a",
    )
    assert (row["payload"], row["content_type"]) == (b'{"order_id":"a"}', "application/json")
    assert load_headers(row["pairs"]) == (("tenant", b"t1"), ("plain", "ü".encode()))
    assert row["shard"] == await db.fetchval("select towpath.shard('orders', 'a', $1)", message_id)


@pytest.mark.parametrize(
    "headers",
    [
        '"text"', "1", "null", '["a"]', '[["a"]]', '[["a", 1]]', '[["a", "b", "c"]]', '[[1, "a"]]',
        '[["a", null]]', '{"a": null}', '[["a", {"b64": 1}]]', '[["a", {}]]', '[["", "x"]]', '[["ü", "x"]]',
        '[["ce_id", "x"]]', '{"Content-Type": "x"}', '[["towpath-kind", {"b64": "eA=="}]]',
    ],
)  # fmt: skip
async def test_the_sql_function_refuses_malformed_and_reserved_headers(db: Any, headers: str) -> None:
    """X2"""
    with pytest.raises(asyncpg.InvalidParameterValueError, match="malformed towpath headers"):
        await db.execute("select towpath.emit('d', 't', '', headers => $1::text::json)", headers)


@pytest.mark.parametrize(
    "headers", ['[["a", "b"], ["a", {"b64": "/w=="}]]', "[]", "{}", '{"a": "b", "c": "d"}']
)
async def test_the_sql_function_stores_headers_as_the_library_reads_them(db: Any, headers: str) -> None:
    await db.execute("select towpath.emit('d', 't', '', headers => $1::text::json)", headers)

    load_headers(await db.fetchval("select headers::text from towpath.outbox"))


async def test_the_sql_function_keeps_to_the_limits(db: Any) -> None:
    """P11"""
    for arguments in (
        ("a b", "t", None),
        ("", "t", None),
        ("d", "", None),
        ("d", "t" * 201, None),
        ("d", "t", "k" * 513),
    ):
        with pytest.raises(asyncpg.CheckViolationError):
            await db.execute("select towpath.emit($1, $2, '', $3)", *arguments)
    assert isinstance(await db.fetchval("select towpath.emit('d', 't', null, '')"), UUID)


async def test_a_message_can_be_passed_on_with_its_id_key_and_trace(db: Any) -> None:
    """R17"""
    given = UUID("0190aaaa-0000-7000-8000-000000000001")
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with db.transaction():
        message = RawMessage("order.placed", b"{}", "orders", key="k", content_type="application/json")
        assert await emit(db, message, headers={"traceparent": trace}, message_id=given) == given

    row = await db.fetchrow("select message_id, key, headers::text as pairs from towpath.outbox")
    assert (row["message_id"], row["key"]) == (given, "k")
    assert load_headers(row["pairs"]) == (("traceparent", trace.encode()),)
