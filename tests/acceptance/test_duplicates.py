"""The same thing asked for or delivered again is done once (A7, A8)."""

import asyncio

import asyncpg

from tests.acceptance.world import World
from towpath.outbox import emit, submit

SUBMITS = 50


async def test_the_same_submit_fifty_times_at_once_is_one_task(world: World) -> None:
    """A7, P5: one row, one message, one run; everybody is told the same id."""
    world.relay()
    world.consumer()
    async with asyncpg.create_pool(world.database_url, min_size=SUBMITS, max_size=SUBMITS) as pool:

        async def submit_it() -> tuple[object, bool]:
            async with pool.acquire() as connection, connection.transaction():
                handle = await submit(connection, world.messages.request(key="a", request_id="r1"))
                return handle.id, handle.created

        answers = await asyncio.gather(*[submit_it() for _ in range(SUBMITS)])

    await world.until_state("SUCCEEDED")
    ids = {id_ for id_, _ in answers}
    assert (len(ids), sum(is_created for _, is_created in answers)) == (1, 1)
    (task,) = await world.db.fetch("select id, attempt, result from towpath.task")
    assert (ids, 1, b'{"answered":"r1"}') == ({task["id"]}, task["attempt"], task["result"])
    assert await world.db.fetchval("select count(*) from towpath.outbox where kind = 'task'") == 1
    assert await world.db.fetchval("select count(*) from outside_call") == 1
    again = await _submit_again(world)
    assert (task["id"], False) == again


async def _submit_again(world: World) -> tuple[object, bool]:
    async with world.db.transaction():
        handle = await submit(world.db, world.messages.request(key="a", request_id="r1"))
        return handle.id, handle.created


async def test_a_duplicate_delivery_has_one_effect(world: World) -> None:
    """A8, C5: duplicates beside the first, while it waits for a retry, after its end; events and tasks."""
    await world.broker.listen(world.steps)
    await world.broker.listen(world.tasks)
    step, work, _ = world.messages
    async with world.db.transaction():
        quick = await emit(world.db, step(key="a", n=1, is_watched=True))
        slow = await emit(world.db, step(key="b", n=1, failing_attempts=3, is_watched=True))
        outside = (await submit(world.db, work(key="a", n=1, failing_attempts=2))).id
    world.relay()
    # Before anybody consumes, so that the copies lie right behind the originals.
    await world.until_sent()
    sent = [*await world.broker.heard(world.steps), *await world.broker.heard(world.tasks)]
    assert len(sent) == 3
    await world.broker.send([*sent, *sent])
    world.consumer("consumer-1")
    world.consumer("consumer-2")
    await world.until_counted(1, "select count(*) from towpath.task_event where to_state = 'WAITING'")
    await world.broker.send(sent)
    await world.until_state("SUCCEEDED", 3)
    await world.broker.send(sent)
    async with world.db.transaction():
        last = [await emit(world.db, step(key=key, n=2)) for key in ("a", "b")]
        last_work = (await submit(world.db, work(key="a", n=2))).id

    await world.until_state("SUCCEEDED", 6)

    effects = await world.db.fetch(
        "select message_id from effect where key = 'a' and handler = 'step' order by seq"
    )
    assert [quick, last[0]] == [row["message_id"] for row in effects]
    effects = await world.db.fetch("select message_id from effect where key = 'b' order by seq")
    assert [slow, last[1]] == [row["message_id"] for row in effects]
    effects = await world.db.fetch("select message_id from effect where handler = 'work' order by seq")
    assert [outside, last_work] == [row["message_id"] for row in effects]
    trials = await world.db.fetch("select message_id, count(*) as n from outside_call group by message_id")
    assert {quick: 1, slow: 4, outside: 3, last_work: 1} == {row["message_id"]: row["n"] for row in trials}
    assert await world.states() == {"SUCCEEDED": 6}
    assert await world.db.fetchval("select count(*) from towpath.dead_letter") == 0
