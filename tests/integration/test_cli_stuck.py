"""`towpath tasks stuck`: each reason on rows that the engine, the relay or their statements made."""

import asyncio
import json
from typing import Any
from uuid import UUID, uuid4

import asyncpg

from tests.fixtures.fix_cli import Run
from tests.integration.engine import Posted, Weigh, bench, depot
from tests.integration.relaying import RecordingBroker, relaying
from tests.integration.test_publish_gates import PARKED, policy, until
from tests.integration.test_reaping import journal
from towpath.context import Tx
from towpath.errors import MessageRefused
from towpath.outbox import send, submit
from towpath.outcomes import Dead
from towpath.store.claims import ClaimStore
from towpath.store.database import Database
from towpath.store.doubts import DoubtStore
from towpath.store.groups import Terms
from towpath.store.reaping import ReapStore
from towpath.store.workers import WorkerStore


async def stuck(towpath: Run) -> dict[UUID, Any]:
    """What it says of each task of the group."""
    arguments = ("tasks", "stuck", "--group", "depot", "--older-than", "0s", "--json")
    ran = await asyncio.to_thread(towpath, *arguments)
    assert (ran.code, ran.err) == (0, "")
    return {UUID(row["id"]): row for row in json.loads(ran.out)}


async def submitted(db: "asyncpg.Connection[Any]", task: Weigh) -> UUID:
    """As an application does."""
    async with db.transaction():
        return (await submit(db, task)).id


async def test_a_worker_lost_in_an_effect_is_told_until_the_task_is_in_doubt(
    migrated_url: str, towpath: Run
) -> None:
    """O1, C9: a member will ask the provider, nobody repeats it."""
    async with bench(depot(), migrated_url) as engine:
        id_ = await engine.submit_due(Posted("a"))
        database = Database(migrated_url, pool_size=2)
        await database.start()
        worker = uuid4()
        await WorkerStore(database, "depot", worker, 0.0, Terms("key", None)).register()
        claims = ClaimStore(database, "depot", worker)
        [work] = await claims.start_due(10)
        assert (await stuck(towpath))[id_]["why"] == "lost_to_reap"
        assert await DoubtStore(database, "depot").mark(work, "charge")

        found = (await stuck(towpath))[id_]

        assert (found["state"], found["why"]) == ("RUNNING", "lost_in_effect")
        assert (found["has_members"], "start one" in found["todo"]) == (False, True)
        await WorkerStore(database, "depot", uuid4(), 600.0, Terms("key", None)).register()
        assert "UNKNOWN" in (await stuck(towpath))[id_]["todo"]
        assert await ReapStore(database, "depot").reap_abandoned(10) == 1
        assert (await stuck(towpath))[id_]["why"] == "in_doubt"
        await database.aclose()


async def test_a_task_whose_message_waits_behind_a_refused_one_is_not_lost(
    db: "asyncpg.Connection[Any]", migrated_url: str, towpath: Run
) -> None:
    """O1, R8: it says where to look for the one that a person has to decide about."""
    await policy(db, "park_key", "tasks.depot")
    async with db.transaction():
        refused = await send(db, Weigh("a"))
    behind = await submitted(db, Weigh("a", 1))
    broker = RecordingBroker(
        refuse=lambda message: MessageRefused("too_large") if message.message_id == refused else None
    )
    async with relaying(migrated_url, broker):
        await until(db, PARKED, 1)

        found = await stuck(towpath)

        assert {id_: row["why"] for id_, row in found.items()} == {behind: "message_parked"}
        told = await asyncio.to_thread(towpath, *found[behind]["todo"].split()[1:], "--json")
        assert str(refused) in told.out


async def test_a_message_that_was_published_and_never_came_is_told_apart_from_one_that_waits(
    db: "asyncpg.Connection[Any]", towpath: Run
) -> None:
    """O1, C21"""
    vanished = await submitted(db, Weigh("a"))
    assert (await stuck(towpath))[vanished]["why"] == "message_unpublished"
    await journal(db)
    waiting = await submitted(db, Weigh("b"))

    found = await stuck(towpath)

    assert {id_: row["why"] for id_, row in found.items()} == {
        vanished: "message_lost",
        waiting: "message_unpublished",
    }
    assert "start one" in found[vanished]["todo"]


async def test_a_replayed_task_that_is_due_behind_another_of_its_key_names_it(
    migrated_url: str, towpath: Run
) -> None:
    """O1, C10: it starts as soon as that one ends."""
    app, began, go = depot(), asyncio.Event(), asyncio.Event()
    is_cured = False

    @app.transactional()
    async def sort(parcel: Posted, tx: Tx) -> None:
        if parcel.number == 1:
            began.set()
            await go.wait()
        elif not is_cured:
            raise Dead("no_stamps")

    async with bench(app, migrated_url) as engine, engine.member():
        dead = await engine.publish(Posted("a", 0))
        await engine.reaches(dead, "DEAD")
        runs = await engine.publish(Posted("a", 1))
        await began.wait()
        is_cured = True
        assert (await asyncio.to_thread(towpath, "dlq", "replay", "--id", str(dead), "--yes")).code == 0

        found = (await stuck(towpath))[dead]

        go.set()
        for id_ in (dead, runs):
            await engine.reaches(id_, "SUCCEEDED")
    assert (found["state"], found["why"]) == ("WAITING", "overdue_behind")
    assert (found["behind"], found["behind_state"]) == (str(runs), "RUNNING")
    assert found["todo"].endswith(f"towpath tasks cancel {runs} --group depot")


async def test_what_a_pause_of_its_group_or_type_holds_says_how_to_end_it(
    migrated_url: str, towpath: Run
) -> None:
    """O1, C10: due rows and messages at the broker; what is told is what ends it."""
    async with bench(depot(), migrated_url) as engine:
        due = await engine.submit_due(Posted("a"))
        published = await submitted(engine.db, Weigh("b"))
        await journal(engine.db)

        async def after(command: str) -> tuple[Any, Any]:
            ran = await asyncio.to_thread(towpath, *command.split()[1:], "--yes")
            assert ran.code == 0, ran.err
            found = await stuck(towpath)
            return found[due], found[published]

        posted, weigh = await after("towpath worker pause --group depot --type parcel.posted")
        assert (posted["why"], weigh["why"]) == ("type_paused", "message_lost")
        posted, weigh = await after(posted["todo"])
        assert (posted["why"], weigh["why"]) == ("overdue", "message_lost")
        await after("towpath worker pause --group depot --type parcel.posted")
        posted, weigh = await after("towpath worker pause --group depot")
        assert (posted["why"], weigh["why"]) == ("group_paused", "group_paused")
        posted, weigh = await after(weigh["todo"])
        assert (posted["why"], weigh["why"]) == ("overdue", "message_lost")


async def test_a_message_that_a_paused_destination_holds_is_not_behind_a_refused_one(
    db: "asyncpg.Connection[Any]", migrated_url: str, towpath: Run
) -> None:
    """O1, R8"""
    pause = ("outbox", "pause", "--destination", "tasks.depot", "--yes")
    assert (await asyncio.to_thread(towpath, *pause)).code == 0
    held = await submitted(db, Weigh("a"))
    async with relaying(migrated_url, RecordingBroker()):
        await until(db, PARKED, 1)

        found = await stuck(towpath)

    assert {id_: row["why"] for id_, row in found.items()} == {held: "message_paused"}
    assert "towpath outbox status" in found[held]["todo"]
