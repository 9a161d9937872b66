"""What a transaction that is left open for long costs the relay: nothing that it made dead can be removed."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import asyncpg

from tests.integration.relaying import emit_many
from tests.plans.test_relay_plans import like_the_relay
from towpath.store.statements import load

POLL = load("relay")["poll"]
SHARDS = list(range(16))


@asynccontextmanager
async def held_horizon(url: str) -> AsyncIterator[None]:
    """A transaction with a snapshot, which does nothing more."""
    connection = await asyncpg.connect(url, timeout=30)
    await connection.execute("begin isolation level repeatable read; select count(*) from towpath.outbox")
    try:
        yield
    finally:
        await connection.close(timeout=10)


async def next_cut(db: Any) -> str:
    found: str = await db.fetchval("select pg_snapshot_xmax(pg_current_snapshot())::text")
    return found


async def pages_of_a_poll(relay: Any, cut: str, count: int) -> int:
    """How many pages a poll of one window touches; the least of some, for others write to the same pages."""
    found: list[int] = []
    for _ in range(5):
        text = await relay.fetchval(
            f"explain (analyze, buffers, format json) {POLL}", cut, SHARDS, "{}", None, 2000, 8_000_000
        )
        [plan] = json.loads(text)
        assert plan["Plan"]["Actual Rows"] == count + 1
        found.append(plan["Plan"]["Shared Hit Blocks"] + plan["Plan"]["Shared Read Blocks"])
    return min(found)


async def test_a_poll_reads_as_few_pages_after_an_hours_work_under_a_held_horizon(
    db: Any, migrated_url: str
) -> None:
    """R3, R12: nothing it reads is ever updated or deleted, so there is nothing dead to step over."""
    async with like_the_relay(migrated_url) as relay:

        async def window() -> int:
            cut = await next_cut(db)
            await emit_many(db, 500)
            return await pages_of_a_poll(relay, cut, 500)

        await emit_many(db, 5000)
        before = await window()
        async with held_horizon(migrated_url):
            for _ in range(20):
                await emit_many(db, 2500)
                # What a transaction that fails leaves behind is dead as well.
                transaction = db.transaction()
                await transaction.start()
                await emit_many(db, 2500)
                await transaction.rollback()
            after = await window()
        idle = await pages_of_a_poll(relay, await next_cut(db), 0)
    # One more level of the index of each shard, and a page where the entries of a shard are split.
    assert after <= before * 1.1 + 4 * 16
    assert idle <= 4 * 16 * 4
