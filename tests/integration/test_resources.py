"""What a group shares between its handlers: providers, middleware, slots."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from sqlalchemy import text

from tests.integration.engine import Note, Posted, bench, depot, running, until
from towpath.app import App
from towpath.backoff import RetryPolicy
from towpath.context import Attempt, Call, Tx
from towpath.errors import ConfigurationError
from towpath.outcomes import Retry


class Carrier:
    def __init__(self) -> None:
        self.is_open = True


class Scales:
    pass


async def test_providers_are_opened_before_the_first_message_and_closed_after_the_drain(
    migrated_url: str,
) -> None:
    app, story = depot(), list[Any]()

    @asynccontextmanager
    async def carrier() -> AsyncIterator[Carrier]:
        made = Carrier()
        story.append("open carrier")
        yield made
        made.is_open = False
        story.append("close carrier")

    @asynccontextmanager
    async def scales() -> AsyncIterator[Scales]:
        story.append("open scales")
        yield Scales()
        story.append("close scales")

    started, go = asyncio.Event(), asyncio.Event()

    @app.transactional()
    async def sort(parcel: Posted, tx: Tx, *, by: Carrier, scales: Scales) -> None:
        started.set()
        await go.wait()
        story.append((by.is_open, type(scales)))

    app.provide(Carrier, carrier)
    app.provide(Scales, scales)
    async with bench(app, migrated_url) as engine:
        await engine.publish(Posted("a"))
        async with engine.member() as member:
            await started.wait()
            member.told.set()
            go.set()
            await member.stop()
    assert story == ["open carrier", "open scales", (True, Scales), "close scales", "close carrier"]


async def test_every_handler_is_given_the_same_resource(migrated_url: str) -> None:
    app, seen = depot(), list[Carrier]()

    @asynccontextmanager
    async def carrier() -> AsyncIterator[Carrier]:
        yield Carrier()

    @app.transactional()
    async def sort(parcel: Posted, *, carrier: Carrier) -> None:
        seen.append(carrier)

    @app.idempotent()
    async def read(note: Note, call: Call, *, carrier: Carrier) -> None:
        seen.append(carrier)

    app.provide(Carrier, carrier)
    async with running(app, migrated_url) as engine:
        await engine.reaches(await engine.publish(Posted("a")), "SUCCEEDED")
        await engine.reaches(await engine.publish(Note()), "SUCCEEDED")
    assert len(seen) == 2
    assert seen[0] is seen[1]


async def test_everything_wrong_is_told_before_the_first_message(migrated_url: str) -> None:
    """O2."""
    app = depot()

    @app.transactional()
    async def sort(parcel: Posted, tx: Tx, *, by: Carrier, scales: Scales) -> None: ...

    async with bench(app, migrated_url) as engine:
        await engine.publish(Posted("a"))
        with pytest.raises(ConfigurationError) as caught:
            async with engine.member():
                pass
        assert "nothing provides Carrier for 'by'" in str(caught.value)
        assert "nothing provides Scales for 'scales'" in str(caught.value)
        assert engine.broker.hub.group("depot").members == []


async def test_a_database_without_schema_is_told_with_the_fix(database_url: str) -> None:
    """O2."""
    app = depot()

    @app.transactional()
    async def sort(parcel: Posted) -> None: ...

    async with bench(app, database_url) as engine:
        with pytest.raises(ConfigurationError, match="towpath db upgrade"):
            async with engine.member():
                pass


async def test_middleware_wraps_every_call_the_first_outermost(migrated_url: str) -> None:
    app, story = depot(retry=RetryPolicy(attempts=2, base="1ms", cap="1ms")), list[Any]()

    @app.middleware
    async def outer(attempt: Attempt, call_next: Any) -> object:
        story.append(("outer", attempt.attempt))
        try:
            return await call_next()
        finally:
            story.append("outer ends")

    @app.middleware
    async def inner(attempt: Attempt, call_next: Any) -> object:
        story.append(("inner", attempt.key))
        result = await call_next()
        return {"wrapped": result}

    @app.idempotent()
    async def sort(parcel: Posted, call: Call) -> str:
        story.append("handler")
        if call.attempt.attempt == 1:
            raise RuntimeError("no")
        return "done"

    async with running(app, migrated_url) as engine:
        row = await engine.reaches(await engine.publish(Posted("a")), "SUCCEEDED", "DEAD")
    assert row["result"] == b'{"wrapped":"done"}'
    assert story == [
        *[("outer", 1), ("inner", "a"), "handler", "outer ends"],
        *[("outer", 2), ("inner", "a"), "handler", "outer ends"],
    ]


async def test_a_middleware_that_raises_fails_the_attempt(migrated_url: str) -> None:
    app = depot(retry=RetryPolicy(attempts=1))

    @app.middleware
    async def broken(attempt: Attempt, call_next: Any) -> object:
        raise KeyError("flag")

    @app.idempotent()
    async def sort(parcel: Posted) -> None: ...

    async with running(app, migrated_url) as engine:
        row = await engine.reaches(await engine.publish(Posted("a")), "DEAD")
        assert row["reason_code"] == "key_error"


async def test_a_handlers_concurrency_bounds_it_and_takes_no_place_from_others(migrated_url: str) -> None:
    """C16: what waits for a slot of its handler waits in its lane, unclaimed."""
    app, now, most, go = App("depot", ordering="none"), 0, 0, asyncio.Event()

    @app.idempotent(concurrency=2)
    async def sort(parcel: Posted) -> None:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.01)
        await go.wait()
        now -= 1

    @app.idempotent()
    async def read(note: Note) -> None: ...

    async with running(app, migrated_url, concurrency=3) as engine:
        parcels = [await engine.publish(Posted(f"k{number}")) for number in range(6)]
        await until(lambda: now == 2)
        for number in range(10):
            await engine.reaches(await engine.publish(Note(number)), "SUCCEEDED")
        claimed = "select count(*) from towpath.task where type = 'parcel.posted'"
        assert await engine.db.fetchval(claimed) == 2
        go.set()
        for id_ in parcels:
            await engine.reaches(id_, "SUCCEEDED")
    assert most == 2


async def test_a_retry_of_a_bounded_handler_has_its_turn_before_the_backlog_ends(migrated_url: str) -> None:
    """C4: what is due and what arrives take turns at the handler's slots."""
    app = App("depot", ordering="none", retry=RetryPolicy(base="1ms", cap="1ms"))
    calls: list[int] = []

    @app.idempotent(concurrency=1)
    async def sort(parcel: Posted) -> None:
        calls.append(parcel.number)
        if calls.count(0) < 2:
            await asyncio.sleep(0.005)
        if parcel.number == 0 and calls.count(0) == 1:
            raise Retry("once")

    async with bench(app, migrated_url) as engine:
        for number in range(1000):
            await engine.publish(Posted("a", number))
        async with engine.member():
            await engine.is_drained()
            await until(lambda: len(calls) == 1001)
    assert sorted(calls) == sorted([0, *range(1000)])
    assert len(calls) - calls[::-1].index(0) < 950, "long before the backlog ended"


async def test_no_more_transactional_handlers_start_than_there_are_sessions(migrated_url: str) -> None:
    """The others are not claimed, and a call that ends in a transaction finds one."""
    app, now, most, go = App("depot", ordering="none"), 0, 0, asyncio.Event()

    @app.transactional()
    async def sort(parcel: Posted, tx: Tx) -> None:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await tx.session.execute(text("select 1"))
        await go.wait()
        now -= 1

    @app.idempotent()
    async def read(note: Note, call: Call) -> None:
        async with call.transaction() as tx:
            await tx.session.execute(text("select 1"))

    async with running(app, migrated_url, concurrency=16, sessions=3) as engine:
        parcels = [await engine.publish(Posted(f"k{number}")) for number in range(20)]
        await until(lambda: now == 3)
        for number in range(10):
            await engine.reaches(await engine.publish(Note(number)), "SUCCEEDED")
        claimed = "select count(*) from towpath.task where type = 'parcel.posted'"
        assert await engine.db.fetchval(claimed) == 3
        go.set()
        for id_ in parcels:
            await engine.reaches(id_, "SUCCEEDED")
    assert most == 3


async def test_more_concurrency_than_sessions_is_refused_at_the_start(migrated_url: str) -> None:
    """O2: in one line that names both."""
    app = depot()

    @app.transactional(concurrency=9)
    async def sort(parcel: Posted, tx: Tx) -> None: ...

    async with bench(app, migrated_url, sessions=8) as engine:
        with pytest.raises(ConfigurationError, match=r"concurrency=9 .* TOWPATH_WORKER__SESSIONS is 8"):
            async with engine.member():
                pass


async def test_the_workers_concurrency_bounds_all_handlers_together(migrated_url: str) -> None:
    app, now, most, go = App("depot", ordering="none"), 0, 0, asyncio.Event()

    @app.idempotent()
    async def read(note: Note) -> None:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await go.wait()
        await asyncio.sleep(0.001)
        now -= 1

    async with running(app, migrated_url, concurrency=3) as engine:
        for number in range(40):
            await engine.publish(Note(number))
        await until(lambda: now == 3)
        go.set()
        await engine.is_drained("notes")
    assert most == 3


async def test_two_members_share_the_work(migrated_url: str) -> None:
    """S1."""
    app, seen = depot(), list[int]()

    @app.transactional()
    async def sort(parcel: Posted) -> None:
        seen.append(parcel.number)

    async with bench(app, migrated_url) as engine, engine.member():
        for number in range(50):
            await engine.publish(Posted(f"k{number}", number))
        async with engine.member():
            for number in range(50, 100):
                await engine.publish(Posted(f"k{number}", number))
            await engine.is_drained()
        workers = await engine.db.fetchval("select count(*) from towpath.worker")
        assert workers == 1, "one has left"
    assert sorted(seen) == list(range(100))
