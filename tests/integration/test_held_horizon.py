"""What a transaction that is left open for long costs the relay: nothing that it made dead can be removed."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from uuid import UUID

import asyncpg

from tests.integration.relaying import emit_many
from tests.plans.test_relay_plans import like_the_relay
from towpath.store.journal import Journal
from towpath.store.leases import Leases
from towpath.store.statements import load

POLL = load("relay")["poll"]
RENEW = load("relay")["renew_leases"]
APPEND = load("relay")["append_progress"]
BACKLOG = load("status")["backlog"]
LOAD = load("relay")["load_progress"]
VERDICT = load("retention")["verdict"]
RENEWALS = 720
"""Of an hour."""
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


async def pages_of(relay: Any, statement: str, *arguments: Any) -> tuple[int, int]:
    """How many pages a statement touches, and how many rows it gives back."""
    [plan] = json.loads(
        await relay.fetchval(f"explain (analyze, buffers, format json) {statement}", *arguments)
    )
    node = plan["Plan"]
    return node["Shared Hit Blocks"] + node["Shared Read Blocks"], node["Actual Rows"]


async def next_cut(db: Any) -> str:
    found: str = await db.fetchval("select pg_snapshot_xmax(pg_current_snapshot())::text")
    return found


async def pages_of_a_poll(relay: Any, cut: str, count: int) -> int:
    """How many pages a poll of one window touches; the least of some, for others write to the same pages."""
    found: list[int] = []
    for _ in range(5):
        pages, rows = await pages_of(relay, POLL, cut, SHARDS, "{}", None, 2000, 8_000_000)
        assert rows == count + 1
        found.append(pages)
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


async def test_where_shards_stand_is_found_behind_what_was_trimmed_under_a_held_horizon(
    db: Any, migrated_url: str
) -> None:
    """R3: each renewal notes where the shards' newest journal rows are, so that loading progress, the look
    at the backlog and the verdict on a slot step over nothing that was trimmed before.
    """
    relay_id, leases = UUID(int=1), Leases()
    await leases.take(db, relay_id, lease_seconds=3600, margin_seconds=0, count=16, shards=range(16))
    await emit_many(db, 500)
    slot = await db.fetchval("select slot from towpath.outbox limit 1")
    async with like_the_relay(migrated_url) as relay:
        await relay.execute("set towpath.retention_seconds = 3600")

        async def trimmed(rows: int) -> None:
            """What one relay writes and trims between two renewals."""
            newest = await db.fetchval(
                """
                with written as (
                  insert into towpath.journal (relay, shards, epochs, last_ids, snapshot_from, snapshot_to)
                  select $1, array_agg(l.shard), array_agg(l.epoch), array_agg(null::bigint),
                         pg_current_snapshot(), pg_current_snapshot()
                  from generate_series(1, $2) g, towpath.shard_lease l group by g returning seq
                ) select max(seq) from written
                """,
                relay_id,
                rows,
            )
            await db.execute("delete from towpath.journal where seq < $1", newest)
            assert len(await leases.renew(db, relay_id, 3600, dict.fromkeys(SHARDS, newest))) == 16

        async def looks() -> list[int]:
            found, rows = await pages_of(relay, LOAD, SHARDS)
            assert rows == 16
            others = [
                await pages_of(relay, BACKLOG, 0, 15, 10_000),
                await pages_of(relay, VERDICT.replace("outbox_0", f"outbox_{slot}")),
            ]
            return [found, *(pages for pages, _ in others)]

        await trimmed(100)
        before = await looks()
        async with held_horizon(migrated_url):
            for _ in range(100):
                await trimmed(100)
            after = await looks()
    # 10,000 rows fill 400 pages and more; sixteen leases may lie one level deeper.
    assert all(new <= old + 100 for new, old in zip(after, before, strict=True)), (before, after)


async def test_a_renewal_notes_no_journal_row_that_is_not_there(db: Any) -> None:
    """R19: memory may be ahead of a server that was replaced, and what is passed over is never loaded."""
    relay_id, leases = UUID(int=1), Leases()
    await leases.take(db, relay_id, lease_seconds=3600, margin_seconds=0, count=16, shards=range(16))
    first = await db.fetchval("select max(seq) from towpath.journal")
    for claimed in (first, first + 1000):
        await leases.renew(db, relay_id, 3600, {3: claimed})
        assert await db.fetchval("select journaled from towpath.shard_lease where shard = 3") == first
    assert await db.fetchval("select max(journaled) from towpath.shard_lease where shard <> 3") == 0
    assert set(await Journal().load(db, SHARDS)) == set(SHARDS)


async def test_a_lease_and_the_journal_cost_the_same_after_an_hours_renewals_under_a_held_horizon(
    db: Any, migrated_url: str
) -> None:
    """R3: renewals, the fence of a journal row and the look at the backlog step over no dead lease."""
    relay_id, leases = UUID(int=1), Leases()
    epochs = await leases.take(
        db, relay_id, lease_seconds=3600, margin_seconds=0, count=len(SHARDS), shards=range(16)
    )
    server, cut = await db.fetchrow(load("relay")["server"]), await next_cut(db)
    snapshot = f"{cut}:{cut}:"
    progress = [relay_id, SHARDS, [epochs[shard] for shard in SHARDS], [None] * 16, snapshot, snapshot]
    async with like_the_relay(migrated_url) as relay:

        async def renewal() -> int:
            """The least of some: pages are split now and then."""
            found = [await pages_of(relay, RENEW, relay_id, 3600, SHARDS, [1] * 16) for _ in range(5)]
            assert [rows for _, rows in found] == [16] * 5
            return min(pages for pages, _ in found)

        async def journal_row() -> int:
            before = await db.fetchval("select count(*) from towpath.journal")
            started_at, timeline = server["started_at"], server["timeline"]
            found = [await pages_of(relay, APPEND, *progress, started_at, timeline) for _ in range(5)]
            assert await db.fetchval("select count(*) from towpath.journal") == before + 5
            return min(pages for pages, _ in found)

        async def backlog() -> int:
            return min([(await pages_of(relay, BACKLOG, 0, 15, 10_000))[0] for _ in range(5)])

        before = await renewal(), await journal_row(), await backlog()
        async with held_horizon(migrated_url):
            for _ in range(RENEWALS):
                assert await leases.renew(relay, relay_id, 3600) == epochs
            after = await renewal(), await journal_row(), await backlog()
    # An hour's index has a level more, which each way into it descends.
    assert after[0] <= before[0] + 4 * 16
    assert after[1] <= before[1] + 2 * 16
    assert after[2] <= before[2] + 2 * 16
