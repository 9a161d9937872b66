"""Messages whose worker died: started again few at a time, the last time watched."""

import asyncio
import time
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
from uuid_utils.compat import uuid7

from tests.integration.engine import Engine, Note, Posted, bench, depot, until


async def left_by_a_dead_worker(
    engine: Engine, number: int, *, deliveries: int, held_by: str, state: str = "RUNNING"
) -> UUID:
    """A message that was started so often without an outcome, the last time by a worker that died."""
    id_: UUID = uuid7()
    await engine.db.execute(
        "insert into towpath.task (consumer_group, id, type, kind, source, key, lane, state, held_by,"
        " worker, token, deliveries, payload, content_type) values ('depot', $1, 'parcel.posted', 'event',"
        " 'parcels', $2, $2, $6, $3, case when $6 = 'RUNNING' then gen_random_uuid() end,"
        " case when $6 = 'RUNNING' then gen_random_uuid() end, $4,"
        " convert_to($5, 'UTF8'), 'application/json')",
        id_,
        f"k{number}",
        held_by,
        deliveries,
        f'{{"parcel": "k{number}", "number": {number}}}',
        state,
    )
    return await engine.publish(Posted(f"k{number}", number), message_id=id_)


@pytest.mark.parametrize(("deliveries", "together"), [(1, 16), (2, 4)])
async def test_two_hundred_suspects_do_not_run_one_after_another(
    migrated_url: str, deliveries: int, together: int
) -> None:
    """C19: a quarter at once of those that lost a worker once, a sixteenth of those that lost two."""
    app, now, most, goes = depot(ordering="none"), 0, 0, asyncio.Semaphore(0)

    @app.idempotent()
    async def sort(parcel: Posted) -> None:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await goes.acquire()
        now -= 1

    async with bench(app, migrated_url, concurrency=64) as engine:
        for number in range(200):
            await left_by_a_dead_worker(engine, number, deliveries=deliveries, held_by="broker")
        async with engine.member():
            done = "select count(*) from towpath.task where state = 'SUCCEEDED'"
            await until(lambda: now == together)
            note = await engine.publish(Posted("fresh", 1000))
            await engine.reaches(note, "RUNNING")
            for _ in range(201):
                goes.release()
            await engine.is_drained()
            assert await engine.db.fetchval(done) == 201
    assert most <= together + 1, "and one that is none"


@pytest.mark.parametrize(
    ("held_by", "state"), [("broker", "RUNNING"), ("database", "RUNNING"), ("broker", "ACCEPTED")]
)
async def test_the_last_start_waits_for_nothing_that_runs_for_long_and_keeps_nothing_waiting_for_long(
    migrated_url: str, held_by: str, state: str
) -> None:
    """C19: beside what has proven harmless, and until it has run as long itself; also one handed back."""
    app, go, story, began = depot(ordering="none"), asyncio.Event(), list[Any](), list[float]()

    @app.idempotent(timeout="1h")
    async def sort(parcel: Posted) -> None:
        began.append(time.monotonic())
        story.append(parcel.number)
        if parcel.number:
            await go.wait()

    @app.idempotent(timeout="1h")
    async def read(note: Note) -> None:
        began.append(time.monotonic())
        story.append("note")
        if note.number:
            await go.wait()

    quiet = timedelta(seconds=2)
    async with bench(app, migrated_url, max_deliveries=3, quiet=quiet) as engine, engine.member():
        long = [await engine.publish(Note(number)) for number in range(1, 4)]
        await until(lambda: story == ["note"] * 3)
        last = await left_by_a_dead_worker(engine, 7, deliveries=2, held_by=held_by, state=state)
        await until(lambda: story[3:] == [7])
        waiting = [await engine.publish(Note()) for _ in range(3)]
        for id_ in waiting:
            await engine.reaches(id_, "SUCCEEDED")
        assert story[3:] == [7, "note", "note", "note"]
        assert began[3] - began[2] > quiet.total_seconds() / 2, "it begins beside nothing young"
        assert began[4] - began[3] > quiet.total_seconds() / 2, "nothing starts beside it at first"
        assert [await engine.state(id_) for id_ in (last, *long)] == ["RUNNING"] * 4
        go.set()
        for id_ in (last, *long):
            await engine.reaches(id_, "SUCCEEDED")
