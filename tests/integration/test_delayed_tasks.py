"""Delayed tasks: they wait in the task table, start on time, and keep to their lane."""

import asyncio
import random
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from tests.integration.engine import EFFECTS, Posted, Weigh, bench, depot, effects, running, until
from towpath import tasks
from towpath.backoff import RetryPolicy
from towpath.context import Tx
from towpath.outbox import submit
from towpath.store.database import sqlalchemy_url
from towpath.tasks import TaskHandle


async def delayed(db: Any, task: Weigh, delay: str, **options: Any) -> TaskHandle:
    async with db.transaction():
        return await submit(db, task, delay=delay, **options)


async def write(tx: Tx, task: Weigh) -> None:
    await tx.session.execute(
        text("insert into public.effect (parcel, number) values (:parcel, :number)"),
        {"parcel": task.parcel, "number": task.number},
    )


@pytest.mark.parametrize("way", ["connection", "session"])
async def test_a_delayed_task_waits_in_its_row_and_needs_no_message(
    db: Any, migrated_url: str, way: str
) -> None:
    """P5"""
    at = datetime.now(UTC) + timedelta(hours=1)
    if way == "connection":
        async with db.transaction():
            handle = await submit(db, Weigh("a", 1), at=at, owner="u1")
    else:
        engine = create_async_engine(sqlalchemy_url(migrated_url))
        async with AsyncSession(engine) as session, session.begin():
            handle = await submit(session, Weigh("a", 1), at=at, owner="u1")
        await engine.dispose()

    assert handle.created
    row = await db.fetchrow("select * from towpath.task")
    assert (row["state"], row["waiting_for"], row["held_by"]) == ("WAITING", "delay", "database")
    assert (row["due_at"], row["key"], row["lane"], row["owner"]) == (at, "a", None, "u1")
    assert await db.fetchval("select count(*) from towpath.outbox") == 0
    assert await db.fetchval("select count(*) from towpath.scheduled") == 0


async def test_a_repeat_of_a_delayed_task_is_the_first(db: Any) -> None:
    """P5: whatever it says about the time."""
    first = await delayed(db, Weigh("a"), "1h", dedupe_key="k")
    again = await delayed(db, Weigh("a"), "2h", dedupe_key="k")
    async with db.transaction():
        at_once = await submit(db, Weigh("a"), dedupe_key="k")

    assert (first.id, first.created) == (again.id, True)
    assert (again.created, at_once.created, at_once.id) == (False, False, first.id)
    assert await db.fetchval("select count(*) from towpath.outbox") == 0


async def test_a_time_in_the_past_is_now(db: Any) -> None:
    """R3: members look for what is due from a little before their last look on."""
    before = await db.fetchval("select towpath.clock()")
    async with db.transaction():
        await submit(db, Weigh("a", 1), at=datetime.now(UTC) - timedelta(days=1))
    assert before <= await db.fetchval("select due_at from towpath.task")


@pytest.mark.parametrize("ordering", ["key", "none"])
async def test_it_starts_on_time(migrated_url: str, ordering: Any) -> None:
    """R18: never early, and nobody has to ask for it."""
    app = depot(ordering=ordering)

    @app.transactional()
    async def weigh(task: Weigh, tx: Tx) -> None:
        await write(tx, task)

    async with running(app, migrated_url) as engine:
        await engine.db.execute(EFFECTS)
        handle = await delayed(engine.db, Weigh("a", 1), "400ms")
        due = (await engine.row(handle.id))["due_at"]
        row = await engine.reaches(handle.id, "SUCCEEDED")
        assert row["started_at"] >= due
        assert row["lane"] == ("a" if ordering == "key" else None)
        assert await effects(engine) == [("a", 1)]
        assert await engine.gates() == 0


async def test_it_is_one_of_its_lane_from_its_time_on(migrated_url: str) -> None:
    """C10: behind those that waited before, ahead of those that come later."""
    app, is_mended = depot(retry=RetryPolicy(attempts=999, base="1ms", cap="5ms")), asyncio.Event()

    @app.transactional()
    async def weigh(task: Weigh, tx: Tx) -> None:
        if task.number == 0 and not is_mended.is_set():
            raise RuntimeError("no")
        await write(tx, task)

    async with running(app, migrated_url) as engine:
        await engine.db.execute(EFFECTS)
        # As the relay numbers them: the outbox's ids.
        late = await delayed(engine.db, Weigh("a", 3), "1h")
        head = await engine.submit(Weigh("a", 0))
        await until(lambda: _is_gated(engine))
        first = await delayed(engine.db, Weigh("a", 1), "1ms")
        await engine.reaches(first.id, "PARKED")
        second = await delayed(engine.db, Weigh("a", 2), "1ms")
        await engine.reaches(second.id, "PARKED")
        await engine.db.execute("update towpath.task set due_at = towpath.clock() where id = $1", late.id)
        await engine.reaches(late.id, "PARKED")
        other = await delayed(engine.db, Weigh("b", 0), "1ms")
        is_mended.set()
        for id_ in (head, first.id, second.id, late.id, other.id):
            await engine.reaches(id_, "SUCCEEDED")
        assert [number for parcel, number in await effects(engine) if parcel == "a"] == [0, 1, 2, 3]
        assert await engine.gates() == 0


async def _is_gated(engine: Any) -> bool:
    return bool(await engine.gates())


async def test_while_it_waits_for_its_time_its_key_goes_on(migrated_url: str) -> None:
    app = depot()

    @app.transactional()
    async def weigh(task: Weigh, tx: Tx) -> None:
        await write(tx, task)

    async with running(app, migrated_url) as engine:
        await engine.db.execute(EFFECTS)
        handle = await delayed(engine.db, Weigh("a", 9), "1h")
        for number in range(3):
            await engine.reaches(await engine.submit(Weigh("a", number)), "SUCCEEDED")
        assert await engine.state(handle.id) == "WAITING"
        assert await engine.gates() == 0
        async with engine.db.transaction():
            state = await tasks.cancel(engine.db, handle.id, group="depot", actor="ann")
        assert state == "CANCELLED"


async def test_two_members_never_run_two_of_a_lane_at_once(migrated_url: str) -> None:
    """C10: delayed ones, ones from the broker, and retries of both."""
    app = depot(retry=RetryPolicy(attempts=999, base="1ms", cap="5ms"))
    inside: dict[str, int] = {}
    overlaps: list[Weigh] = []
    rng = random.Random(4)

    @app.transactional()
    async def weigh(task: Weigh, tx: Tx) -> None:
        inside[task.parcel] = inside.get(task.parcel, 0) + 1
        try:
            if inside[task.parcel] > 1:
                overlaps.append(task)
            await asyncio.sleep(0.003)
            if rng.random() < 0.2:
                raise RuntimeError("no")
            await write(tx, task)
        finally:
            inside[task.parcel] -= 1

    async with bench(app, migrated_url) as engine, engine.member(), engine.member():
        await engine.db.execute(EFFECTS)
        ids = []
        for number in range(40):
            parcel = "ab"[number % 2]
            if rng.random() < 0.5:
                ids.append(await engine.submit(Weigh(parcel, number)))
            else:
                delay = f"{rng.randrange(200)}ms"
                ids.append((await delayed(engine.db, Weigh(parcel, number), delay)).id)
        for id_ in ids:
            await engine.reaches(id_, "SUCCEEDED")
        assert overlaps == []
        assert len(await effects(engine)) == 40
        assert await engine.gates() == 0


async def test_a_deadline_before_its_time_ends_it(migrated_url: str) -> None:
    """It does not wait out a delay that has become pointless."""
    app = depot()

    @app.transactional()
    async def weigh(task: Weigh, tx: Tx) -> None:
        raise AssertionError("too late")

    async with running(app, migrated_url) as engine:
        handle = await delayed(engine.db, Weigh("a"), "1h", deadline="50ms")
        await engine.reaches(handle.id, "EXPIRED")
        assert await engine.gates() == 0


async def test_one_cancelled_at_its_time_holds_nothing_up(migrated_url: str) -> None:
    """C10: whichever is quicker, the lane goes on."""
    app = depot()

    @app.transactional()
    async def weigh(task: Weigh, tx: Tx) -> None:
        await write(tx, task)

    async with running(app, migrated_url) as engine:
        await engine.db.execute(EFFECTS)
        handles = [await delayed(engine.db, Weigh("a", number), "100ms") for number in range(10)]
        await asyncio.sleep(0.1)
        for handle in handles[::2]:
            async with engine.db.transaction():
                await tasks.cancel(engine.db, handle.id, group="depot", actor="ann")
        for handle in handles:
            await engine.reaches(handle.id, "SUCCEEDED", "CANCELLED")
        await engine.reaches(await engine.submit(Weigh("a", 99)), "SUCCEEDED")
        assert await engine.gates() == 0


async def test_a_handler_emits_for_later(migrated_url: str) -> None:
    """R18: with the transaction of its task."""
    app = depot()

    @app.transactional()
    async def sort(parcel: Posted, tx: Tx) -> None:
        tx.emit(Posted("b"), delay="1h")

    async with running(app, migrated_url) as engine:
        await engine.reaches(await engine.publish(Posted("a")), "SUCCEEDED")
        assert await engine.db.fetchval("select key from towpath.scheduled") == "b"
        assert await engine.outbox() == []
