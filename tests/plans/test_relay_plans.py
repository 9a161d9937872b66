"""No statement of the relay scans a table: on tables nobody has analysed, and on filled ones."""

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import pytest

from towpath.relay.link import PROGRESS
from towpath.store.database import PLANNER_PINS
from towpath.store.outbox import poll_and_look
from towpath.store.snapshot import Snapshot
from towpath.store.statements import load

STATEMENTS = {
    **load("relay"),
    **load("scheduled"),
    **load("parking"),
    **load("republish"),
    **load("wakeup"),
    **load("canary"),
    "backlog": load("status")["backlog"],
    "poll and look": poll_and_look(),
}
READ_WHOLE = {
    "beat_relay": {"relay", "destination"},
    "confirm": {"canary"},
    "stay_asleep": {"outbox_id_seq", "relays_asleep_until"},
}
"""One row per relay every few seconds, sixteen canaries per broker, and sequences, which are a row each."""


def nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Every node of a plan."""
    yield plan
    for child in plan.get("Plans", []):
        yield from nodes(child)


async def generic_plan(connection: "asyncpg.Connection[Any]", statement: str) -> list[dict[str, Any]]:
    """The nodes of the plan that is used for whatever parameters."""
    count = len((await connection.prepare(statement)).get_parameters())
    arguments = f"({', '.join(['null'] * count)})" if count else ""
    await connection.execute(f"prepare examined as {statement}")
    text = await connection.fetchval(f"explain (format json) execute examined{arguments}")
    await connection.execute("deallocate examined")
    return list(nodes(json.loads(text)[0]["Plan"]))


@asynccontextmanager
async def like_the_relay(url: str) -> "AsyncIterator[asyncpg.Connection[Any]]":
    """A connection whose planner is set as the relay's is."""
    connection = await asyncpg.connect(url, server_settings={**PLANNER_PINS, **PROGRESS}, timeout=30)
    try:
        yield connection
    finally:
        await connection.close(timeout=10)


async def fill(db: "asyncpg.Connection[Any]") -> None:
    """Enough rows that a planner without pins would think of scans."""
    await db.execute(
        """
        insert into towpath.outbox (shard, message_id, kind, destination, type, key, content_type, payload)
        select g % 16, gen_random_uuid(), 'event', 'orders', 'order.placed', (g % 100)::text, 'x', '\\x00'
        from generate_series(1, 30000) g;
        insert into towpath.scheduled (due_at, message_id, destination, type, key, content_type, payload)
        select clock_timestamp() + make_interval(days => 1, secs => g), gen_random_uuid(), 'orders',
               'order.placed', (g % 100)::text, 'x', '\\x00'
        from generate_series(1, 20000) g;
        insert into towpath.publish_gate (shard, destination, key, policy, message_id, sequence)
        select g % 16, 'orders', g::text, 'park_key', gen_random_uuid(), g from generate_series(1, 5000) g;
        insert into towpath.parked_message
        select 1 + g % 5000, g, gen_random_uuid(), 'event', 't', 'k', 'x', '[]', '\\x00', now()
        from generate_series(1, 20000) g;
        insert into towpath.scheduled_progress (seq, due_upto, id_upto, snapshot)
        select g, clock_timestamp(), 0, pg_current_snapshot() from generate_series(2, 3000) g;
        insert into towpath.journal (shards, epochs, last_ids, snapshot_from, snapshot_to)
        select array[g % 16]::smallint[], array[g]::bigint[], array[null]::bigint[],
               pg_current_snapshot(), pg_current_snapshot()
        from generate_series(1, 3000) g;
        insert into towpath.dead_letter (consumer_group, message_id, stage, source, reason_code, fingerprint)
        select 'g', gen_random_uuid(), 'handle', 'orders', 'bad', 'f' from generate_series(1, 5000);
        insert into towpath.destination (name, address)
        select 'd' || g, 'a' || g from generate_series(1, 500) g;
        analyze
        """
    )


@pytest.mark.parametrize("is_filled", [False, True], ids=["never analysed", "filled"])
async def test_every_statement_of_the_relay_goes_by_an_index(
    db: "asyncpg.Connection[Any]", migrated_url: str, is_filled: bool
) -> None:
    """R1, R12: a scan would grow with what is retained, and a custom plan costs every poll."""
    if is_filled:
        await fill(db)
    async with like_the_relay(migrated_url) as connection:
        plans = {name: await generic_plan(connection, text) for name, text in STATEMENTS.items()}
    scanned: dict[str, set[str]] = {}
    for name, plan in plans.items():
        for node in plan:
            if node["Node Type"] in ("Seq Scan", "Bitmap Heap Scan"):
                scanned.setdefault(name, set()).add(node["Relation Name"])
    assert scanned == READ_WHOLE


@pytest.mark.parametrize("is_filled", [False, True], ids=["never analysed", "filled"])
async def test_reads_of_the_outbox_enter_each_partition_by_shard_and_transaction(
    db: "asyncpg.Connection[Any]", migrated_url: str, is_filled: bool
) -> None:
    """R12: by shard alone a poll would walk through everything retained.

    `backlog` may read more than a window: all that is not sent yet, of which it counts as many as it is told.
    """
    if is_filled:
        await fill(db)
    for name in ("poll", "poll and look", "list_keys", "fetch_keys", "backlog"):
        async with like_the_relay(migrated_url) as connection:
            plan = await generic_plan(connection, STATEMENTS[name])
        scans = [node for node in plan if node.get("Relation Name", "").startswith("outbox_")]
        assert len(scans) >= 4
        for scan in scans:
            assert scan["Index Name"].endswith("_shard_xid_id_idx")
            assert "shard" in scan["Index Cond"]
            assert "xid" in scan["Index Cond"]


@pytest.mark.parametrize("is_filled", [False, True], ids=["never analysed", "filled"])
async def test_what_is_scheduled_for_later_is_not_read_before(
    db: "asyncpg.Connection[Any]", migrated_url: str, is_filled: bool
) -> None:
    """R18: the due times are entered at the place reached, new rows by their transaction."""
    if is_filled:
        await fill(db)
    for name, count in {"look": 5, "poll and look": 5, "move": 4, "forget_moved": 1}.items():
        async with like_the_relay(migrated_url) as connection:
            plan = await generic_plan(connection, STATEMENTS[name])
        scans = [node for node in plan if node.get("Relation Name") == "scheduled" and "Index Name" in node]
        assert len(scans) == count, name
        for scan in scans:
            entered_by = {"scheduled_pkey": "id) > ROW(", "scheduled_window": "xid"}[scan["Index Name"]]
            assert entered_by in scan.get("Index Cond", ""), json.dumps((name, scan))


async def sorted_counts(
    connection: "asyncpg.Connection[Any]", statement: str, *given: str | None
) -> list[int]:
    """How many rows each sort of the generic plan reads when it runs."""
    await connection.execute(f"prepare examined as {statement}")
    arguments = ", ".join("null" if each is None else f"'{each}'" for each in given)
    text = await connection.fetchval(f"explain (analyze, format json) execute examined({arguments})")
    await connection.execute("deallocate examined")
    return [
        round(child["Actual Rows"] * child["Actual Loops"])
        for node in nodes(json.loads(text)[0]["Plan"])
        if "Sort" in node["Node Type"]
        for child in node["Plans"]
        if child["Parent Relationship"] == "Outer"
    ]


async def test_no_more_is_sorted_than_the_window_holds(
    db: "asyncpg.Connection[Any]", migrated_url: str
) -> None:
    """R1, R12: a window of 320 rows, half of them of a transaction in progress at the cut, beside 30,000.

    A poll of it sorts what it may return and its own row, a list its keys, and a fetch the rows of its list.
    """
    limit = 100
    emit = """
        insert into towpath.outbox (shard, message_id, kind, destination, type, key, content_type, payload)
        select g % 16, gen_random_uuid(), 'event', 'orders', 'order.placed', g::text, 'x', '\\x00'
        from generate_series(1, 160) g returning shard, xid::text, id
    """
    await fill(db)
    before: int = await db.fetchval("select max(id) from towpath.outbox")
    async with like_the_relay(migrated_url) as early:
        transaction = early.transaction()
        await transaction.start()
        window = await early.fetch(emit)
        await db.execute("select pg_current_xact_id()")  # a later one has ended
        cut = Snapshot(await db.fetchval("select pg_current_snapshot()::text"))
        await transaction.commit()
    middle = max(row["id"] for row in window)
    window += await db.fetch(emit)
    xmax, in_progress = cut.bounds
    assert in_progress != "{}"
    shards = f"{{{','.join(map(str, range(16)))}}}"
    listed = sorted(window, key=lambda row: row["id"])[:limit]
    places = {(row["shard"], row["xid"]) for row in listed}
    ranges = [
        (shard, xid, ids[0], ids[-1])
        for shard, xid in places
        for ids in [[row["id"] for row in listed if (row["shard"], row["xid"]) == (shard, xid)]]
    ]
    columns = [f"{{{','.join(map(str, column))}}}" for column in zip(*ranges, strict=True)]

    async with like_the_relay(migrated_url) as connection:
        upto = await connection.fetchval("select pg_current_snapshot()::text")
        wanted = (xmax, shards, in_progress)
        poll = await sorted_counts(connection, STATEMENTS["poll"], *wanted, None, str(limit), str(1_000_000))
        lists = {}
        for after in (0, before, middle):
            after_ids = f"{{{','.join([str(after)] * 16)}}}"
            lists[after] = await sorted_counts(
                connection,
                STATEMENTS["list_keys"],
                *(shards, xmax, in_progress, upto, after_ids, str(limit)),
            )
        fetch = await sorted_counts(connection, STATEMENTS["fetch_keys"], *columns, str(1_000_000))

    assert poll == [limit + 1]
    assert lists == {0: [320], before: [320], middle: [160]}
    assert fetch
    assert set(fetch) == {limit}
