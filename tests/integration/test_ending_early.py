"""Work that does not run to its own end: timeouts, deadlines, cancellation, shutdown, lost leases."""

import asyncio
import json
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

import pytest

from tests.integration.engine import EFFECTS, Note, Posted, Weigh, bench, depot, effects, running, until
from tests.integration.test_effects import write
from towpath.backoff import RetryPolicy
from towpath.context import Call, Tx
from towpath.outcomes import Retry
from towpath.store.workers import WorkerStore

HASTY = RetryPolicy(attempts=2, base="1ms", cap="10ms")
SHORT = {"beat_every": timedelta(milliseconds=50)}
SLOW = {"lease": timedelta(seconds=60), "beat_every": timedelta(seconds=20)}


async def cancel(engine: Any, id_: Any) -> str:
    state: str = await engine.db.fetchval("select towpath.cancel_task('depot', $1, 'ann')", id_)
    return state


@pytest.mark.parametrize("effect", ["transactional", "idempotent"])
async def test_a_handler_that_hangs_is_stopped_by_its_timeout(migrated_url: str, effect: str) -> None:
    """It spends an attempt, and what it wrote is rolled back."""
    app = depot(retry=HASTY)

    if effect == "transactional":

        @app.transactional(timeout="50ms")
        async def sort(parcel: Posted, tx: Tx) -> None:
            await write(tx, parcel)
            await asyncio.sleep(60)
    else:

        @app.idempotent(timeout="50ms")
        async def sort_too(parcel: Posted, call: Call) -> None:
            await asyncio.sleep(60)

    async with running(app, migrated_url) as engine:
        await engine.db.execute(EFFECTS)
        row = await engine.reaches(await engine.publish(Posted("a")), "DEAD")
        assert (row["reason_code"], row["attempt"]) == ("handler_timeout", 2)
        assert "was stopped after 0.05 s" in row["error_message"]
        assert await effects(engine) == []


async def test_a_timeout_of_what_the_handler_calls_is_its_own(migrated_url: str) -> None:
    app = depot(retry=HASTY)

    @app.idempotent(timeout="1m")
    async def sort(parcel: Posted) -> None:
        async with asyncio.timeout(0.01):
            await asyncio.sleep(60)

    async with running(app, migrated_url) as engine:
        row = await engine.reaches(await engine.publish(Posted("a")), "DEAD")
        assert (row["reason_code"], row["error_class"]) == ("timeout", "TimeoutError")


async def overtaken(engine: Any, calls: Sequence[object]) -> tuple[datetime, Any]:
    """Its deadline, and the row of a task that expired after it began; a busy machine has longer to begin."""
    for seconds in (2, 30):
        at = await deadline(engine, seconds)
        row = await engine.reaches(await engine.submit(Weigh("a"), deadline_at=at), "EXPIRED")
        if calls:
            break
    return at, row


async def deadline(engine: Any, seconds: float) -> Any:
    return await engine.db.fetchval("select clock_timestamp() + make_interval(secs => $1)", seconds)


async def test_a_task_whose_deadline_has_passed_expires_without_starting(migrated_url: str) -> None:
    """C12."""
    app, calls = depot(), list[int]()

    @app.transactional()
    async def weigh(parcel: Weigh) -> None:
        calls.append(1)

    async with running(app, migrated_url) as engine:
        id_ = await engine.submit(Weigh("a"), deadline_at=await deadline(engine, -1))
        row = await engine.reaches(id_, "EXPIRED")
        (event,) = await engine.events(id_)
        assert (row["reason_code"], row["attempt"], calls) == ("deadline_passed", 0, [])
        assert (event["event"], event["to_state"]) == ("task.expired", "EXPIRED")
        assert await engine.letters() == []
        await engine.is_drained("tasks.depot")


async def test_a_handler_is_stopped_at_its_tasks_deadline(migrated_url: str) -> None:
    """C12: it beats attempts, age and the handler's own timeout."""
    app, calls = depot(), list[int]()

    @app.transactional()
    async def weigh(parcel: Weigh, tx: Tx) -> None:
        await write(tx, Posted(parcel.parcel))
        calls.append(1)
        await asyncio.sleep(600)

    async with running(app, migrated_url) as engine:
        await engine.db.execute(EFFECTS)
        at, row = await overtaken(engine, calls)
        assert row["finished_at"] >= at - timedelta(milliseconds=5)
        assert "was stopped at the task's deadline" in row["error_message"]
        assert await effects(engine) == []


async def test_a_task_that_waits_for_a_retry_expires_at_its_deadline(migrated_url: str) -> None:
    """C12: not an hour later."""
    app, calls = depot(retry=RetryPolicy(attempts=9, base="1h", cap="1h")), list[int]()

    @app.transactional()
    async def weigh(parcel: Weigh) -> None:
        calls.append(1)
        raise RuntimeError("no")

    async with running(app, migrated_url) as engine:
        at, row = await overtaken(engine, calls)
        assert row["finished_at"] >= at
        assert row["attempt"] == 1


async def test_time_in_the_queue_of_a_handler_counts_towards_the_deadline(migrated_url: str) -> None:
    """C12."""
    app, go, calls = depot(), asyncio.Event(), list[str]()

    @app.idempotent(concurrency=1)
    async def weigh(parcel: Weigh) -> None:
        calls.append(parcel.parcel)
        await go.wait()

    async with running(app, migrated_url) as engine:
        first = await engine.submit(Weigh("a"))
        await until(lambda: calls == ["a"])
        second = await engine.submit(Weigh("b"), deadline_at=await deadline(engine, 0.2))
        await asyncio.sleep(0.25)
        go.set()
        await engine.reaches(second, "EXPIRED")
        await engine.reaches(first, "SUCCEEDED")
        assert calls == ["a"]


async def test_cancellation_reaches_a_running_handler_with_the_next_heartbeat(migrated_url: str) -> None:
    """C15."""
    app, cancelled, started = depot(), list[str](), asyncio.Event()

    @app.transactional()
    async def weigh(parcel: Weigh, tx: Tx) -> None:
        await write(tx, Posted(parcel.parcel))
        started.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(parcel.parcel)
            raise

    async with running(app, migrated_url, beat_every=timedelta(milliseconds=50)) as engine:
        await engine.db.execute(EFFECTS)
        id_ = await engine.submit(Weigh("a"))
        await started.wait()
        assert await cancel(engine, id_) == "RUNNING"
        row = await engine.reaches(id_, "CANCELLED")
        events = await engine.events(id_)
        assert (row["reason_code"], row["attempt"], cancelled) == ("cancelled", 0, ["a"])
        assert events[-1]["event"] == "task.cancelled"
        assert await effects(engine) == []
        assert await engine.letters() == []
        await engine.is_drained("tasks.depot")
        after = await engine.submit(Weigh("b"))
        await engine.reaches(after, "RUNNING")
        await cancel(engine, after)
        await engine.reaches(after, "CANCELLED")


async def test_a_handler_that_swallows_its_cancellation_ends_as_it_says(migrated_url: str) -> None:
    """C15: what it did counts; the worker goes on."""
    app, started = depot(), asyncio.Event()

    @app.idempotent()
    async def weigh(parcel: Weigh) -> str | None:
        if parcel.number:
            return None
        started.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            return "done anyway"
        return None

    async with running(app, migrated_url, beat_every=timedelta(milliseconds=50)) as engine:
        id_ = await engine.submit(Weigh("a"))
        await started.wait()
        await cancel(engine, id_)
        row = await engine.reaches(id_, "SUCCEEDED")
        assert json.loads(row["result"]) == "done anyway"
        await engine.reaches(await engine.submit(Weigh("a", 1)), "SUCCEEDED")


async def test_a_task_cancelled_while_it_waits_for_its_handlers_slot_ends(migrated_url: str) -> None:
    """C15."""
    app, go, calls = depot(), asyncio.Event(), list[str]()

    @app.idempotent(concurrency=1)
    async def weigh(parcel: Weigh) -> None:
        calls.append(parcel.parcel)
        await go.wait()

    async with running(app, migrated_url, beat_every=timedelta(milliseconds=50)) as engine:
        first = await engine.submit(Weigh("a"))
        await until(lambda: calls == ["a"])
        second = await engine.submit(Weigh("b"))
        assert await cancel(engine, second) == "CANCELLED"
        go.set()
        await engine.reaches(first, "SUCCEEDED")
        await engine.is_drained("tasks.depot")
        assert calls == ["a"]


async def test_a_task_to_be_cancelled_that_fails_meanwhile_does_not_wait_out_its_delay(
    migrated_url: str,
) -> None:
    """C15: it comes at once, to end."""
    app, started, go = depot(retry=RetryPolicy(base="1h", cap="1h")), asyncio.Event(), asyncio.Event()

    @app.idempotent()
    async def weigh(parcel: Weigh) -> None:
        started.set()
        await go.wait()
        raise Retry("later")

    async with running(
        app, migrated_url, lease=timedelta(seconds=60), beat_every=timedelta(seconds=20)
    ) as engine:
        id_ = await engine.submit(Weigh("a"))
        await started.wait()
        await cancel(engine, id_)
        go.set()
        row = await engine.reaches(id_, "CANCELLED")
        assert row["attempt"] == 1


@pytest.mark.parametrize("which", [0, 1, 2])
async def test_cancelling_one_of_a_waiting_lane_lets_the_others_run_in_order(
    migrated_url: str, which: int
) -> None:
    """C15, C10: the head, or a follower."""
    app, is_mended, done = depot(retry=RetryPolicy(base="1h", cap="1h")), asyncio.Event(), list[int]()

    @app.transactional()
    async def weigh(parcel: Weigh) -> None:
        if parcel.number == 0 and not is_mended.is_set():
            raise RuntimeError("no")
        done.append(parcel.number)

    async with running(app, migrated_url) as engine:
        ids = [await engine.submit(Weigh("a", number)) for number in range(3)]
        await engine.reaches(ids[0], "WAITING")
        for id_ in ids[1:]:
            await engine.reaches(id_, "PARKED")
        assert await cancel(engine, ids[which]) == "CANCELLED"
        is_mended.set()
        await engine.db.execute("update towpath.task set due_at = clock_timestamp() where state = 'WAITING'")
        for number, id_ in enumerate(ids):
            await engine.reaches(id_, "CANCELLED" if number == which else "SUCCEEDED")
        assert done == [number for number in range(3) if number != which]
        assert await engine.gates() == 0


async def test_shutdown_lets_running_work_end_and_takes_nothing_new(migrated_url: str) -> None:
    """S4."""
    app, started, go, done = depot(), asyncio.Event(), asyncio.Event(), list[int]()

    @app.transactional()
    async def sort(parcel: Posted, tx: Tx) -> None:
        started.set()
        await go.wait()
        done.append(parcel.number)

    async with bench(app, migrated_url, concurrency=1) as engine:
        async with engine.member() as member:
            ids = [await engine.publish(Posted(f"k{number}", number)) for number in range(5)]
            await started.wait()
            member.told.set()
            await asyncio.sleep(0.1)
            assert not member.task.done()
            go.set()
            await member.stop()
        states = [await engine.state(id_) for id_ in ids]
        assert sorted(map(str, states)) == ["None"] * 4 + ["SUCCEEDED"]
        assert len(done) == 1
        assert engine.unacknowledged() == 4
        async with engine.member():
            await engine.is_drained()
        assert sorted(done) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("stubborn", [False, True])
async def test_a_handler_that_exceeds_the_drain_is_handed_back_unspent(
    migrated_url: str, stubborn: bool
) -> None:
    """S4, C15: also one that ignores its cancellation; it does not hang the shutdown."""
    app, calls, cancellations, started = depot(), list[int](), 0, asyncio.Event()

    @app.transactional()
    async def sort(parcel: Posted, tx: Tx) -> None:
        nonlocal cancellations
        calls.append(tx.attempt.attempt)
        if len(calls) == 2 or not stubborn:
            await write(tx, parcel)
        started.set()
        while len(calls) == 1:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                cancellations += 1
                if not stubborn or cancellations > 2:
                    raise

    async with bench(app, migrated_url, drain_timeout=timedelta(milliseconds=50)) as engine:
        await engine.db.execute(EFFECTS)
        async with engine.member() as member:
            id_ = await engine.publish(Posted("a"))
            await started.wait()
            await member.stop()
        row = await engine.row(id_)
        assert (row["state"], row["attempt"], row["deliveries"]) == ("ACCEPTED", 0, 0)
        assert await engine.db.fetchval("select count(*) from towpath.worker") == 0
        async with engine.member():
            await engine.reaches(id_, "SUCCEEDED")
            await engine.is_drained()
        assert calls == [1, 1]
        assert await effects(engine) == [("a", 0)]


async def test_handed_back_work_of_the_database_is_due_at_once(migrated_url: str) -> None:
    """S4."""
    app, calls = depot(retry=RetryPolicy(attempts=9, base="1ms", cap="1ms")), list[int]()

    @app.idempotent()
    async def sort(parcel: Posted, call: Call) -> None:
        calls.append(call.attempt.attempt)
        if len(calls) == 1:
            raise RuntimeError("no")
        if len(calls) == 2:
            await asyncio.sleep(60)

    async with bench(app, migrated_url, drain_timeout=timedelta(milliseconds=50)) as engine:
        async with engine.member() as member:
            id_ = await engine.publish(Posted("a"))
            await until(lambda: len(calls) == 2)
            await member.stop()
        row = await engine.row(id_)
        assert (row["state"], row["attempt"], row["deliveries"]) == ("WAITING", 1, 0)
        async with engine.member():
            await engine.reaches(id_, "SUCCEEDED")
        assert calls == [1, 2, 2]


async def test_a_task_that_runs_longer_than_two_leases_runs_once(migrated_url: str) -> None:
    """C8: a lease is lost only by missed heartbeats."""
    app, calls, go = depot(), list[int](), asyncio.Event()

    @app.idempotent()
    async def sort(parcel: Posted, call: Call) -> None:
        calls.append(1)
        await call.progress(0.5)
        await go.wait()

    lease = timedelta(minutes=10)
    async with bench(app, migrated_url, lease=lease) as engine, engine.member(), engine.member():
        id_ = await engine.publish(Posted("a"))
        await until(lambda: _has_progress(engine, id_))
        for ahead in range(1, 6):  # half a lease goes by, five times
            await engine.db.execute(
                "create or replace function towpath.clock() returns timestamptz language sql volatile as"
                f" $$ select clock_timestamp() + interval '{ahead * 5} minutes' $$"
            )
            await until(lambda: _are_renewed(engine, lease))
        go.set()
        row = await engine.reaches(id_, "SUCCEEDED")
        assert row["finished_at"] - row["started_at"] > 2 * lease
        assert (calls, row["deliveries"]) == ([1], 1)
        assert json.loads(row["progress"])["fraction"] == 0.5
        assert await engine.db.fetchval("select count(*) from towpath.worker") == 2


async def _are_renewed(engine: Any, lease: timedelta) -> bool:
    """Whether both members have a lease as of this minute."""
    renewed = "select count(*) = 2 from towpath.worker where lease_until > towpath.clock() + $1::interval"
    return bool(await engine.db.fetchval(renewed, lease - timedelta(minutes=1)))


async def test_thousands_of_running_tasks_cost_one_write_a_beat(
    migrated_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C8: the lease is the worker's; counted in transactions that wrote anything."""
    app, go, now, beats = depot(ordering="none"), asyncio.Event(), 0, 0
    beat = WorkerStore.beat

    async def counted(self: WorkerStore) -> None:
        nonlocal beats
        await beat(self)
        beats += 1

    monkeypatch.setattr(WorkerStore, "beat", counted)

    @app.idempotent()
    async def read(note: Note) -> None:
        nonlocal now
        now += 1
        await go.wait()

    limits = {"concurrency": 5000, "max_in_flight": 6000, "reap_every": timedelta(minutes=10)}
    async with bench(app, migrated_url, lease=timedelta(seconds=60), **limits) as engine:
        for number in range(5000):
            await engine.publish(Note(number))
        async with engine.member():
            await until(lambda: now == 5000, seconds=90)
            written = (
                "select pg_snapshot_xmax(pg_current_snapshot())::text::bigint, max(xmin::text::bigint)"
                " from towpath.task"
            )
            first_beat, before = beats, await engine.db.fetchrow(written)
            await until(lambda: beats == first_beat + 15)
            after = await engine.db.fetchrow(written)
            assert after[1] == before[1], "no task was touched"
            assert after[0] - before[0] < 10 * 15, "others write, too"
            go.set()
            await engine.is_drained("notes")


async def _has_progress(engine: Any, id_: Any) -> bool:
    return (await engine.row(id_) or {"progress": None})["progress"] is not None


LAPSE = "update towpath.worker set lease_until = clock_timestamp() - interval '1 second'"


@pytest.mark.parametrize("effect", ["transactional", "idempotent"])
async def test_a_worker_that_lapsed_cancels_its_work_and_starts_again_under_a_new_id(
    migrated_url: str, effect: str
) -> None:
    """C8: nothing is doubled, nothing stays behind."""
    app, calls, cancelled = depot(), list[int](), list[int]()

    async def act() -> None:
        calls.append(1)
        if len(calls) == 1:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                cancelled.append(1)
                raise

    if effect == "transactional":

        @app.transactional()
        async def sort(parcel: Posted, tx: Tx) -> None:
            await write(tx, parcel)
            await act()
    else:

        @app.idempotent()
        async def sort_too(parcel: Posted, call: Call) -> None:
            await act()
            async with call.transaction() as tx:
                await write(tx, parcel)

    async with running(app, migrated_url, **SHORT) as engine:
        await engine.db.execute(EFFECTS)
        (first,) = await engine.db.fetch("select id from towpath.worker")
        id_ = await engine.publish(Posted("a"))
        await until(lambda: calls == [1])
        await engine.db.execute(LAPSE)
        row = await engine.reaches(id_, "SUCCEEDED")
        await engine.is_drained()
        (second,) = await engine.db.fetch(
            "select id from towpath.worker where lease_until > clock_timestamp()"
        )
        assert first["id"] != second["id"]
        assert (calls, cancelled, row["attempt"]) == ([1, 1], [1], 1)
        assert await effects(engine) == [("a", 0)]


async def test_work_that_finished_before_anybody_took_it_over_counts(migrated_url: str) -> None:
    """C8: settling asks for the token, not for the time."""
    app, started, go = depot(), asyncio.Event(), asyncio.Event()

    @app.transactional()
    async def sort(parcel: Posted, tx: Tx) -> None:
        started.set()
        await go.wait()
        await write(tx, parcel)

    async with running(
        app, migrated_url, lease=timedelta(seconds=60), beat_every=timedelta(seconds=20)
    ) as engine:
        await engine.db.execute(EFFECTS)
        id_ = await engine.publish(Posted("a"))
        await started.wait()
        await engine.db.execute(LAPSE)
        go.set()
        row = await engine.reaches(id_, "SUCCEEDED")
        assert (row["deliveries"], await effects(engine)) == (1, [("a", 0)])


async def test_rows_of_a_dead_worker_are_taken_back_by_any_member(migrated_url: str) -> None:
    """R4-like: what the database held waits again, in its order."""
    app, calls = depot(), list[int]()

    @app.idempotent()
    async def sort(parcel: Posted, call: Call) -> None:
        calls.append(parcel.number)

    async with bench(app, migrated_url) as engine:
        from uuid import uuid4

        from tests.integration.test_key_order import gate, lane_row

        head = await lane_row(engine, "RUNNING", 1, worker=uuid4(), token=uuid4(), deliveries=1)
        follower = await lane_row(engine, "PARKED", 2)
        await gate(engine, head)
        async with engine.member():
            row = await engine.reaches(head, "SUCCEEDED")
            await engine.reaches(follower, "SUCCEEDED")
        assert calls == [1, 2]
        assert row["deliveries"] == 2, "the lost start counts: it may have killed its process"


async def test_a_message_without_order_is_cancelled_too(migrated_url: str) -> None:
    """C15: events are tasks as well."""
    app = depot()

    @app.idempotent()
    async def read(note: Note) -> None:
        await asyncio.sleep(60)

    async with running(app, migrated_url, beat_every=timedelta(milliseconds=50)) as engine:
        id_ = await engine.publish(Note())
        await engine.reaches(id_, "RUNNING")
        await cancel(engine, id_)
        await engine.reaches(id_, "CANCELLED")
        await engine.is_drained("notes")
