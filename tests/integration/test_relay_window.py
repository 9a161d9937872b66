"""The window poll against racing writers, on real Postgres."""

import asyncio
import time
from typing import Any

import asyncpg
import psutil
import pytest

from tests.integration.relaying import (
    FAST,
    RecordingBroker,
    Verdict,
    emit,
    emit_many,
    eventually,
    judge,
    prepare,
    race,
    relaying,
)
from towpath.relay import RelayOptions
from towpath.relay.link import Link
from towpath.store.statements import load

LIST_KEYS = load("relay")["list_keys"]
LOWEST = "select min(pg_snapshot_xmax(snapshot_to)::text::bigint) from towpath.shard_progress"


async def hold_a_write_transaction(url: str, ending: asyncio.Event) -> None:
    """Somebody else's transaction with an xid, open all the while."""
    connection = await asyncpg.connect(url, timeout=30)
    transaction = connection.transaction()
    await transaction.start()
    await connection.execute("create temp table elsewhere (a integer)")
    await ending.wait()
    await transaction.rollback()
    await connection.close(timeout=10)


@pytest.mark.parametrize("held_in", [None, "the same database", "another database"])
async def test_racing_writers_lose_double_and_invert_nothing(
    db: "asyncpg.Connection[Any]", migrated_url: str, postgres_url: str, scale: float, held_in: str | None
) -> None:
    """P2, R1, R2: 16 writers with savepoints and rollbacks, maybe a foreign write transaction held open."""
    await prepare(db)
    committed: list[tuple[str, int]] = []
    broker, told, ending = RecordingBroker(), asyncio.Event(), asyncio.Event()
    async with relaying(migrated_url, broker), asyncio.TaskGroup() as tasks:
        if held_in:
            held_url = migrated_url if held_in == "the same database" else postgres_url
            tasks.create_task(hold_a_write_transaction(held_url, ending))
        writers = [
            tasks.create_task(race(migrated_url, committed, writer=number, until=told))
            for number in range(16)
        ]
        await asyncio.sleep(3 * scale)
        await eventually(lambda: len(committed) > 100)
        told.set()
        await asyncio.wait(writers)
        # While the foreign transaction is still open:
        await eventually(lambda: judge(committed, broker).lost == 0)
        ending.set()
    assert judge(committed, broker) == Verdict(lost=0, ghosts=0, duplicates=0, inversions=0)


async def test_uncommitted_rows_of_a_bulk_transaction_hold_up_nobody(
    db: "asyncpg.Connection[Any]", migrated_url: str, scale: float
) -> None:
    """R1: polls do not read the rows of a transaction in progress again and again."""
    bulk = await asyncpg.connect(migrated_url, timeout=30)
    broker = RecordingBroker()
    async with relaying(migrated_url, broker):
        transaction = bulk.transaction()
        await transaction.start()
        await emit_many(bulk, int(30_000 * scale))
        for number in range(50):
            await emit(db, "1", b"%d" % number)
        await eventually(lambda: len(broker.arrivals) == 50)
        await transaction.commit()
        await eventually(lambda: len(broker.arrivals) == 50 + int(30_000 * scale), seconds=60)
    await bulk.close(timeout=10)
    sequences = [each.message.sequence for each in broker.arrivals if each.message.key != "1"]
    by_key: dict[str | None, list[int]] = {}
    for each in broker.arrivals:
        by_key.setdefault(each.message.key, []).append(each.message.sequence)
    assert len(set(sequences)) == len(sequences)
    assert all(found == sorted(found) for key, found in by_key.items() if key != "1")


async def test_a_transaction_of_50_000_rows_is_read_in_bounded_memory(
    db: "asyncpg.Connection[Any]", migrated_url: str
) -> None:
    """R11: 100 MB of payloads pass in chunks, in id order, once each."""
    count = 50_000
    await emit_many(db, count, size=2000)
    broker = RecordingBroker(is_keeping=False)
    ids: list[int] = []

    async def note(_: int, window: Any) -> None:
        ids.extend(message.sequence for message in window)

    broker.before = note
    process = psutil.Process()
    before, highest = process.memory_info().rss, 0
    async with relaying(migrated_url, broker, RelayOptions()):
        deadline = time.monotonic() + 90
        while broker.count < count:
            assert time.monotonic() < deadline
            highest = max(highest, process.memory_info().rss)
            await asyncio.sleep(0.02)
    assert len(set(ids)) == len(ids) == count
    assert highest - before < 80_000_000


async def test_the_first_message_of_a_backlog_leaves_before_most_of_it_is_listed(
    db: "asyncpg.Connection[Any]", migrated_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R11: a quarter of the shards at most, with what is read ahead: the rest cannot delay it."""
    await emit_many(db, 30_000)
    broker, opened = RecordingBroker(is_keeping=False), Link._open
    listed, listed_before = list[int](), list[int]()

    def note(asked: Any) -> None:
        if asked.query == LIST_KEYS:
            listed.extend(asked.args[0])

    async def counted(link: Link) -> Any:
        connection = await opened(link)
        connection.add_query_logger(note)
        return connection

    async def publishing(_: int, window: Any) -> None:
        listed_before.append(len(set(listed)))

    monkeypatch.setattr(Link, "_open", counted)
    broker.before = publishing
    async with relaying(migrated_url, broker, RelayOptions(window_rows=500)):
        await eventually(lambda: broker.count == 30_000)
    assert len(set(listed)) > 8
    assert listed_before[0] <= 4


async def test_large_payloads_are_published_in_windows_of_bounded_bytes(
    db: "asyncpg.Connection[Any]", migrated_url: str
) -> None:
    """R11: the byte limit cuts windows, also where a single message exceeds it."""
    options = RelayOptions(window_bytes=100_000)
    sizes = [10, 40_000, 150_000, 40_000, 40_000, 40_000, 300_000, 5] * 5
    async with db.transaction():
        for number, size in enumerate(sizes):
            await emit(db, "k", b"%06d" % number + bytes(size))
    windows: list[int] = []
    broker = RecordingBroker(is_keeping=True)

    async def note(_: int, window: Any) -> None:
        windows.append(sum(len(message.payload) for message in window) if len(window) > 1 else 0)

    broker.before = note
    async with relaying(migrated_url, broker, options):
        await eventually(lambda: len(broker.arrivals) == len(sizes))
    assert [int((payload or b"")[:6]) for payload in broker.payloads] == list(range(len(sizes)))
    assert max(windows) <= 100_000


async def test_a_shard_held_up_joins_the_others_again(
    db: "asyncpg.Connection[Any]", migrated_url: str
) -> None:
    """R10: shards at different cuts are read separately and end at one; nothing is skipped."""
    broker = RecordingBroker()
    total = 0
    async with relaying(migrated_url, broker) as relay:
        await eventually(lambda: len(relay.status().shards) == 16)
        for round_ in range(30):
            broker.is_available = round_ % 3 != 1
            for key in range(10):
                await emit(db, str(key), b"%d" % round_)
                total += 1
            await asyncio.sleep(0.01)
        broker.is_available = True
        await eventually(lambda: len({each.message.message_id for each in broker.arrivals}) == total)
        await eventually(lambda: relay.status().held_count == 0)
    committed = [(str(key), round_) for key in range(10) for round_ in range(30)]
    found = judge(committed, broker)
    assert (found.lost, found.ghosts, found.inversions) == (0, 0, 0)
    pending = await db.fetchval("select count(*) from towpath.outbox_message where status = 'PENDING'")
    assert pending == 0


async def test_an_idle_relay_writes_no_journal_on_its_own_account(
    db: "asyncpg.Connection[Any]", migrated_url: str
) -> None:
    """R13: its own journal rows and heartbeats must not call for the next ones."""
    broker = RecordingBroker()
    async with relaying(migrated_url, broker, FAST) as relay:
        await emit(db, "1", b"1")
        await eventually(lambda: len(broker.arrivals) == 1)
        await eventually(lambda: len(relay.status().shards) == 16)
        # Its own would call for the next one within a second, always; another's transaction may call for one.
        newest, deadline = -1, time.monotonic() + 60
        while newest != (found := await db.fetchval("select coalesce(max(seq), 0) from towpath.journal")):
            assert time.monotonic() < deadline
            newest = found
            await asyncio.sleep(2.5)


async def test_every_shard_is_journaled_while_the_snapshot_moves(
    db: "asyncpg.Connection[Any]", migrated_url: str
) -> None:
    """R10: other transactions' work moves the journal now and then without any message."""
    async with relaying(migrated_url, RecordingBroker(), FAST) as relay:
        await eventually(lambda: len(relay.status().shards) == 16)
        start = await db.fetchval(
            "select min(pg_snapshot_xmax(snapshot_to)::text::bigint) from towpath.shard_progress"
        )
        deadline = time.monotonic() + 60
        while True:
            await db.execute("select pg_current_xact_id()")
            if await db.fetchval(LOWEST) > start + 20:
                break
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)
