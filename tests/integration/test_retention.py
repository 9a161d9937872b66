"""Clearing the outbox ring on real Postgres: never an unsent row, never at a producer's expense.

Times are hours on a clock of the test's own, which starts with slot 0: slot 1 begins at 6, and so on.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any
from uuid import UUID

import asyncpg
import pytest
import pytest_asyncio

from tests.integration.relaying import (
    FAST,
    RecordingBroker,
    emit,
    eventually,
    judge,
    prepare,
    race,
    relaying,
)
from towpath.errors import ConfigurationError
from towpath.relay import Relay, RelayOptions
from towpath.relay.hooks import RelayHooks
from towpath.relay.link import Link
from towpath.relay.progress import Shards
from towpath.relay.retention import HOLD_SECONDS, RETENTION, Clearing, longest_retention
from towpath.store import migrate
from towpath.store.database import PLANNER_PINS
from towpath.store.retention import Retention
from towpath.testing.services import PostgresServer

STORE = Retention()
KEEP = 6 * 3600.0
MIDNIGHT = 1893456000
QUEUED = """
select l.mode, l.relation::regclass from pg_locks l
 where not l.granted and l.database = (select oid from pg_database where datname = current_database())
"""
CLEARABLE = 13.0
"""An hour at which rows of hour 1 are old enough and slot 0 is neither current nor next."""


async def at(db: Any, hour: float) -> None:
    """Set the database's clock to an hour of the ring; it goes on from there."""
    await db.execute(
        "create or replace function towpath.clock() returns timestamptz language sql volatile as $$ "
        f"select to_timestamp({MIDNIGHT + hour * 3600}) + (clock_timestamp() - to_timestamp({time.time()}))$$"
    )


async def rotate_every(db: Any, seconds: int) -> None:
    await db.execute(
        "create or replace function towpath.rotate_seconds() returns integer language sql immutable "
        f"as $$ select {seconds} $$"
    )


async def note_all_sent(db: Any) -> None:
    """What a relay does that has published whatever is committed."""
    await db.execute(
        "insert into towpath.journal (shards, epochs, last_ids, snapshot_from, snapshot_to) "
        "select array_agg(n::smallint), array_agg(1::bigint), array_agg(null::bigint), "
        "pg_current_snapshot(), pg_current_snapshot() from generate_series(0, 15) n"
    )


async def clear(connection: Any, slot: int = 0, *, hold: float = 20) -> str | None:
    """One try, as patient as a busy machine needs."""
    return await STORE.clear(connection, slot, KEEP, hold_seconds=hold)


async def count(db: Any, slot: int = 0) -> int:
    found: int = await db.fetchval(f"select count(*) from towpath.outbox_{slot}")
    return found


async def connect(url: str) -> "asyncpg.Connection[Any]":
    return await asyncpg.connect(url, server_settings={**PLANNER_PINS, **RETENTION}, timeout=30)


@pytest_asyncio.fixture
async def relay(migrated_url: str) -> "AsyncIterator[asyncpg.Connection[Any]]":
    """A session set up like the relay's own."""
    connection = await connect(migrated_url)
    yield connection
    await connection.close(timeout=10)


@pytest_asyncio.fixture
async def producer(migrated_url: str) -> "AsyncIterator[asyncpg.Connection[Any]]":
    connection = await asyncpg.connect(migrated_url, timeout=30)
    yield connection
    await connection.close(timeout=10)


class Heard(RelayHooks):
    """Remembers what was told."""

    def __init__(self) -> None:
        super().__init__(UUID(int=1), "memory")
        self.told: list[tuple[Any, ...]] = []
        self.rings: list[tuple[int, int]] = []

    def slot_cleared(self, slot: int, size: int, seconds: float) -> None:
        super().slot_cleared(slot, size, seconds)
        self.told.append(("cleared", slot))

    def slot_blocked(self, slot: int, reason: str, unsent: Sequence[int], holders: Sequence[str]) -> None:
        super().slot_blocked(slot, reason, unsent, holders)
        self.told.append(("blocked", slot, reason, *unsent, *holders))

    def slot_thinned(self, slot: int, count: int, seconds: float) -> None:
        super().slot_thinned(slot, count, seconds)
        self.told.append(("thinned", slot, count))

    def ring(self, free: int, blocked: int) -> None:
        super().ring(free, blocked)
        self.rings.append((free, blocked))


def clearing_of(url: str, heard: Heard, *, owns: bool = True, hold: float = 20) -> Clearing:
    """The loop of a relay that owns the first shard, or does not; as patient as a busy machine needs."""
    shards = Shards(held_bytes=1)
    if owns:
        shards.acquire(0, 1, float("inf"))
    link = Link(url, "retention", RETENTION, command_timeout_seconds=30)
    return Clearing(link, Retention(), shards, RelayOptions(), heard, hold_seconds=hold)


@pytest.mark.parametrize(
    ("hour", "reason"),
    [(1.1, "current"), (6.5, "young"), (11.9, None), (CLEARABLE, None), (17.9, None), (18.1, "current")],
)
async def test_a_slot_goes_when_it_is_old_and_neither_current_nor_next(
    db: Any, relay: Any, hour: float, reason: str | None
) -> None:
    """R22: written in hour 1, kept for 6, needed again from hour 18."""
    await at(db, 1)
    await emit(db, "k", b"1")
    await note_all_sent(db)
    await at(db, hour)
    assert (await STORE.verdict(relay, 0, KEEP)).reason == reason
    assert await clear(relay) == reason
    assert await count(db) == (0 if reason is None else 1)


@pytest.mark.parametrize(
    ("base", "upto", "last_id", "xid"),
    [
        ("3:3:", "3:3:", None, None),
        ("3:3:", "{now}", 1, None),
        ("{now}", "{row}:{next}:{row}", None, None),
        ("{now}", "{now}", None, "77"),
        ("10:4000000000:", "10:4000000000:", None, None),
        (None, None, None, None),
    ],
    ids=["older", "partial", "in progress then", "another cluster's", "ahead", "none"],
)
async def test_a_row_not_known_to_be_sent_blocks_its_slot(
    db: Any, relay: Any, base: str | None, upto: str | None, last_id: int | None, xid: str | None
) -> None:
    """R22, R20: what a shard's newest journal row does not say for certain counts as unsent."""
    await at(db, 1)
    await emit(db, "k", b"1")
    await note_all_sent(db)
    shard, row, now, next_ = await db.fetchrow(
        "select o.shard, o.xid::text, s::text, pg_snapshot_xmax(s)::text "
        "from towpath.outbox o, pg_current_snapshot() s"
    )
    if base is None or upto is None:
        await db.execute("delete from towpath.journal")
    else:
        await db.execute(
            "insert into towpath.journal (shards, epochs, last_ids, snapshot_from, snapshot_to, xid) values "
            "(array[$1::smallint], '{2}', array[$2::bigint], $3::text::pg_snapshot, $4::text::pg_snapshot, "
            "coalesce($5::text::xid8, pg_current_xact_id()))",
            shard,
            last_id,
            *(text.format(row=row, now=now, next=next_) for text in (base, upto)),
            xid,
        )
    await at(db, CLEARABLE)
    verdict = await STORE.verdict(relay, 0, KEEP)
    assert (verdict.reason, list(verdict.unsent)) == ("unsent", [shard])
    assert await clear(relay) == "unsent"
    assert (await STORE.delete_sent(relay, 0, shard, KEEP, limit=10)).count == 0
    assert await count(db) == 1


async def test_a_straggler_keeps_its_slot_until_its_row_is_sent(db: Any, relay: Any, producer: Any) -> None:
    """R22, P3: open it holds off the lock, and nobody queues; committed it is unsent."""
    await at(db, 1)
    await emit(db, "k", b"1")
    transaction = producer.transaction()
    await transaction.start()
    await emit(producer, "k", b"late")
    await note_all_sent(db)
    await at(db, CLEARABLE)
    assert (await STORE.verdict(relay, 0, KEEP)).reason is None, "no lock: the straggler is not seen"
    assert await clear(relay) == "locked"
    assert await STORE.holders(relay, 0) == [str(producer.get_server_pid())]
    await transaction.commit()
    assert await clear(relay) == "unsent"
    await note_all_sent(db)
    assert await clear(relay) is None
    assert await count(db) == 0


async def test_only_a_check_that_begins_after_the_lock_sees_the_straggler(
    db: Any, relay: Any, producer: Any, migrated_url: str
) -> None:
    """R22: checking first, or by a REPEATABLE READ snapshot, would clear an unsent row."""
    await at(db, 1)
    transaction = producer.transaction()
    await transaction.start()
    await emit(producer, "k", b"late")
    await note_all_sent(db)
    await at(db, CLEARABLE)
    checked_first = await STORE.verdict(relay, 0, KEEP)
    repeatable = await connect(migrated_url)
    await repeatable.execute("set lock_timeout = 0; begin isolation level repeatable read")
    await STORE.verdict(repeatable, 0, KEEP)  # takes the snapshot
    locking = asyncio.create_task(repeatable.execute("lock table towpath.outbox_0 in access exclusive mode"))
    await transaction.commit()
    await locking
    under_old_snapshot = await STORE.verdict(repeatable, 0, KEEP)
    await repeatable.execute("rollback")

    assert (checked_first.reason, checked_first.unsent) == (None, [])
    assert under_old_snapshot.unsent == []
    assert under_old_snapshot.reason == "isolation", "so the statement itself refuses to be used like this"
    assert len((await STORE.verdict(relay, 0, KEEP)).unsent) == 1
    await repeatable.execute("set default_transaction_isolation = 'repeatable read'")
    assert await clear(repeatable) == "isolation"
    async with relay.transaction():
        with pytest.raises(RuntimeError, match="transaction of its own"):
            await clear(relay)
    await repeatable.close(timeout=10)
    assert await count(db) == 1


async def test_a_straggler_that_commits_while_the_lock_is_awaited_loses_nothing(
    db: Any, relay: Any, migrated_url: str
) -> None:
    """R22: the statements of the block have snapshots of their own; tried as often as luck may need."""
    statement = STORE.statements(0)["clear"].replace(" nowait", "")  # so that it meets every commit
    await relay.execute("set lock_timeout = 0")
    await at(db, 1)
    await note_all_sent(db)
    for number in range(10):
        straggler = await asyncpg.connect(migrated_url, timeout=30)
        await at(db, 1)
        await straggler.execute("begin")
        await emit(straggler, "k", b"%d" % number)
        await at(db, CLEARABLE)
        await STORE.verdict(relay, 0, KEEP)
        clearing = asyncio.create_task(relay.execute(statement))
        while not await db.fetchval("select exists (select from pg_locks where not granted)"):
            assert not clearing.done()
            await asyncio.sleep(0)
        await straggler.execute("commit")
        await clearing
        await straggler.close(timeout=10)
        assert await db.fetchval("select count(*) from towpath.outbox") == number + 1


async def test_a_prepared_transaction_keeps_its_slot() -> None:
    """R22: it holds its lock without a session, over restarts too."""
    with PostgresServer(settings={"max_prepared_transactions": "5"}) as server:
        url = server.url()
        await asyncio.to_thread(migrate.upgrade, url)
        db, relay = await asyncpg.connect(url, timeout=30), await connect(url)
        await at(db, 1)
        await db.execute("begin")
        await emit(db, "k", b"prepared")
        await db.execute("prepare transaction 'p'")
        await note_all_sent(db)
        await at(db, CLEARABLE)
        assert await clear(relay) == "locked"
        assert await STORE.holders(relay, 0) == ["prepared"]
        await db.execute("commit prepared 'p'")
        assert await clear(relay) == "unsent"
        await note_all_sent(db)
        assert await clear(relay) is None
        await db.close(timeout=10)
        await relay.close(timeout=10)


@pytest.mark.parametrize(("to", "reason"), [(-11.0, "young"), (24 * 366 + 12.5, "unsent")])
async def test_a_step_of_the_clock_clears_nothing_unsent_or_young(
    db: Any, relay: Any, to: float, reason: str
) -> None:
    """R22: back by half a day, and ahead by a year."""
    await at(db, 1)
    await emit(db, "k", b"1")
    if reason == "young":
        await note_all_sent(db)
    await at(db, to)
    assert await clear(relay) == reason
    assert await count(db) == 1


async def test_the_late_row_of_an_old_transaction_is_the_newest(db: Any, relay: Any, producer: Any) -> None:
    """A transaction's number says when it began to write, not when it wrote last."""
    await at(db, 0.1)
    transaction = producer.transaction()
    await transaction.start()
    await producer.execute("select pg_current_xact_id()")
    await emit(db, "k", b"early")
    await at(db, 5.9)
    await emit(producer, "k", b"late")
    await transaction.commit()
    await note_all_sent(db)
    await at(db, 11)
    assert await clear(relay) == "young"
    await at(db, 12)
    assert await clear(relay) is None


async def test_an_open_reader_makes_neither_producers_nor_polls_wait(
    db: Any, relay: Any, producer: Any, migrated_url: str
) -> None:
    """P3, R22: a queued lock would hold up every poll until the reader ends."""
    await at(db, 1)
    await emit(db, "k", b"1")
    await note_all_sent(db)
    await at(db, CLEARABLE)
    reader = await asyncpg.connect(migrated_url, timeout=30)
    await reader.execute("begin; select count(*) from towpath.outbox")
    observer = await asyncpg.connect(migrated_url, timeout=30)
    done, queued, ended = 0, list[Any](), asyncio.Event()

    async def work(connection: Any, statement: str) -> None:
        nonlocal done
        while not ended.is_set():
            await connection.execute(statement)
            done += 1
            await asyncio.sleep(0.002)

    async def watch() -> None:
        while not ended.is_set():
            queued.extend(await observer.fetch(QUEUED))
            await asyncio.sleep(0)

    emitting = asyncio.create_task(work(producer, "select towpath.emit('orders', 't', '', 'k')"))
    polling = asyncio.create_task(
        work(db, "select count(*) from towpath.outbox where shard = 1 and xid > '1'")
    )
    watching = asyncio.create_task(watch())
    for _ in range(50):
        assert await clear(relay) == "locked"
        await asyncio.sleep(0.005)
    await eventually(lambda: done > 20)
    ended.set()
    await asyncio.gather(emitting, polling, watching)
    await observer.close(timeout=10)
    assert queued == [], "behind a queued lock each would wait for the reader"
    await reader.execute("rollback")
    await reader.close(timeout=10)
    assert await clear(relay) is None


async def test_several_relays_may_clear_a_slot_at_once(db: Any, migrated_url: str) -> None:
    """R12, R22: one does it, the others find the lock taken or nothing left; no deadlock."""
    relays = [await connect(migrated_url) for _ in range(4)]
    for round_ in range(5):
        await at(db, 1)
        await emit(db, "k", b"%d" % round_)
        await note_all_sent(db)
        await at(db, CLEARABLE)
        outcomes = await asyncio.gather(*(clear(each) for each in relays))
        assert None in outcomes
        assert set(outcomes) <= {None, "locked"}
        assert await count(db) == 0
    for each in relays:
        await each.close(timeout=10)


async def test_a_slow_try_is_cut_off(db: Any, relay: Any) -> None:
    """R22: the lock is held for a bounded time, and the session is none the worse."""
    await at(db, 1)
    await emit(db, "k", b"1")
    await note_all_sent(db)
    await at(db, CLEARABLE)
    await db.execute(
        "create or replace function towpath.ring_slot() returns smallint language sql volatile as "
        "$$ select 2::smallint from pg_sleep(0.5) $$"
    )
    assert await clear(relay, hold=0.05) == "slow"
    assert await count(db) == 1
    assert await clear(relay, hold=20) is None


LOCKED_FOR_AN_HOUR = """
create sequence public.bounded; create sequence public.unbounded;
create or replace function towpath.ring_slot() returns smallint language plpgsql volatile as $$
begin
  if current_setting('lock_timeout') <> '5ms' then
    return 0;  -- a producer, which writes to the slot that is being cleared
  end if;
  if exists (select from pg_locks where pid = pg_backend_pid() and relation = 'towpath.outbox_0'::regclass
                                    and mode = 'AccessExclusiveLock') then
    perform nextval(case current_setting('statement_timeout') when '50ms' then 'public.bounded'
                                                              else 'public.unbounded' end);
    perform pg_sleep(3600);
  end if;
  return 2;
end $$
"""
"""What happens under the slot's lock takes an hour; counts the tries by the limit of time they have."""


async def test_a_poll_and_a_producer_wait_no_longer_than_the_limit_and_it_is_tried_again(
    db: Any, producer: Any, migrated_url: str
) -> None:
    """P3, R22: 5 ms for a lock and 50 ms for everything under it, at each look; no look has more."""
    unlimited = await db.fetchval("select pg_get_functiondef('towpath.ring_slot'::regproc)")
    await at(db, 1)
    await emit(db, "k", b"1")
    await note_all_sent(db)
    await at(db, CLEARABLE)
    await db.execute(LOCKED_FOR_AN_HOUR)
    heard = Heard()
    clearing = clearing_of(migrated_url, heard, hold=HOLD_SECONDS)

    async def writing() -> Any:
        """A transaction that has written to the slot; what it wrote is never seen."""
        transaction = producer.transaction()
        await transaction.start()
        await emit(producer, "k", b"2")
        return transaction

    async def tries() -> int:
        found: int = await db.fetchval(
            "select case when is_called then last_value else 0 end from public.bounded"
        )
        return found

    transaction, locked = await writing(), ("blocked", 0, "locked", str(producer.get_server_pid()))
    while locked not in heard.told:  # a machine that stands still for 50 ms is slow
        await clearing.look()
    heard.told.clear()
    await transaction.rollback()

    looking = asyncio.create_task(clearing.look())
    while not await tries():
        if looking.done():
            await looking
            looking = asyncio.create_task(clearing.look())
    await (await writing()).rollback()
    await db.fetch("select from towpath.outbox where shard = 1 and xid > '1'")
    await looking
    while await tries() < 3:
        await clearing.look()
    assert await db.fetchval("select is_called from public.unbounded") is False
    assert heard.told == [("blocked", 0, "slow")]

    await db.execute(unlimited)
    deadline = time.monotonic() + 60
    while await count(db):
        assert time.monotonic() < deadline
        await clearing.look()
    clearing.close()
    assert heard.told[1:] == [("cleared", 0)]


async def test_a_relay_that_dies_while_it_clears_leaves_the_slot_to_the_next(
    db: Any, relay: Any, migrated_url: str
) -> None:
    """R4, R22: all of it or nothing; the lock goes with the session."""
    unlimited = await db.fetchval("select pg_get_functiondef('towpath.ring_slot'::regproc)")
    await at(db, 1)
    await emit(db, "k", b"1")
    await note_all_sent(db)
    await at(db, CLEARABLE)
    await db.execute(LOCKED_FOR_AN_HOUR)
    dying = await connect(migrated_url)
    await dying.execute("set client_connection_check_interval = '100ms'")
    clearing = asyncio.create_task(clear(dying, hold=60))
    while not await db.fetchval("select is_called from public.unbounded"):
        assert not clearing.done()
    dying.terminate()
    await asyncio.wait([clearing])
    assert clearing.exception() is not None
    await db.execute(unlimited)
    assert await count(db) == 1, "which waits for the end of the lock"
    assert await clear(relay) is None
    assert await count(db) == 0


async def test_only_the_owner_of_the_first_shard_clears_and_empty_slots_are_left_alone(
    db: Any, migrated_url: str
) -> None:
    """A slot never written to is not locked."""
    await at(db, 1)
    await emit(db, "k", b"1")
    await note_all_sent(db)
    await at(db, CLEARABLE)
    files = (
        "select array_agg(pg_relation_filenode(('towpath.outbox_' || n)::regclass) order by n) "
        "from generate_series(0, 3) n"
    )
    before = await db.fetchval(files)
    bystander = clearing_of(migrated_url, Heard(), owns=False)
    await bystander.look()
    bystander.close()
    assert await db.fetchval(files) == before
    heard = Heard()
    clearing = clearing_of(migrated_url, heard)
    await clearing.look()
    await clearing.look()
    clearing.close()
    after = await db.fetchval(files)
    assert heard.told == [("cleared", 0)]
    assert heard.rings == [(4, 0), (4, 0)]
    assert (after[0] != before[0], after[1:]) == (True, before[1:])


async def test_rows_behind_a_straggler_are_deleted_one_by_one_after_a_rotation(
    db: Any, producer: Any, migrated_url: str
) -> None:
    """R22, P3: the slot stays, sent rows go, the straggler's row does not; later all of it is cleared."""
    await at(db, 1)
    for number in range(5):
        await emit(db, str(number), b"%d" % number)
    transaction = producer.transaction()
    await transaction.start()
    await emit(producer, "k", b"late")
    await note_all_sent(db)
    heard = Heard()
    clearing = clearing_of(migrated_url, heard)
    pid = str(producer.get_server_pid())
    await at(db, CLEARABLE)
    await clearing.look()
    await clearing.look()
    assert heard.told == [("blocked", 0, "locked", pid)], "told once"
    assert (heard.rings[-1], await count(db)) == ((3, 1), 5)
    await at(db, 18.5)  # the next slot, and nothing overdue: written in hour 1
    await clearing.look()
    assert await count(db) == 5
    await at(db, 25)  # written to again
    await emit(db, "k", b"new")
    await note_all_sent(db)
    await clearing.look()
    assert heard.told[1:] == [("thinned", 0, 5), ("blocked", 0, "current")]
    await transaction.commit()
    await clearing.look()
    assert sorted(row["payload"] for row in await db.fetch("select payload from towpath.outbox_0")) == [
        b"late",
        b"new",
    ]
    await note_all_sent(db)
    await at(db, 24 + CLEARABLE)
    await clearing.look()
    clearing.close()
    assert heard.told[-1] == ("cleared", 0)
    assert (heard.rings[-1], await count(db)) == ((4, 0), 0)


async def test_a_batch_of_deletes_goes_on_where_the_last_one_ended(db: Any, relay: Any) -> None:
    """Rows are deleted in bounded batches, in the order of their transactions."""
    await at(db, 1)
    for number in range(7):
        await emit(db, "k", b"%d" % number)
    await note_all_sent(db)
    await at(db, CLEARABLE)
    shard = await db.fetchval("select min(shard) from towpath.outbox")
    first = await STORE.delete_sent(relay, 0, shard, KEEP, limit=5)
    second = await STORE.delete_sent(relay, 0, shard, KEEP, limit=5, after=first.cursor)
    assert [(each.count, each.found) for each in (first, second)] == [(5, 5), (2, 2)]
    assert (
        await STORE.delete_sent(relay, 0, shard, KEEP, limit=5, after=second.cursor)
    ).cursor == second.cursor


async def test_racing_producers_lose_nothing_while_two_relays_clear(
    db: Any, migrated_url: str, scale: float
) -> None:
    """R22, R12, P3: slots rotate every second; in the end the table is empty and relaying goes on."""
    await rotate_every(db, 1)
    await prepare(db)
    options = replace(FAST, retention=0.3)
    files = "select pg_relation_filenode(('towpath.outbox_' || n)::regclass) from generate_series(0, 3) n"
    before = {row[0] for row in await db.fetch(files)}
    seen: set[int] = set()
    committed: list[tuple[str, int]] = []
    broker = RecordingBroker()
    told = asyncio.Event()
    async with relaying(migrated_url, broker, options), relaying(migrated_url, broker, options):
        writers = [
            asyncio.create_task(race(migrated_url, committed, writer=number, until=told))
            for number in range(6)
        ]
        deadline = time.monotonic() + 120
        while len(seen) < 3 * scale or len(committed) <= 50:
            assert time.monotonic() < deadline, "slots are not cleared meanwhile"
            seen |= {row[0] for row in await db.fetch(files)} - before
            await asyncio.sleep(0.1)
        told.set()
        await asyncio.gather(*writers)
        while await db.fetchval("select count(*) from towpath.outbox"):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.1)
        await emit(db, "after", b"1")
        await eventually(lambda: broker.arrivals[-1].message.key == "after")
    found = judge([*committed, ("after", 1)], broker)
    assert (found.lost, found.ghosts, found.inversions) == (0, 0, 0)


async def test_a_retention_longer_than_the_ring_is_refused(db: Any, migrated_url: str) -> None:
    """A slot that is never old enough before its turn comes again would never be cleared."""
    relay = Relay(migrated_url, RecordingBroker(), RelayOptions(retention=11 * 3600))
    with pytest.raises(ExceptionGroup) as caught:
        await relay.run(asyncio.Event())
    (error,) = caught.value.exceptions
    assert isinstance(error, ConfigurationError)
    assert "TOWPATH_RELAY__RETENTION" in str(error)
    assert "37800 s at most" in str(error)
    assert longest_retention(4, 21600) == 37800


def test_the_statements_of_another_schema_name_no_table_of_this_one() -> None:
    """The slot and the schema are all that is ever put into the text."""
    for text in Retention("tenant").statements(3).values():
        code = "\n".join(line for line in text.splitlines() if not line.startswith("--"))
        assert "towpath" not in code
        assert "outbox_0" not in code
        assert ":verdict" not in code
