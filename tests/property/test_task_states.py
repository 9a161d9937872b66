"""Tasks move along the one table of transitions, whatever happens; impossible rows are refused."""

import asyncio
from datetime import timedelta
from typing import Any

import asyncpg
import pytest

from tests.integration.engine import Posted, Weigh, bench, depot
from tests.property.histories import world_of
from towpath.backoff import RetryPolicy
from towpath.context import Call, Tx
from towpath.outcomes import Dead, Reject, Snooze
from towpath.states import TRANSITIONS, TaskState, is_allowed

WATCH = """
create table public.move (n bigserial, id uuid, old text, new text, old_version int, new_version int);
create function public.note_move() returns trigger language plpgsql security definer as $$
begin
  if tg_op = 'INSERT' then
    insert into public.move (id, new, new_version) values (new.id, new.state, new.version);
  elsif old.state <> new.state or old.version <> new.version then
    insert into public.move (id, old, new, old_version, new_version)
      values (new.id, old.state, new.state, old.version, new.version);
  end if;
  return null;
end $$;
create trigger note_move after insert or update on towpath.task
  for each row execute function public.note_move();
"""


async def moves(db: Any) -> set[tuple[TaskState | None, TaskState]]:
    """The kinds of moves that were seen. Each must be legal and raise the version by one."""
    rows = await db.fetch("select * from public.move order by n")
    seen = set()
    for row in rows:
        old = None if row["old"] is None else TaskState(row["old"])
        new = TaskState(row["new"])
        assert old is new or is_allowed(old, new), f"{row['id']} went from {old} to {new}"
        assert row["new_version"] == (row["old_version"] or 0) + 1, f"{row['id']} skipped a version"
        seen.add((old, new))
    return seen


async def legal_history(db: Any) -> int:
    """Lines of history, all of which must tell of legal moves."""
    rows = await db.fetch("select event, from_state, to_state from towpath.task_event")
    for row in rows:
        old = None if row["from_state"] is None else TaskState(row["from_state"])
        assert is_allowed(old, TaskState(row["to_state"])), dict(row)
    return len(rows)


@pytest.mark.timeout(300)
async def test_every_move_of_a_random_history_is_legal_and_leaves_no_gap(
    db: Any, migrated_url: str, scale: float
) -> None:
    """C7: crashes, freezes, rebalances and zombies included."""
    await db.execute(WATCH)
    async with world_of(migrated_url) as world:
        async for _, found in world.run(range(10_000, 10_000 + max(1, round(8 * scale)))):
            assert found == {}
    seen = await moves(db)
    assert await legal_history(db) > 0
    states = TaskState
    assert {
        (None, states.RUNNING),
        (None, states.PARKED),
        (states.RUNNING, states.SUCCEEDED),
        (states.RUNNING, states.WAITING),
        (states.RUNNING, states.UNKNOWN),
        (states.WAITING, states.RUNNING),
        (states.PARKED, states.WAITING),
    } <= seen


async def test_every_way_a_task_can_end_is_a_legal_one(migrated_url: str) -> None:
    """C7, D1."""
    app = depot(retry=RetryPolicy(attempts=2, base="5ms", cap="5ms"))
    snoozed, hangs = set[str](), asyncio.Event()

    @app.transactional()
    async def sort(parcel: Posted, tx: Tx) -> Reject | None:
        if parcel.parcel == "reject":
            return Reject("no")
        if parcel.parcel == "die":
            raise Dead("hopeless")
        if parcel.parcel == "fail":
            raise RuntimeError("no")
        if parcel.parcel == "snooze" and not snoozed:
            snoozed.add("once")
            raise Snooze("1ms")
        return None

    @app.idempotent()
    async def weigh(parcel: Weigh, call: Call) -> str:
        if parcel.parcel == "hang":
            await hangs.wait()
        return "done"

    async with bench(
        app, migrated_url, beat_every=timedelta(milliseconds=50), drain_timeout=timedelta(milliseconds=50)
    ) as engine:
        await engine.db.execute(WATCH)
        past = await engine.db.fetchval("select clock_timestamp() - interval '1 second'")
        async with engine.member():
            for parcel, state in {
                "reject": "FAILED",
                "die": "DEAD",
                "fail": "DEAD",
                "snooze": "SUCCEEDED",
                "plain": "SUCCEEDED",
            }.items():
                ids = [await engine.publish(Posted(parcel, number)) for number in range(3)]
                for id_ in ids:
                    await engine.reaches(id_, state)
            await engine.publish_raw("parcels", b"?")
            await engine.reaches(await engine.submit(Weigh("late"), deadline_at=past), "EXPIRED")
            await engine.reaches(await engine.submit(Weigh("done")), "SUCCEEDED")
            cancelled = await engine.submit(Weigh("hang"))
            await engine.reaches(cancelled, "RUNNING")
            await engine.db.execute("select towpath.cancel_task('depot', $1)", cancelled)
            await engine.reaches(cancelled, "CANCELLED")
            await engine.is_drained("parcels", "tasks.depot")
            handed_back = await engine.submit(Weigh("hang", 2))
            await engine.reaches(handed_back, "RUNNING")
        seen = await moves(engine.db)
        assert await legal_history(engine.db) > 5
    running = {new for old, new in seen if old is TaskState.RUNNING}
    assert running >= {
        TaskState.SUCCEEDED,
        TaskState.FAILED,
        TaskState.DEAD,
        TaskState.EXPIRED,
        TaskState.CANCELLED,
        TaskState.WAITING,
        TaskState.ACCEPTED,
    }
    assert (None, TaskState.DEAD) in seen, "undecodable"
    assert (TaskState.ACCEPTED, TaskState.RUNNING) in seen


ROW = {
    "consumer_group": "'g'",
    "id": "gen_random_uuid()",
    "type": "'t'",
    "kind": "'event'",
    "source": "'s'",
    "state": "'ACCEPTED'",
    "held_by": "'broker'",
}
NOW, ID = "clock_timestamp()", "gen_random_uuid()"
RUNNING = {"state": "'RUNNING'", "worker": ID, "token": ID}
WAITING = {"state": "'WAITING'", "held_by": "'database'", "due_at": NOW, "waiting_for": "'retry'"}


async def insert(db: Any, **columns: str) -> None:
    values = ROW | columns
    await db.execute(f"insert into towpath.task ({', '.join(values)}) values ({', '.join(values.values())})")


@pytest.mark.parametrize(
    "columns",
    [
        {"state": "'DONE'"},
        {"state": "'RUNNING'"},
        {"state": "'RUNNING'", "worker": ID},
        {"state": "'RUNNING'", "token": ID},
        {"token": ID, "worker": ID},
        {**RUNNING, "finished_at": NOW},
        {**RUNNING, "due_at": NOW, "waiting_for": "'retry'"},
        {"state": "'WAITING'", "held_by": "'database'"},
        {**WAITING, "due_at": "null"},
        {**WAITING, "waiting_for": "null"},
        {**WAITING, "waiting_for": "'nothing'"},
        {**WAITING, "held_by": "'broker'"},
        {"state": "'PARKED'"},
        {"state": "'PARKED'", "held_by": "'database'", "due_at": NOW, "waiting_for": "'retry'"},
        {"state": "'SUCCEEDED'"},
        {"state": "'DEAD'", "finished_at": "null"},
        {"finished_at": NOW},
        {"kind": "'copy'"},
        {"held_by": "'nobody'"},
        {"consumer_group": "''"},
        {"consumer_group": "repeat('g', 101)"},
        {"owner": "repeat('o', 201)"},
        {"effect_state": "'perhaps'"},
    ],
)
async def test_the_database_refuses_an_impossible_row(db: Any, columns: dict[str, str]) -> None:
    """C7: whoever writes it."""
    with pytest.raises(asyncpg.CheckViolationError):
        await insert(db, **columns)


async def test_the_database_holds_every_possible_state(db: Any) -> None:
    finals = {state for state in TaskState if state.is_final}
    for state in TaskState:
        columns = {"state": f"'{state}'"}
        if state is TaskState.RUNNING:
            columns = RUNNING
        elif state is TaskState.WAITING:
            columns = WAITING
        elif state is TaskState.PARKED:
            columns["held_by"] = "'database'"
        if state in finals:
            columns["finished_at"] = NOW
        await insert(db, **columns)
    assert await db.fetchval("select count(distinct state) from towpath.task") == len(TaskState)


async def test_a_lane_runs_one_message_at_a_time_by_an_index(db: Any) -> None:
    """C10: the last line of defence."""
    await insert(db, lane="'a'", **RUNNING)
    await insert(db, lane="'b'", **RUNNING)
    await insert(db, lane="'a'", source="'other'", **RUNNING)
    await insert(db, lane="null", **RUNNING)
    await insert(db, lane="null", **RUNNING)
    with pytest.raises(asyncpg.UniqueViolationError):
        await insert(db, lane="'a'", **RUNNING)


def test_every_state_can_be_reached_and_left_or_is_final() -> None:
    reached = set[TaskState]()
    frontier: set[TaskState] = set(TRANSITIONS[None])
    while frontier:
        reached |= frontier
        frontier = {new for old in frontier for new in TRANSITIONS[old]} - reached
    assert reached == set(TaskState)
    assert {state for state in TaskState if not TRANSITIONS[state]} == {
        TaskState.CANCELLED,
        TaskState.EXPIRED,
    }
