"""Submitting tasks: once for the same request, with the caller's transaction; reading and cancelling them."""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import pytest
import pytest_asyncio
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from tests.integration.shop import BuildReport, Charge
from towpath import tasks
from towpath.errors import DedupeConflict, NoTransaction, TaskNotFound, TaskNotSucceeded, UsageError
from towpath.outbox import submit
from towpath.states import TaskState
from towpath.store.database import sqlalchemy_url

GROUP = "billing"


@pytest_asyncio.fixture
async def engine(migrated_url: str) -> AsyncIterator[AsyncEngine]:
    engine = create_async_engine(sqlalchemy_url(migrated_url), pool_size=5, max_overflow=60)
    yield engine
    await engine.dispose()


async def until(connection: Any, question: str) -> None:
    async with asyncio.timeout(30):
        while not await connection.fetchval(question):  # noqa: ASYNC110 - the database sends no event
            await asyncio.sleep(0.01)


async def finish(db: Any, task_id: UUID, state: str = "SUCCEEDED", result: bytes | None = None) -> None:
    await db.execute(
        "update towpath.task set state = $2, result = $3, reason_code = 'r', version = version + 1,"
        " finished_at = clock_timestamp() where id = $1",
        task_id,
        state,
        result,
    )


async def test_a_submitted_task_is_accepted_with_its_body(db: Any, engine: AsyncEngine) -> None:
    """P5"""
    async with AsyncSession(engine) as session, session.begin():
        handle = await submit(session, Charge("o1", 5), owner="u1", headers={"h": "1"})

    assert handle.created
    assert handle.group == GROUP
    row = await db.fetchrow("select *, headers::text as pairs from towpath.task")
    assert (row["id"], row["state"], row["held_by"]) == (handle.id, "ACCEPTED", "broker")
    assert (row["source"], row["key"], row["owner"]) == ("tasks.billing", "o1", "u1")
    assert (row["payload"], row["content_type"]) == (b'{"order_id":"o1","amount":5}', "application/json")
    assert row["pairs"] == '[["h","1"]]'
    message = await db.fetchrow("select * from towpath.outbox")
    assert (message["message_id"], message["kind"], message["payload"]) == (handle.id, "task", None)
    assert (message["shard"], message["xid"]) == (row["shard"], row["xid"])


async def test_the_source_of_a_task_is_the_address_of_its_destination(db: Any, engine: AsyncEngine) -> None:
    await db.execute("insert into towpath.destination (name, address) values ('tasks.billing', 'work')")
    async with AsyncSession(engine) as session, session.begin():
        await submit(session, Charge("o1"))

    assert await db.fetchval("select source from towpath.task") == "work"


async def test_the_same_unique_fields_return_the_first_task(db: Any, engine: AsyncEngine) -> None:
    """P5"""
    async with AsyncSession(engine) as session:
        async with session.begin():
            first = await submit(session, Charge("o1"))
            again = await submit(session, Charge("o1"))
        async with session.begin():
            later = await submit(session, Charge("o1"))
            other = await submit(session, Charge("o2"))
            of_another_owner = await submit(session, Charge("o1"), owner="u2")

    assert [first.created, again.created, later.created] == [True, False, False]
    assert first.id == again.id == later.id
    assert other.created
    assert of_another_owner.created
    assert await db.fetchval("select count(*) from towpath.outbox") == 3


async def test_a_dedupe_key_overrules_the_unique_fields(db: Any, engine: AsyncEngine) -> None:
    """P5"""
    async with AsyncSession(engine) as session, session.begin():
        first = await submit(session, Charge("o1"))
        keyed = await submit(session, Charge("o1"), dedupe_key="invoice 7")
        again = await submit(session, Charge("o1"), dedupe_key="invoice 7")
        reports = [await submit(session, BuildReport(name="r")) for _ in range(2)]

    assert keyed.created
    assert keyed.id != first.id
    assert (again.id, again.created) == (keyed.id, False)
    assert [report.created for report in reports] == [True, True]


async def test_another_body_under_the_same_key_names_the_first_task(db: Any, engine: AsyncEngine) -> None:
    """P5: and the transaction goes on."""
    async with AsyncSession(engine) as session:
        async with session.begin():
            first = await submit(session, Charge("o1", 1))
        async with session.begin():
            with pytest.raises(DedupeConflict, match=str(first.id)) as caught:
                await submit(session, Charge("o1", 2))
            await submit(session, Charge("o2", 2))

    assert caught.value.task_id == str(first.id)
    assert await db.fetchval("select string_agg(key, ',' order by key) from towpath.task") == "o1,o2"


async def test_fifty_submits_at_once_make_one_task(db: Any, engine: AsyncEngine) -> None:
    """P5 A7"""
    together = asyncio.Barrier(50)

    async def one() -> tuple[UUID, bool]:
        async with AsyncSession(engine) as session, session.begin():
            await session.connection()
            await together.wait()
            handle = await submit(session, Charge("o1"))
            return handle.id, handle.created

    found = await asyncio.gather(*(one() for _ in range(50)))

    assert len({task_id for task_id, _ in found}) == 1
    assert sum(created for _, created in found) == 1
    assert await db.fetchval("select count(*) from towpath.task") == 1
    assert await db.fetchval("select count(*) from towpath.outbox") == 1


async def test_a_waiting_submit_is_the_first_when_the_other_rolls_back(db: Any, engine: AsyncEngine) -> None:
    """P5"""
    async with AsyncSession(engine) as rolled_back, AsyncSession(engine) as session:
        await rolled_back.begin()
        lost = await submit(rolled_back, Charge("o1"))
        async with session.begin():
            waiting = asyncio.create_task(submit(session, Charge("o1")))
            await until(db, "select exists (select from pg_locks where not granted)")
            await rolled_back.rollback()
            handle = await waiting

    assert handle.created
    assert handle.id != lost.id
    assert await db.fetchval("select id from towpath.task") == handle.id


async def test_on_an_asyncpg_connection_a_task_is_written_at_the_call(db: Any) -> None:
    """P4 P5"""
    with pytest.raises(NoTransaction):
        await submit(db, Charge("o1"))
    async with db.transaction():
        handle = await submit(db, Charge("o1"))
        again = await submit(db, Charge("o1"))
        with pytest.raises(DedupeConflict):
            await submit(db, Charge("o1", 2))

    assert (again.id, again.created) == (handle.id, False)
    assert await db.fetchval("select count(*) from towpath.outbox") == 1


async def test_a_deadline_counts_from_the_database_clock(db: Any, engine: AsyncEngine) -> None:
    instant = datetime.now(UTC) + timedelta(days=1)
    async with AsyncSession(engine) as session, session.begin():
        await submit(session, Charge("in an hour"), deadline="1h")
        await submit(session, Charge("too"), deadline=timedelta(hours=1))
        await submit(session, Charge("tomorrow"), deadline=instant)
        await submit(session, Charge("never"))

    rows = await db.fetch("select key, deadline_at, deadline_at - created_at as left from towpath.task")
    found = {row["key"]: row for row in rows}
    assert abs(found["in an hour"]["left"] - timedelta(hours=1)) < timedelta(seconds=5)
    assert abs(found["too"]["left"] - timedelta(hours=1)) < timedelta(seconds=5)
    assert found["tomorrow"]["deadline_at"] == instant
    assert found["never"]["deadline_at"] is None


@pytest.mark.parametrize("kind", ["session", "async session", "asyncpg"])
async def test_tasks_are_read_on_any_caller(
    db: Any, engine: AsyncEngine, migrated_url: str, kind: str
) -> None:
    async with db.transaction():
        handles = [await submit(db, Charge(f"o{number}"), owner=f"u{number % 2}") for number in range(4)]
    await finish(db, handles[0].id, result=b'{"paid":true}')

    async def read() -> tuple[Any, Any, Any, Any]:
        ids = handles[0].id, uuid4()
        filters: dict[str, Any] = {"group": GROUP, "state": TaskState.ACCEPTED, "owner": "u1", "limit": 1}
        if kind == "session":
            plain = sa.create_engine(sqlalchemy_url(migrated_url, "psycopg"))
            with Session(plain) as session:
                one, none = (tasks.get(session, task_id, group=GROUP) for task_id in ids)
                page = tasks.list(session, **filters)
                rest = tasks.list(session, **filters, before=page[-1].id)
            plain.dispose()
            return one, none, page, rest
        async with AsyncSession(engine) as async_session:
            target: Any = db if kind == "asyncpg" else async_session
            one, none = [await tasks.get(target, task_id, group=GROUP) for task_id in ids]
            page = await tasks.list(target, **filters)
            rest = await tasks.list(target, **filters, before=page[-1].id)
        return one, none, page, rest

    one, none, page, rest = await read()

    assert (one.id, one.state, one.value, one.owner) == (
        handles[0].id,
        TaskState.SUCCEEDED,
        {"paid": True},
        "u0",
    )
    assert none is None
    assert [task.id for task in page] == [handles[3].id]
    assert [task.id for task in rest] == [handles[1].id]


async def test_a_result_is_awaited_without_holding_a_connection(db: Any, engine: AsyncEngine) -> None:
    async with AsyncSession(engine) as session, session.begin():
        handle = await submit(session, Charge("o1"))
    has_given_back = asyncio.Event()
    sa.event.listen(engine.sync_engine.pool, "checkin", lambda *_: has_given_back.set())
    waiting = asyncio.create_task(handle.result("60s"))
    await has_given_back.wait()
    assert not waiting.done()
    await finish(db, handle.id, result=b'["receipt",1]')

    assert await waiting == ["receipt", 1]


def test_a_plain_session_waits_in_its_thread(migrated_url: str) -> None:
    engine = sa.create_engine(sqlalchemy_url(migrated_url, "psycopg"))
    with Session(engine) as session:
        with session.begin():
            handle = submit(session, Charge("o1"))
        with pytest.raises(TimeoutError, match="ACCEPTED"):
            handle.result("50ms")
        with session.begin():
            session.execute(
                sa.text("update towpath.task set state = 'SUCCEEDED', result = '7', finished_at = now()")
            )
    assert handle.result("10s") == 7
    engine.dispose()


@pytest.mark.parametrize("state", ["FAILED", "DEAD", "CANCELLED", "EXPIRED"])
async def test_a_result_that_will_never_come_says_how_the_task_ended(db: Any, state: str) -> None:
    async with db.transaction():
        handle = await submit(db, Charge("o1"))
    await finish(db, handle.id, state)

    with pytest.raises(TaskNotSucceeded, match=f"{state}: r") as caught:
        await handle.result()
    assert (caught.value.state, caught.value.reason_code) == (state, "r")


async def test_waiting_is_refused_where_it_could_not_end(db: Any, engine: AsyncEngine) -> None:
    async with db.transaction():
        handle = await submit(db, Charge("o1"))
        with pytest.raises(UsageError, match="commit first"):
            await handle.result()
        with pytest.raises(TaskNotFound, match="not committed"):
            await tasks.result(engine, handle.id, group=GROUP)
    with pytest.raises(TimeoutError, match="ACCEPTED"):
        await handle.result("1s")  # long enough for a first answer


async def cancelled_state(db: Any, task_id: UUID) -> Any:
    async with db.transaction():
        return await tasks.cancel(db, task_id, group=GROUP, actor="ann")


async def test_what_has_not_begun_is_cancelled_at_once(db: Any) -> None:
    async with db.transaction():
        handle = await submit(db, Charge("o1"))

    assert await cancelled_state(db, handle.id) == TaskState.CANCELLED
    assert await cancelled_state(db, handle.id) == TaskState.CANCELLED
    assert await cancelled_state(db, uuid4()) is None
    task = await tasks.get(db, handle.id, group=GROUP)
    assert task is not None
    assert (task.version, task.reason_code, task.finished_at is not None) == (2, "cancelled", True)
    history = await db.fetch("select event, from_state, to_state, version, actor from towpath.task_event")
    assert history == [("task.cancelled", "ACCEPTED", "CANCELLED", 2, "ann")]


async def test_what_is_running_is_asked_to_stop(db: Any, engine: AsyncEngine) -> None:
    async with db.transaction():
        handle = await submit(db, Charge("o1"))
    await db.execute(
        "update towpath.task set state = 'RUNNING', worker = gen_random_uuid(), token = gen_random_uuid()"
    )

    async with AsyncSession(engine) as session, session.begin():
        assert await tasks.cancel(session, handle.id, group=GROUP) == TaskState.RUNNING

    task = await tasks.get(db, handle.id, group=GROUP)
    assert task is not None
    assert (task.state, task.is_cancel_requested, task.version) == (TaskState.RUNNING, True, 1)


async def put_in_lane(db: Any, task_id: UUID, state: str, position: int) -> None:
    await db.execute(
        "update towpath.task set state = $2, lane = 'k', position = $3, held_by = 'database',"
        " due_at = case when $2 = 'WAITING' then clock_timestamp() + interval '1 hour' end,"
        " waiting_for = case when $2 = 'WAITING' then 'retry' end where id = $1",
        task_id,
        state,
        position,
    )


async def test_cancelling_the_head_of_a_lane_lets_its_follower_go(db: Any) -> None:
    """C10"""
    async with db.transaction():
        head, second, third = [(await submit(db, Charge(name))).id for name in ("1", "2", "3")]
    for position, (task_id, state) in enumerate([(head, "WAITING"), (second, "PARKED"), (third, "PARKED")]):
        await put_in_lane(db, task_id, state, position)
    await db.execute("insert into towpath.key_gate values ('billing', 'tasks.billing', 'k', $1)", head)

    assert await cancelled_state(db, third) == TaskState.CANCELLED
    assert await db.fetchval("select head from towpath.key_gate") == head
    assert await cancelled_state(db, head) == TaskState.CANCELLED
    assert await db.fetchval("select head from towpath.key_gate") == second
    promoted = await tasks.get(db, second, group=GROUP)
    assert promoted is not None
    assert (promoted.state, promoted.waiting_for) == (TaskState.WAITING, "promoted")
    assert await cancelled_state(db, second) == TaskState.CANCELLED
    assert await db.fetchval("select count(*) from towpath.key_gate") == 0


async def test_a_cancel_that_loses_a_race_looks_again(db: Any, migrated_url: str) -> None:
    """C7"""
    async with db.transaction():
        handle = await submit(db, Charge("o1"))
    rival = await asyncpg.connect(migrated_url)
    transaction = rival.transaction()
    await transaction.start()
    await rival.execute(
        "update towpath.task set state = 'RUNNING', version = 2,"
        " worker = gen_random_uuid(), token = gen_random_uuid()"
    )
    cancelling = asyncio.create_task(cancelled_state(db, handle.id))
    await until(rival, "select exists (select from pg_locks where not granted)")
    await transaction.commit()
    await rival.close()

    assert await cancelling == TaskState.RUNNING
    assert await db.fetchval("select cancel_requested from towpath.task")
