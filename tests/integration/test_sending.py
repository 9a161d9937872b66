"""Commands to a group with another database: two installations, one broker between them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import asyncpg
import pytest_asyncio
from sqlalchemy import text

from tests.fixtures.fix_postgres import NewDatabase
from tests.integration.engine import EFFECTS, Engine, Weigh, bench, depot, effects
from tests.integration.relaying import FAST
from tests.integration.test_publish_gates import until
from towpath import App, event, tasks
from towpath.context import Tx
from towpath.deadletters import Filter, carry_out, make_plan
from towpath.outbox import republish, send
from towpath.outcomes import Dead
from towpath.relay import Relay

INSERT = text("insert into effect (parcel, number) values (:p, :n)")


@event("parcel.weighed", destination="weighed", key="parcel")
@dataclass(frozen=True)
class Weighed:
    """The depot's answer."""

    parcel: str
    number: int


@dataclass
class Installations:
    """The office sends commands; the depot, with a database of its own, carries them out and answers."""

    office: Engine
    depot: Engine
    broken: set[int]
    """Commands the depot's handler cannot do."""

    async def order(self, *numbers: int, parcel: str = "a") -> list[Any]:
        """Send commands, each in a transaction of its own."""
        ids = []
        for number in numbers:
            async with self.office.db.transaction():
                ids.append(await send(self.office.db, Weigh(parcel, number)))
        return ids


@asynccontextmanager
async def relay(engine: Engine) -> AsyncIterator[None]:
    """A relay of one installation."""
    stop = asyncio.Event()
    task = asyncio.create_task(Relay(engine.url, engine.broker, FAST).run(stop))
    try:
        yield
    finally:
        stop.set()
        await task


@pytest_asyncio.fixture
async def two(
    migrated_url: str, new_database: NewDatabase, schema_template: str
) -> AsyncIterator[Installations]:
    """Both with relay and group, over one broker."""
    broken: set[int] = set()
    office_app, depot_app = App("office"), depot()

    @office_app.transactional()
    async def hear(answer: Weighed, tx: Tx) -> None:
        await tx.session.execute(INSERT, {"p": answer.parcel, "n": answer.number})

    @depot_app.transactional()
    async def weigh(command: Weigh, tx: Tx) -> None:
        if command.number in broken:
            raise Dead("scale_broken")
        await tx.session.execute(INSERT, {"p": command.parcel, "n": command.number})
        tx.emit(Weighed(command.parcel, command.number))

    with new_database(schema_template) as other_url:
        async with AsyncExitStack() as stack:
            office = await stack.enter_async_context(bench(office_app, migrated_url))
            there = await stack.enter_async_context(bench(depot_app, other_url))
            there.broker = office.broker
            for engine in (office, there):
                await engine.db.execute(EFFECTS)
                await stack.enter_async_context(engine.member())
                await stack.enter_async_context(relay(engine))
            yield Installations(office, there, broken)


async def test_a_command_runs_once_in_order_in_the_other_database_and_its_answer_comes_back(
    two: Installations,
) -> None:
    """P4, R10, C6: body inline; the row appears on arrival; an event is the answer; repeats are skipped."""
    ids = await two.order(*range(8))
    await until(two.office.db, "select count(*) from effect", 8)
    assert await effects(two.depot) == [("a", number) for number in range(8)]
    assert await effects(two.office) == [("a", number) for number in range(8)]
    row = await two.depot.row(ids[0])
    assert (row["state"], row["kind"], row["key"], row["type"]) == ("SUCCEEDED", "task", "a", "parcel.weigh")
    assert await two.office.db.fetchval("select count(*) from towpath.task where kind = 'task'") == 0
    assert await tasks.get(two.office.db, ids[0], group="depot") is None

    await until(two.office.db, "select count(*) from towpath.outbox_message where status <> 'SENT'", 0)
    plan = await republish.make_plan(
        two.office.db, republish.Wanted(since=await _first(two.office.db), types=("parcel.weigh",))
    )
    await republish.carry_out(two.office.db, plan, actor="ann")
    await until(two.office.db, "select count(*) from towpath.outbox_message where status <> 'SENT'", 0)
    await two.depot.is_drained("tasks.depot")
    assert len(await effects(two.depot)) == 8


async def test_a_command_that_dies_is_in_the_catalog_of_who_runs_it_and_is_replayed_there(
    two: Installations,
) -> None:
    """D1, D3: with its body; the sender's database knows nothing of it."""
    two.broken.add(1)
    ids = await two.order(0, 1, 2)
    await two.depot.reaches(ids[1], "DEAD")
    await two.depot.reaches(ids[2], "SUCCEEDED")
    (letter,) = await two.depot.letters()
    assert (letter["kind"], letter["reason_code"], letter["key"]) == ("task", "scale_broken", "a")
    assert letter["payload"] is not None
    assert await two.office.letters() == []
    two.broken.clear()
    await carry_out(two.depot.db, await make_plan(two.depot.db, Filter()), actor="ann")
    await two.depot.reaches(ids[1], "SUCCEEDED")
    await until(two.office.db, "select count(*) from effect", 3)


async def test_a_command_of_a_transaction_that_is_rolled_back_is_never_sent(two: Installations) -> None:
    """P1"""
    transaction = two.office.db.transaction()
    await transaction.start()
    await send(two.office.db, Weigh("a", 1))
    await transaction.rollback()
    (sent,) = await two.order(2)
    await two.depot.reaches(sent, "SUCCEEDED")
    assert await effects(two.depot) == [("a", 2)]


async def _first(db: "asyncpg.Connection[Any]") -> Any:
    return await db.fetchval("select min(created_at) from towpath.outbox")
