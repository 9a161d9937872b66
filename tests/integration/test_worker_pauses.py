"""A group stopped by a person: nothing starts, what runs ends, and nothing is spent by waiting."""

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from tests.integration.engine import EFFECTS, Engine, Note, Posted, Weigh, bench, depot, effects, until
from tests.integration.test_effects import write
from tests.integration.test_reaping import journal
from tests.integration.wired import KAFKA, new_name, wired
from towpath import App, Call, Retry, RetryPolicy, Tx
from towpath.consumer.health import Health
from towpath.outbox import submit
from towpath.store.pauses import PauseStore, Target


async def pause(engine: Engine, type_: str = "") -> None:
    """As the command does."""
    target = Target("start", engine.app.name, type_)
    assert await PauseStore().pause(engine.db, target, actor="ann", reason="provider is down")


async def resume(engine: Engine, type_: str = "") -> None:
    """As the command does."""
    assert await PauseStore().resume(engine.db, Target("start", engine.app.name, type_))


async def is_heeded(health: Health, *types: str) -> None:
    """Wait until a member knows it."""
    await until(lambda: tuple(health.paused) == types)


async def beats(engine: Engine, count: int = 3) -> None:
    """Wait until a member has renewed its lease some times."""
    for _ in range(count):
        before = await engine.db.fetchval("select max(lease_until) from towpath.worker")

        async def is_renewed(before: Any = before) -> bool:
            after = await engine.db.fetchval("select max(lease_until) from towpath.worker")
            return bool(after > before)

        await until(is_renewed)


async def test_a_paused_group_finishes_what_runs_and_starts_nothing_until_it_is_resumed(
    migrated_url: str,
) -> None:
    """C10, C13: messages and due rows wait unspent, also across a restart; each key goes on in order."""
    app, go = depot(), asyncio.Event()
    began = list[int]()

    @app.transactional()
    async def sort(parcel: Posted, tx: Tx) -> None:
        began.append(parcel.number)
        if parcel.number == 0:
            await go.wait()
        await write(tx, parcel)

    async with bench(app, migrated_url) as engine:
        await engine.db.execute(EFFECTS)
        async with engine.member() as member:
            health = member.consumer.health
            first = await engine.publish(Posted("a", 0))
            await until(lambda: began == [0])
            await pause(engine)
            await is_heeded(health, "*")
            ids = [await engine.publish(Posted("a", number)) for number in range(1, 4)]
            ids += [await engine.publish(Posted("b", number)) for number in range(4, 6)]
            due = await engine.submit_due(Posted("c", 6))
            go.set()
            await engine.reaches(first, "SUCCEEDED")
            await beats(engine)
            await until(lambda: health.is_ready and not health.stuck_loops())
            assert began == [0]
        async with engine.member() as member:
            await is_heeded(member.consumer.health, "*")
            await beats(engine)
            assert began == [0]
            assert (await engine.row(due))["state"] == "WAITING"
            await resume(engine)
            rows = [await engine.reaches(id_, "SUCCEEDED") for id_ in (*ids, due)]
            await is_heeded(member.consumer.health)
        await engine.is_drained()
        done = await effects(engine)
    assert [number for parcel, number in done if parcel == "a"] == [0, 1, 2, 3]
    assert [number for parcel, number in done if parcel == "b"] == [4, 5]
    assert {(row["attempt"], row["deliveries"]) for row in rows} == {(1, 1)}


async def test_one_type_is_paused_while_others_go_on_and_its_flood_makes_way(migrated_url: str) -> None:
    """C10, C14: what does not fit the intake waits in the database, unspent and in order."""
    app = depot()

    @app.transactional(destination="notes")
    async def sort(parcel: Posted, tx: Tx) -> None:
        await write(tx, parcel)

    @app.idempotent()
    async def note(left: Note, call: Call) -> None: ...

    async with bench(app, migrated_url, max_in_flight=20) as engine:
        await engine.db.execute(EFFECTS)
        await pause(engine, "parcel.posted")
        async with engine.member() as member:
            await is_heeded(member.consumer.health, "parcel.posted")
            flood = [await engine.publish(Posted(f"p{n % 7}", n), address="notes") for n in range(60)]
            for number in range(20):
                await engine.reaches(await engine.publish(Note(number)), "SUCCEEDED")
            waiting = await engine.db.fetch(
                "select reason_code, attempt, state from towpath.task where type = 'parcel.posted'"
                " and state <> 'RUNNING' group by 1, 2, 3 order by state desc"
            )
            assert [tuple(row) for row in waiting] == [("paused", 0, "WAITING"), (None, 0, "PARKED")]
            assert await effects(engine) == []
            await resume(engine, "parcel.posted")
            for id_ in flood:
                await engine.reaches(id_, "SUCCEEDED")
        done = await effects(engine)
        assert [] == await engine.letters()
    for key in range(7):
        of_key = [number for parcel, number in done if parcel == f"p{key}"]
        assert of_key == list(range(key, 60, 7))


@pytest.mark.parametrize(("due_for", "end"), [(timedelta(hours=4), "WAITING"), (timedelta(0), "DEAD")])
async def test_the_time_for_which_something_is_due_and_may_not_start_does_not_count_towards_its_age(
    migrated_url: str, due_for: timedelta, end: str
) -> None:
    """C12, C14: it was first tried five hours ago, and a pause or a breaker has held it for four of them."""
    app = depot(retry=RetryPolicy(attempts=9, base="1h", cap="1h", max_age="3h"))

    @app.idempotent()
    async def sort(parcel: Posted, call: Call) -> None:
        raise Retry("closed")

    async with bench(app, migrated_url) as engine:
        id_ = await engine.submit_due(Posted("a"))
        await engine.db.execute(
            "update towpath.task set attempt = 1, due_at = towpath.clock() - $1::interval,"
            " started_at = towpath.clock() - interval '5 hours'",
            due_for,
        )
        async with engine.member():
            await until(lambda: _is_tried(engine, id_))
            assert (await engine.row(id_))["state"] == end


async def _is_tried(engine: Engine, id_: Any) -> bool:
    return bool((await engine.row(id_))["attempt"] == 2)


async def test_the_reaper_does_not_take_what_waits_at_the_broker_for_lost(migrated_url: str) -> None:
    """C21: neither during the pause nor right after it."""
    app = depot()

    @app.transactional()
    async def weigh(parcel: Weigh, tx: Tx) -> None: ...

    async with bench(app, migrated_url, lost_after=timedelta(milliseconds=1)) as engine:
        await pause(engine)
        async with engine.db.transaction():
            id_ = (await submit(engine.db, Weigh("a"))).id
        await journal(engine.db)
        async with engine.member() as member:
            rounds = member.consumer.health.progressed_at
            await until(lambda: "reap" in rounds)
            seen = rounds["reap"]
            await until(lambda: rounds["reap"] > seen)  # one whole round
            assert (await engine.row(id_))["state"] == "ACCEPTED"
            await resume(engine)
            await engine.reaches(id_, "SUCCEEDED")


@pytest.mark.services
@pytest.mark.parametrize("kind", ["kafka", "rabbitmq"])
async def test_a_pause_stops_the_intake_at_the_broker_and_the_member_keeps_its_place(
    migrated_url: str, request: pytest.FixtureRequest, kind: str
) -> None:
    """C10, S7: what runs is acknowledged, nothing stays with the member, and it stays connected."""
    if kind == "kafka":
        url, options = f"kafka://{request.getfixturevalue('kafka_bootstrap')}", KAFKA
    else:
        url, options = request.getfixturevalue("rabbit_url"), {}
    app, go, began = App(new_name("depot")), asyncio.Event(), list[int]()

    @app.transactional()
    async def sort(parcel: Posted, tx: Tx) -> None:
        began.append(parcel.number)
        if parcel.number == 0:
            await go.wait()
        await write(tx, parcel)

    async with wired(app, migrated_url, url, options) as engine:
        await engine.db.execute(EFFECTS)
        async with engine.member() as member:
            health = member.consumer.health
            ids = [await engine.publish(Posted("a", number)) for number in range(5)]
            await until(lambda: began == [0])
            await pause(engine)
            await is_heeded(health, "*")
            go.set()
            ids.append(await engine.publish(Posted("a", 5)))
            await engine.reaches(ids[0], "SUCCEEDED")
            await until(lambda: _holds_nothing(health))
            await beats(engine)
            await until(lambda: health.is_ready)
            assert began == [0]
            await resume(engine)
            rows = [await engine.reaches(id_, "SUCCEEDED") for id_ in ids]
        done = await effects(engine)
    assert done == [("a", number) for number in range(6)]
    assert {row["attempt"] for row in rows} == {1}


def _holds_nothing(health: Health) -> bool:
    """Whether no message is with the member: at RabbitMQ, whether no queue is consumed."""
    subscriber: Any = health.subscriber
    session = getattr(subscriber, "_session", None)
    consumers = getattr(session, "_consumers", {})
    return subscriber is not None and not consumers and health.is_broker_connected
