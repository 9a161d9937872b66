"""Successes are settled in batches, and what offends in a batch is alone with it."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import msgspec
import pytest

from tests.integration.engine import Note, bench, depot
from towpath.backoff import RetryPolicy
from towpath.consumer import settling
from towpath.consumer.settling import GroupCommit, Success
from towpath.context import Call
from towpath.errors import StoreUnavailable
from towpath.store.database import Database
from towpath.store.settles import SettleStore
from towpath.store.successes import Settled
from towpath.store.work import Work


def work(id_: UUID | None = None, lane: str | None = None) -> Work:
    made = Work(id_ or uuid4(), "note.left", "event", "notes", None, lane, 1, b"{}", "", (), None)
    made.token = uuid4()
    return made


class Store:
    """A store that records its batches and fails as told."""

    def __init__(self) -> None:
        self.batches: list[list[Work]] = []
        self.bad: set[UUID] = set()
        self.gone: set[UUID] = set()
        self.trouble: list[Exception] = []

    async def succeed(self, batch: Sequence[tuple[Work, bytes | None]]) -> Settled:
        self.batches.append([each for each, _ in batch])
        await asyncio.sleep(0)
        if self.trouble:
            raise self.trouble.pop(0)
        if any(each.id in self.bad for each, _ in batch):
            raise asyncpg.DataError("bad")
        return Settled(frozenset(each.id for each, _ in batch) - self.gone, 0)


@asynccontextmanager
async def committing(store: Any) -> AsyncIterator[GroupCommit]:
    commit = GroupCommit(store, lambda: None)
    running = asyncio.create_task(commit.run())
    yield commit
    running.cancel()
    await asyncio.wait([running])


async def settle(commit: GroupCommit, work: Work, result: bytes | None) -> bool | Exception | None:
    success = Success(work, result)
    await commit.settle([success])
    return success.outcome


async def test_what_finishes_while_a_batch_commits_is_the_next_batch() -> None:
    store = Store()
    async with committing(store) as commit:
        settled = await asyncio.gather(*(settle(commit, work(), None) for _ in range(1200)))
    assert all(settled)
    assert [len(batch) for batch in store.batches] == [500, 500, 200]


async def test_a_batch_is_bounded_in_bytes() -> None:
    """C17."""
    store = Store()
    async with committing(store) as commit:
        await asyncio.gather(*(settle(commit, work(), b"x" * 400_000) for _ in range(4)))
        await settle(commit, work(), b"x" * 5_000_000)
    assert [len(batch) for batch in store.batches] == [2, 2, 1]


async def test_a_wave_too_large_for_one_statement_is_settled_in_parts() -> None:
    """C17."""
    store, successes = Store(), [Success(work(), None) for _ in range(1200)]
    async with committing(store) as commit:
        await commit.settle(successes)
    assert {True} == {success.outcome for success in successes}
    assert [len(batch) for batch in store.batches] == [500, 500, 200]


async def test_a_row_that_the_database_refuses_fails_alone() -> None:
    """C17."""
    store, works = Store(), [work() for _ in range(33)]
    store.bad = {works[7].id, works[20].id}
    async with committing(store) as commit:
        ends = await asyncio.gather(*(settle(commit, each, None) for each in works))
    assert [isinstance(end, asyncpg.DataError) for end in ends] == [each.id in store.bad for each in works]
    assert all(end is True for each, end in zip(works, ends, strict=True) if each.id not in store.bad)


@pytest.mark.parametrize(
    "error",
    [
        StoreUnavailable("away"),
        asyncpg.DeadlockDetectedError("deadlock"),
        asyncpg.SerializationError("race"),
        asyncpg.LockNotAvailableError("lock"),
    ],
)
async def test_an_outage_or_a_lost_race_repeats_the_whole_batch(error: Exception) -> None:
    """C17, C13: it is nobody's fault, and no finished handler runs again for it."""
    store = Store()
    store.trouble = [error, error]
    async with committing(store) as commit:
        assert await asyncio.gather(*(settle(commit, work(), None) for _ in range(5))) == [True] * 5
    assert [len(batch) for batch in store.batches] == [5, 5, 5]


async def test_a_result_whose_token_is_gone_is_told_so() -> None:
    """C7."""
    store, mine, lost = Store(), work(), work()
    store.gone = {lost.id}
    async with committing(store) as commit:
        assert await asyncio.gather(settle(commit, mine, None), settle(commit, lost, b"1")) == [True, False]


async def test_one_who_gave_up_does_not_hold_up_the_others() -> None:
    store, given_up = Store(), work()
    async with committing(store) as commit:
        first = asyncio.create_task(settle(commit, given_up, None))
        others = [asyncio.create_task(settle(commit, work(), None)) for _ in range(3)]
        await asyncio.sleep(0)
        first.cancel()
        assert await asyncio.gather(*others) == [True] * 3


async def claimed(db: Any, works: Sequence[Work]) -> UUID:
    """Rows as a claim would have left them."""
    worker = uuid4()
    await db.executemany(
        "insert into towpath.task (consumer_group, id, type, kind, source, lane, position, state, held_by, "
        "worker, token) values ('depot', $1, 'note.left', 'event', 'notes', $2, 1, 'RUNNING', 'broker', "
        "$3, $4)",
        [(each.id, each.lane, worker, each.token) for each in works],
    )
    return worker


@asynccontextmanager
async def settles(url: str) -> AsyncIterator[SettleStore]:
    database = Database(url, pool_size=2)
    await database.start()
    yield SettleStore(database, "depot", uuid4())
    await database.aclose()


async def test_only_rows_whose_token_is_theirs_succeed(migrated_url: str, db: Any) -> None:
    """C7: with and without results, in one transaction."""
    works = [work() for _ in range(6)]
    async with settles(migrated_url) as store:
        await claimed(db, works)
        works[0].token, works[3].token = uuid4(), uuid4()
        results = [None, None, None, b"3", b'"nul \\u0000"', b"5" * 2_000_000]
        settled = await store.succeed(list(zip(works, results, strict=True)))
        assert settled.ids == {each.id for each in (works[1], works[2], works[4], works[5])}
        rows = {row["id"]: row for row in await db.fetch("select * from towpath.task")}
        assert rows[works[4].id]["result"] == b'"nul \\u0000"'
        assert rows[works[5].id]["attempt"] == 1
        assert rows[works[0].id]["state"] == rows[works[3].id]["state"] == "RUNNING"


async def test_only_what_was_kept_is_settled_by_its_gate(
    migrated_url: str, db: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C10, C17: what the broker holds heads no gate, and costs no transaction of several statements."""
    works = [work(lane=f"k{number}") for number in range(4)]
    async with settles(migrated_url) as store:
        await claimed(db, works)
        assert await store.keep(works[0])
        both = await store.succeed([(works[0], None), (works[1], b"1")])
        assert (both.ids, await db.fetchval("select count(*) from towpath.key_gate")) == (
            {works[0].id, works[1].id},
            0,
        )
        monkeypatch.delattr(Database, "transaction")
        rest = works[2:]
        assert (await store.succeed([(each, None) for each in rest])).ids == {each.id for each in rest}


REFUSING = """
create function refuse() returns trigger language plpgsql as $$
  begin raise 'bad' using errcode = '22000'; end $$;
create trigger refuse before update on towpath.task
  for each row when (new.result = 'bad') execute function refuse();
"""


async def test_what_goes_beside_a_refused_result_is_settled_and_known_to_be(
    migrated_url: str, db: Any
) -> None:
    """C17: with a result or without one; neither alone may be durable before the others are."""
    works = [work() for _ in range(6)]
    await claimed(db, works)
    await db.execute(REFUSING)
    results = [None, b"1", None, b"bad", None, b"2"]
    async with settles(migrated_url) as store, committing(store) as commit:
        successes = [Success(each, result) for each, result in zip(works, results, strict=True)]
        await commit.settle(successes)
    outcomes = [success.outcome for success in successes]
    assert isinstance(outcomes.pop(3), asyncpg.DataError)
    assert outcomes == [True] * 5


LANES = """
insert into towpath.task (consumer_group, id, type, kind, source, lane, position, state, held_by,
                          worker, token)
  select 'depot', id, 't', 'event', source, lane, 1, 'RUNNING', 'database', gen_random_uuid(), token
    from unnest($1::uuid[], $2::uuid[], $3::text[], $4::text[]) x(id, token, source, lane)"""


async def test_the_heads_of_a_batch_each_promote_their_least_follower(migrated_url: str, db: Any) -> None:
    """C10: several sources, lanes of one name, and lanes where nobody follows."""
    lanes = [(source, lane) for source in ("a", "b") for lane in ("x", "y", "z")]
    heads = [work(lane=lane) for _, lane in lanes]
    columns = (
        [head.id for head in heads],
        [head.token for head in heads],
        *map(list, zip(*lanes, strict=True)),
    )
    await db.execute(LANES, *columns)
    await db.executemany(
        "insert into towpath.key_gate (consumer_group, source, lane, head) values ('depot', $1, $2, $3)",
        [(source, lane, head.id) for (source, lane), head in zip(lanes, heads, strict=True)],
    )
    await db.execute("""
        insert into towpath.task (consumer_group, id, type, kind, source, lane, position, state, held_by)
          select 'depot', gen_random_uuid(), 't', 'event', source, lane, position, 'PARKED', 'database'
            from unnest('{a,a,b,b,b}'::text[], '{x,x,x,z,z}'::text[], '{3,2,2,9,null}'::bigint[])
                 x(source, lane, position)""")
    batch = [
        (msgspec.structs.replace(head, source=source), None)
        for (source, _), head in zip(lanes, heads, strict=True)
        if (source, head.lane) != ("b", "x")
    ]
    database = Database(migrated_url, pool_size=1)
    await database.start()
    settled = await SettleStore(database, "depot", uuid4()).succeed(batch)
    await database.aclose()

    assert (len(settled.ids), settled.promoted_count) == (5, 2)
    query = "select source, lane, position from towpath.task where state = 'WAITING' order by source"
    assert [("a", "x", 2), ("b", "z", None)] == [tuple(row) for row in await db.fetch(query)]
    gates = await db.fetch(
        "select g.source, g.lane, t.state from towpath.key_gate g join towpath.task t "
        "on t.id = g.head order by 1, 2"
    )
    assert [("a", "x", "WAITING"), ("b", "x", "RUNNING"), ("b", "z", "WAITING")] == [
        tuple(row) for row in gates
    ]


async def test_two_batches_of_the_same_rows_do_not_deadlock(migrated_url: str, db: Any) -> None:
    """C17: gates, then rows, both sorted."""
    works = [work(lane=f"k{number}") for number in range(60)]
    async with settles(migrated_url) as one, settles(migrated_url) as two:
        await claimed(db, works)
        await db.execute("update towpath.task set held_by = 'database'")
        await db.executemany(
            "insert into towpath.key_gate (consumer_group, source, lane, head) "
            "values ('depot', 'notes', $1, $2)",
            [(each.lane, each.id) for each in works],
        )
        batch = [(each, None if number % 2 else b"1") for number, each in enumerate(works)]
        first, second = await asyncio.gather(one.succeed(batch), two.succeed(batch[::-1]))
        assert first.ids | second.ids == {each.id for each in works}
        assert not first.ids & second.ids
        assert await db.fetchval("select count(*) from towpath.key_gate") == 0


async def test_a_finished_handler_whose_result_is_refused_does_not_stop_the_others(
    migrated_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C17, end to end: the culprit alone is dead."""
    app = depot(ordering="none", retry=RetryPolicy(attempts=2, base="1ms", cap="1ms"))
    real = SettleStore.succeed

    async def refuse(self: SettleStore, batch: Any) -> Settled:
        if any(result == b'"bad"' for _, result in batch):
            raise asyncpg.DataError("22P05")
        return await real(self, batch)

    monkeypatch.setattr(SettleStore, "succeed", refuse)

    @app.idempotent()
    async def read(note: Note, call: Call) -> Any:
        return "bad" if note.number == 5 else {"n": note.number}

    async with bench(app, migrated_url) as engine:
        ids = [await engine.publish(Note(number)) for number in range(30)]
        async with engine.member():
            for number, id_ in enumerate(ids):
                row = await engine.reaches(id_, "SUCCEEDED", "DEAD")
                assert row["state"] == ("DEAD" if number == 5 else "SUCCEEDED")
                assert number == 5 or json.loads(row["result"]) == {"n": number}
            await engine.is_drained("notes")


async def test_an_outage_gives_up_when_it_is_told_to() -> None:
    async def away() -> None:
        raise StoreUnavailable("away")

    waiting = asyncio.create_task(settling.until_available(away))
    await asyncio.sleep(0.05)
    waiting.cancel()
    await asyncio.wait([waiting])
    assert waiting.cancelled()


async def test_progress_of_a_stale_token_is_not_written(migrated_url: str, db: Any) -> None:
    """C7."""
    from towpath.store.groups import Terms
    from towpath.store.workers import WorkerStore

    mine, stale = work(), work()
    await claimed(db, [mine, stale])
    database = Database(migrated_url, pool_size=2)
    await database.start()
    workers = WorkerStore(database, "depot", uuid4(), 5, Terms("key", None))
    assert mine.token is not None
    reports = {(mine.id, mine.token): {"fraction": 0.5}, (stale.id, uuid4()): {"fraction": 1}}
    await workers.report_progress(reports)
    await database.aclose()
    rows = {row["id"]: row["progress"] for row in await db.fetch("select id, progress from towpath.task")}
    assert rows == {mine.id: '{"fraction":0.5}', stale.id: None}
