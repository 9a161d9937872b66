"""Leases and the fenced journal, statement by statement, on real Postgres."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import pytest

from tests.integration.relaying import RecordingBroker
from towpath.relay import Relay, RelayOptions
from towpath.relay.link import PROGRESS
from towpath.store.database import PLANNER_PINS
from towpath.store.journal import Journal, JournalEntry, Progress
from towpath.store.leases import Leases
from towpath.store.outbox import KeyRanges, OutboxReader, Server
from towpath.store.snapshot import Snapshot

LEASES, JOURNAL = Leases(), Journal()
ALL = range(16)
A, B = UUID(int=1), UUID(int=2)


@pytest.fixture
async def other(migrated_url: str) -> "AsyncIterator[asyncpg.Connection[Any]]":
    """A second session, set up like the journal's."""
    connection = await asyncpg.connect(migrated_url, server_settings={**PLANNER_PINS, **PROGRESS}, timeout=30)
    yield connection
    await connection.close(timeout=10)


async def take(
    db: Any, relay: UUID, *, seconds: float = 30, margin: float = 0, count: int = 16
) -> dict[int, int]:
    return await LEASES.take(db, relay, lease_seconds=seconds, margin_seconds=margin, count=count, shards=ALL)


async def server_of(db: Any) -> tuple[Server, Snapshot]:
    return await OutboxReader(db).server()


def entry(base: Snapshot, upto: Snapshot, epochs: dict[int, int], last_id: int | None = None) -> JournalEntry:
    return JournalEntry(base, upto, epochs, dict.fromkeys(epochs, last_id))


async def test_a_relay_that_leaves_gives_back_what_it_does_not_know_it_took(db: Any) -> None:
    """A beat may be cut short between its commit and its answer."""
    for relay, count in ((A, 3), (B, 2)):
        await LEASES.beat(db, relay, "host", 30)
        await take(db, relay, count=count)
    await LEASES.leave(db, A)
    assert len(await take(db, A)) == 14
    assert await db.fetchval("select array_agg(id) from towpath.relay") == [B]


async def test_a_shard_has_one_owner_and_each_owner_another_epoch(db: Any) -> None:
    """R5"""
    first = await take(db, A)
    assert sorted(first) == list(ALL)
    assert await take(db, B) == {}
    await LEASES.release(db, A, {0: first[0], 1: first[1]})
    assert await take(db, B) == {0: first[0] + 1, 1: first[1] + 1}


async def test_a_lapsed_lease_is_not_revived_and_free_only_after_the_margin(db: Any) -> None:
    """R4, R5"""
    await take(db, A, seconds=-0.01)
    assert await LEASES.renew(db, A, 30) == {}
    assert await take(db, B, margin=60) == {}
    assert sorted(await take(db, B)) == list(ALL)


async def test_shards_of_a_relay_that_is_late_are_looked_for_before_its_leases_end(
    db: Any, migrated_url: str
) -> None:
    """R4: so that they are owned again a margin and a second after that, not a heartbeat later."""
    await LEASES.beat(db, A, "host", 30)
    await take(db, A, count=8)
    heartbeat = Relay(migrated_url, RecordingBroker(), RelayOptions())._heartbeat
    assert await heartbeat.beat(), "half of the shards are its fair share"
    await db.execute("update towpath.relay set seen_at = towpath.clock() - interval '26 s' where id = $1", A)
    assert not await heartbeat.beat(), "it may have all of them, and beats every second until it has"
    await db.execute(
        "update towpath.shard_lease set lease_until = towpath.clock() - interval '2 s' where relay = $1", A
    )
    assert await heartbeat.beat()
    await heartbeat.leave()
    heartbeat.close()


async def test_a_release_under_an_older_epoch_is_ignored(db: Any) -> None:
    first = await take(db, A, seconds=-0.01)
    second = await take(db, A)
    await LEASES.release(db, A, first)
    assert await LEASES.renew(db, A, 30) == second


async def test_relays_count_each_other_and_know_their_place(db: Any) -> None:
    """Fair shares need the same order everywhere."""

    async def place(relay: UUID) -> tuple[int, int]:
        beat = await LEASES.beat(db, relay, "host", 30)
        return beat.place, beat.living

    assert await place(B) == (0, 1)
    assert await place(A) == (0, 2)
    assert await place(B) == (1, 2)
    await db.execute("update towpath.relay set seen_at = seen_at - interval '1 hour' where id = $1", A)
    assert await place(B) == (0, 1)
    assert await db.fetchval("select count(*) from towpath.relay") == 1


async def test_the_journal_takes_nothing_without_every_lease(db: Any) -> None:
    """R5: a wrong epoch, a lapsed lease, another relay; it says which shards are still held."""
    epochs = await take(db, A)
    server, now = await server_of(db)
    good = entry(now, now, {0: epochs[0], 1: epochs[1]})
    assert (await JOURNAL.append(db, B, good, server)).held == frozenset()
    stale = entry(now, now, {0: epochs[0], 1: epochs[1] - 1})
    refused = await JOURNAL.append(db, A, stale, server)
    assert (refused.seq, refused.held) == (None, frozenset({0}))
    assert (await JOURNAL.append(db, A, good, server)).seq is not None
    await db.execute("update towpath.shard_lease set lease_until = towpath.clock() where shard = 1")
    lapsed = await JOURNAL.append(db, A, good, server)
    assert (lapsed.seq, lapsed.held) == (None, frozenset({0}))


async def test_the_journal_of_another_server_takes_nothing(db: Any) -> None:
    """R19: a connection that was led elsewhere must not write what was read here."""
    epochs = await take(db, A)
    server, now = await server_of(db)
    for elsewhere in (
        Server("2000-01-01 00:00:00+00", server.timeline, server.backend),
        Server(server.started_at, "00000099", server.backend),
    ):
        refused = await JOURNAL.append(db, A, entry(now, now, epochs), elsewhere)
        assert (refused.seq, refused.held) == (None, frozenset(ALL))


async def test_a_takeover_waits_for_a_journal_row_in_the_making(db: Any, other: Any) -> None:
    """R5: the fence is a lock, so that no row of the old owner appears behind the new one's start."""
    epochs = await take(db, A, count=1)
    server, now = await server_of(db)
    transaction = other.transaction()
    await transaction.start()
    assert (await JOURNAL.append(other, A, entry(now, now, epochs), server)).seq is not None
    await db.execute("set lock_timeout = '200ms'")
    with pytest.raises(asyncpg.LockNotAvailableError):
        await db.execute("update towpath.shard_lease set relay = $1, epoch = epoch + 1 where shard = 0", B)
    await transaction.commit()


async def blocked(connection: Any, waiting: "asyncio.Task[Any]") -> None:
    """Wait until somebody waits for a lock in this database."""
    while not await connection.fetchval(
        "select exists (select from pg_stat_activity where datname = current_database() "
        "and wait_event_type = 'Lock')"
    ):
        assert not waiting.done()
        await asyncio.sleep(0.01)


async def test_a_journal_row_waits_for_a_renewal_that_is_being_written(db: Any, other: Any) -> None:
    """R5, R6: and counts under the lease as it is then."""
    epochs = await take(db, A)
    server, now = await server_of(db)
    transaction = other.transaction()
    await transaction.start()
    assert await LEASES.renew(other, A, 60) == epochs
    appending = asyncio.create_task(JOURNAL.append(db, A, entry(now, now, epochs), server))
    await blocked(other, appending)
    await transaction.commit()
    appended = await appending
    assert appended.seq is not None
    assert appended.held == frozenset(epochs)


async def test_what_is_given_back_meanwhile_is_neither_renewed_nor_journaled(db: Any, other: Any) -> None:
    """R5: a statement that began before it and waited for it."""
    epochs = await take(db, A)
    server, now = await server_of(db)

    async def beside_a_release(shard: int, waiting: "asyncio.Task[Any]") -> Any:
        await LEASES.release(other, A, {shard: epochs[shard]})
        await blocked(other, waiting)
        await transaction.commit()
        return await waiting

    transaction = other.transaction()
    await transaction.start()
    await other.execute("select from towpath.shard_lease where shard = 0 for update")
    appending = asyncio.create_task(JOURNAL.append(db, A, entry(now, now, epochs), server))
    appended = await beside_a_release(0, appending)
    assert (appended.seq, appended.held) == (None, frozenset(epochs) - {0})
    transaction = other.transaction()
    await transaction.start()
    await other.execute("select from towpath.shard_lease where shard = 1 for update")
    assert await beside_a_release(1, asyncio.create_task(LEASES.renew(db, A, 60))) == {
        shard: epoch for shard, epoch in epochs.items() if shard > 1
    }


async def test_a_shards_progress_is_its_newest_row_under_its_highest_epoch(db: Any) -> None:
    """A row that an old owner wrote late does not win."""
    server, base = await server_of(db)
    first = await take(db, A)
    await JOURNAL.append(db, A, entry(base, base, first, 5), server)
    await LEASES.release(db, A, first)
    second = await take(db, B)
    _, upto = await server_of(db)
    await JOURNAL.append(db, B, entry(base, upto, {0: second[0]}), server)
    await db.execute(
        "insert into towpath.journal (relay, shards, epochs, last_ids, snapshot_from, snapshot_to) "
        "values ($1, '{0}', array[$2::bigint], '{7}', $3::text::pg_snapshot, $3::text::pg_snapshot)",
        A,
        first[0],
        base.text,
    )
    loaded = await JOURNAL.load(db, [0, 1])
    assert loaded == {0: Progress(base, upto, None), 1: Progress(base, base, 5)}


async def test_trimming_and_sweeping_keep_what_any_shard_needs(db: Any) -> None:
    """Journal rows of lost shards and dead relays do not pile up."""
    server, now = await server_of(db)
    epochs = await take(db, A)
    seqs = [(await JOURNAL.append(db, A, entry(now, now, {0: epochs[0]}), server)).seq for _ in range(5)]
    before = await JOURNAL.load(db, list(ALL))
    await JOURNAL.trim(db, [seq for seq in seqs[:3] if seq])
    assert await JOURNAL.load(db, list(ALL)) == before
    await JOURNAL.sweep(db, seqs[4] or 0)
    assert await JOURNAL.load(db, list(ALL)) == before
    assert await db.fetchval("select count(*) from towpath.journal") == 2


async def test_chunks_of_a_window_are_the_window(db: Any) -> None:
    """R11: keys listed and fetched in pieces give the rows that one poll gives."""
    await db.execute("select pg_current_xact_id()")
    _, base = await server_of(db)
    for shard in (1, 1, 2):
        async with db.transaction():
            for number in range(20):
                await db.execute(
                    "insert into towpath.outbox "
                    "(shard, message_id, kind, destination, type, content_type, payload) "
                    "values ($1, $2, 'event', 'd', 't', 'c', $3)",
                    shard,
                    uuid4(),
                    bytes(number * 10),
                )
    reader = OutboxReader(db)
    poll = await reader.poll([1, 2, 3], base, None, row_limit=1000, byte_limit=10**9)
    assert (len(poll.rows), poll.is_truncated) == (60, False)
    assert (await reader.poll([1, 2, 3], base, None, row_limit=59, byte_limit=10**9)).is_truncated
    assert (await reader.poll([1, 2, 3], base, None, row_limit=60, byte_limit=1000)).is_truncated
    lists = await reader.list_keys({1: 0, 2: 0, 3: 0}, base, poll.upto, limit=30)
    assert {shard: len(keys) for shard, keys in lists.items()} == {1: 30, 2: 20, 3: 0}
    found = []
    for shard in (1, 2):
        while lists[shard]:
            ranges = KeyRanges()
            ranges.add(shard, lists[shard].first(7))
            rows = await reader.fetch(ranges, byte_limit=300)
            assert rows
            assert len(rows) == 1 or sum(len(row[9]) for row in rows) <= 300
            found += rows
            lists[shard].consume_up_to(rows[-1][0])
    rest = await reader.list_keys({1: found[29][0]}, base, poll.upto, limit=30)
    assert len(rest[1]) == 10
    everything = {row[0]: row[9] for row in poll.rows}
    assert {row[0]: row[9] for row in found}.items() <= everything.items()
    assert [row[0] for row in found if row[1] == 1] == [row[0] for row in poll.rows if row[1] == 1][:30]
