"""What nobody runs or needs any more: lost messages, finished rows, old workers."""

import asyncio
import json
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest

from tests.fixtures.fix_cli import Run
from tests.integration.engine import Weigh, bench, depot, running, until
from towpath.app import App
from towpath.context import Tx
from towpath.outbox import submit
from towpath.store.database import Database
from towpath.store.reaping import ReapStore


def depot_of_weighing(calls: list[Any], **options: Any) -> App:
    app = depot(**options)

    @app.transactional()
    async def weigh(parcel: Weigh, tx: Tx) -> None:
        calls.append((parcel.parcel, parcel.number))

    return app


async def journal(db: Any, snapshot: str = "pg_current_snapshot()") -> None:
    """As a relay that has published everything up to now."""
    await db.execute(
        "insert into towpath.journal (shards, epochs, last_ids, snapshot_from, snapshot_to) "
        "select array_agg(shard order by shard), array_agg(epoch + 1 order by shard), "
        f"array_agg(null::bigint), {snapshot}, {snapshot} from towpath.shard_lease"
    )


async def test_a_task_whose_published_message_vanished_is_driven_again_once(migrated_url: str) -> None:
    """C21: a purged queue, a retention that was too short."""
    calls = list[Any]()
    app = depot_of_weighing(calls)
    async with bench(app, migrated_url, lost_after=timedelta(milliseconds=1)) as engine:
        async with engine.db.transaction():
            ids = [(await submit(engine.db, Weigh("a", number))).id for number in range(3)]
        await journal(engine.db)
        async with engine.member(), engine.member():
            for id_ in ids:
                row = await engine.reaches(id_, "SUCCEEDED")
            assert (row["held_by"], row["deliveries"]) == ("database", 1)
            late = await engine.publish(Weigh("a", 2), message_id=ids[2], body="row")
            await engine.is_drained("tasks.depot")
            assert late == ids[2]
        assert sorted(calls) == [("a", 0), ("a", 1), ("a", 2)]
        assert await engine.gates() == 0


async def test_a_task_whose_message_is_not_published_yet_is_left_alone(migrated_url: str) -> None:
    """C21: a relay that is behind has lost nothing."""
    calls = list[Any]()
    app = depot_of_weighing(calls)
    async with bench(app, migrated_url, lost_after=timedelta(milliseconds=1)) as engine:
        await journal(engine.db)
        async with engine.db.transaction():
            id_ = (await submit(engine.db, Weigh("a"))).id
        reaps = Database(migrated_url, pool_size=1)
        await reaps.start()
        assert await ReapStore(reaps, "depot").redrive_lost(0.001, 10, is_ordered=True) == 0
        await journal(engine.db)
        assert await ReapStore(reaps, "depot").redrive_lost(3600, 10, is_ordered=True) == 0, "it is too young"
        assert await ReapStore(reaps, "depot").redrive_lost(0.001, 10, is_ordered=True) == 1
        assert await ReapStore(reaps, "depot").redrive_lost(0.001, 10, is_ordered=True) == 0
        await reaps.aclose()
        row = await engine.row(id_)
        assert (row["state"], row["waiting_for"], row["lane"]) == ("WAITING", "lost", "a")


async def test_a_message_that_does_not_come_again_holds_up_its_key_no_longer_than_that(
    migrated_url: str,
) -> None:
    """C10, C21: its worker died and the broker's copy is gone; sent again, it stands behind its followers."""
    calls = list[Any]()
    app, lost = depot_of_weighing(calls), uuid4()
    async with bench(app, migrated_url, lost_after=timedelta(milliseconds=1)) as engine:
        await engine.db.execute(
            "insert into towpath.task (consumer_group, id, type, kind, source, key, lane, state, held_by, "
            "worker, token, updated_at) "
            "values ('depot', $1, 'parcel.weigh', 'event', 'tasks.depot', 'a', 'a', "
            "'RUNNING', 'broker', gen_random_uuid(), gen_random_uuid(), "
            "clock_timestamp() - interval '1 minute')",
            lost,
        )
        follower = await engine.publish(Weigh("a", 2))
        await engine.publish(Weigh("a", 1), message_id=lost)
        async with engine.member():
            await engine.reaches(follower, "SUCCEEDED")
            await engine.reaches(lost, "SUCCEEDED")
        assert calls == [("a", 2), ("a", 1)]
        told = await engine.db.fetch("select event, from_state, to_state from towpath.task_event")
        assert [tuple(row) for row in told] == [("task.reaped", "RUNNING", "ACCEPTED")]


async def test_what_was_taken_back_says_so_in_its_history(towpath: Run, db: Any, migrated_url: str) -> None:
    """C9, C21: waiting, parked behind another head, in doubt, or driven again: `tasks show` tells why."""
    lost = uuid4()
    running = (
        "insert into towpath.task (consumer_group, id, type, kind, source, key, lane, state, held_by, "
        "worker, token, effect_state, trace) values ('depot', $1, 't', 'event', 's', $2, $2, 'RUNNING', "
        "'database', $3, gen_random_uuid(), $4, '00-trace')"
    )
    head, follower, begun = uuid4(), uuid4(), uuid4()
    await db.execute(running, head, "a", lost, None)
    await db.execute(running, follower, "b", lost, None)
    await db.execute(running, begun, "c", lost, "started")
    await db.execute("insert into towpath.key_gate values ('depot', 's', 'b', gen_random_uuid())")
    async with db.transaction():
        vanished = (await submit(db, Weigh("d"))).id
    await journal(db)
    database = Database(migrated_url, pool_size=1)
    await database.start()
    reaps = ReapStore(database, "depot")
    assert [await reaps.reap_abandoned(10, everywhere=True) for _ in range(2)] == [3, 0]
    assert await reaps.redrive_lost(0.0, 10, is_ordered=True) == 1
    await database.aclose()
    expected = {
        head: ("task.reaped", "RUNNING", "WAITING", "worker_lost", str(lost)),
        follower: ("task.reaped", "RUNNING", "PARKED", "worker_lost", str(lost)),
        begun: ("task.unknown", "RUNNING", "UNKNOWN", "worker_lost", None),
        vanished: ("task.redriven", "ACCEPTED", "WAITING", "message_lost", None),
    }
    names = ("event", "from_state", "to_state", "reason_code", "worker")
    for id_, story in expected.items():
        shown = json.loads((await asyncio.to_thread(towpath, "tasks", "show", str(id_), "--json")).out)
        (line,) = shown[0]["history"]
        assert story == tuple(line[name] for name in names)
        assert line["version"] == shown[0]["version"]
        assert (line["due_at"] is None) == (line["to_state"] in ("PARKED", "UNKNOWN"))


async def finished(db: Any, state: str, *, age: str = "30 days", letter: str | None = None) -> UUID:
    """An old row with a line of history, and perhaps a dead letter."""
    id_ = uuid4()
    await db.execute(
        "insert into towpath.task (consumer_group, id, type, kind, source, state, held_by, created_at, "
        "finished_at, due_at, waiting_for) "
        "select 'depot', $1, 't', 'event', 'tasks.depot', $2, 'database', at.created, "
        "case when $2 in ('SUCCEEDED', 'FAILED', 'DEAD', 'CANCELLED', 'EXPIRED') then at.created end, "
        "case when $2 = 'WAITING' then clock_timestamp() + interval '1h' end, "
        "case when $2 = 'WAITING' then 'retry' end "
        "from (select clock_timestamp() - $3::text::interval as created) at",
        id_,
        state,
        age,
    )
    await db.execute(
        "insert into towpath.task_event (consumer_group, task_id, event) values ('depot', $1, 'x')", id_
    )
    if letter is not None:
        await db.execute(
            "insert into towpath.dead_letter (consumer_group, message_id, stage, state, source, reason_code, "
            "fingerprint) values ('depot', $1, 'handle', $2, 's', 'r', 'f')",
            id_,
            letter,
        )
    return id_


async def test_finished_rows_expire_with_their_history(migrated_url: str) -> None:
    """D4: waiting, dead and unknown ones never by themselves, nor a row whose dead letter is open."""
    app = depot_of_weighing([], retention="7d")
    async with bench(app, migrated_url) as engine:
        db = engine.db
        gone = [await finished(db, state) for state in ("SUCCEEDED", "FAILED", "CANCELLED", "EXPIRED")]
        gone.append(await finished(db, "SUCCEEDED", letter="replayed"))
        kept = [await finished(db, state) for state in ("DEAD", "WAITING", "PARKED", "UNKNOWN")]
        kept.append(await finished(db, "SUCCEEDED", age="6 days"))
        kept.append(await finished(db, "SUCCEEDED", letter="open"))
        await db.execute(
            "insert into towpath.key_gate (consumer_group, source, lane, head) "
            "values ('depot', 's', 'l', $1)",
            kept[1],
        )
        async with engine.member():
            await until(lambda: _missing(engine, gone))
        left = {row["id"] for row in await db.fetch("select id from towpath.task")}
        history = {row["task_id"] for row in await db.fetch("select task_id from towpath.task_event")}
        assert left == set(kept) == history


async def _missing(engine: Any, ids: list[UUID]) -> bool:
    return bool(await engine.db.fetchval("select count(*) from towpath.task where id = any($1)", ids) == 0)


async def test_expiry_goes_by_batches_and_by_group(migrated_url: str, db: Any) -> None:
    for _ in range(5):
        await finished(db, "SUCCEEDED")
    await db.execute(
        "update towpath.task set consumer_group = 'other' where id = (select id from towpath.task limit 1)"
    )
    database = Database(migrated_url, pool_size=1)
    await database.start()
    reaps = ReapStore(database, "depot")
    assert [await reaps.expire_finished(3600, 3) for _ in range(3)] == [3, 1, 0]
    await database.aclose()
    assert await db.fetchval("select count(*) from towpath.task") == 1


async def test_dead_workers_are_forgotten_after_a_day_unless_a_row_points_to_them(
    migrated_url: str, db: Any
) -> None:
    old, used, young = uuid4(), uuid4(), uuid4()
    for id_, age in ((old, "2 days"), (used, "2 days"), (young, "1 hour")):
        await db.execute(
            "insert into towpath.worker (id, consumer_group, host, lease_until) "
            f"values ($1, 'depot', 'h', clock_timestamp() - interval '{age}')",
            id_,
        )
    await db.execute(
        "insert into towpath.task (consumer_group, id, type, kind, source, state, held_by, worker, token) "
        "values ('depot', gen_random_uuid(), 't', 'event', 's', 'RUNNING', 'broker', $1, gen_random_uuid())",
        used,
    )
    database = Database(migrated_url, pool_size=1)
    await database.start()
    await ReapStore(database, "depot").forget_workers()
    await database.aclose()
    assert {row["id"] for row in await db.fetch("select id from towpath.worker")} == {used, young}


@pytest.mark.parametrize("ordering", ["key", "none"])
async def test_submitted_tasks_run_from_their_message(migrated_url: str, ordering: Any) -> None:
    calls = list[Any]()
    app = depot_of_weighing(calls, ordering=ordering)
    async with running(app, migrated_url) as engine:
        ids = [await engine.submit(Weigh("a", number)) for number in range(5)]
        rows = [await engine.reaches(id_, "SUCCEEDED") for id_ in ids]
        assert {row["lane"] for row in rows} == {"a" if ordering == "key" else None}
        assert sorted(calls) == [("a", number) for number in range(5)]
