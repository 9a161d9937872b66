"""Every statement that moves a task, tried on every state: it moves what it may, and changes nothing else."""

import json
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.resources import files
from itertools import product
from typing import Any, Final
from uuid import UUID, uuid4

import pytest

from towpath.failures import Failure
from towpath.states import FINAL, TaskState, WaitingFor, is_allowed
from towpath.store.database import Database
from towpath.store.doubts import DoubtStore
from towpath.store.settles import SettleStore
from towpath.store.statements import load
from towpath.store.work import Work

S = TaskState
G: Final = "depot"
WORKER: Final = UUID(int=1)
VERSION: Final = frozenset({"version"})
ALWAYS: Final = frozenset[str]()


@dataclass(frozen=True)
class Known:
    """What the mover believes of the row."""

    id: UUID
    token: UUID
    version: int


@dataclass(frozen=True)
class Move:
    """A statement, and from which states it may move a row to which."""

    statement: str
    arguments: Callable[[Known], tuple[object, ...]]
    allowed: Mapping[TaskState, frozenset[str]]
    """What must be true for a row in this state to move: its `token` or `version` is right, its worker is
    `dead`, no effect began (`calm`), one did (`begun`)."""
    to: TaskState | None
    """None: it stays in its state, and its version stays too."""
    row: Mapping[str, str] = field(default_factory=dict)
    """SQL for columns, where a row of this state may have them."""
    versions: int = 1


def running(*needs: str) -> Mapping[TaskState, frozenset[str]]:
    return {S.RUNNING: frozenset(needs)}


LATER: Final = datetime(2200, 1, 1, tzinfo=UTC)
FAILURE: Final = ("late", "Late", "too late", "late")
BODY: Final = (b"{}", "application/json", "[]", None)
BROKER, FUTURE = {"held_by": "'broker'"}, {"due_at": "towpath.clock() + interval '1 hour'"}
LOST: Final = {S.ACCEPTED: ALWAYS, S.RUNNING: frozenset({"dead", "calm"})}


def columns(known: Known) -> tuple[object, ...]:
    return G, [known.id], ["t"], ["event"], ["s"], [None], [None], [1]


def end(state: TaskState) -> Move:
    return Move(
        "work.end", lambda k: (G, k.id, k.token, state, 1, None, None, *FAILURE), running("token"), state
    )


def settle_one(state: TaskState) -> Move:
    arguments = state, "s", None, None, None, None
    return Move("work.settle_one", lambda k: (G, k.id, k.token, *arguments), running("token"), state)


def wait(state: TaskState) -> Move:
    delay = 0.0 if state is S.WAITING else None
    arguments = delay, "retry", 1, None, *BODY, 1, *FAILURE, 0.0
    return Move("work.wait", lambda k: (G, k.id, k.token, *arguments), running("token"), state)


def resolve(state: TaskState) -> Move:
    wanted = S.WAITING if state is S.PARKED else state
    arguments = wanted, state is not S.PARKED, None, "asked"
    return Move("doubts.resolve", lambda k: (G, k.id, k.version, *arguments), {S.UNKNOWN: VERSION}, state)


def hand_back(holder: str, state: TaskState) -> Move:
    needs = running("token", "calm")
    return Move("work.hand_back", lambda k: (G, [k.id], [k.token]), needs, state, {"held_by": f"'{holder}'"})


def going(statement: str, *arguments: object) -> Move:
    """Something written beside a RUNNING row."""
    return Move(statement, lambda k: (G, k.id, k.token, *arguments), running("token"), None, versions=0)


def back(is_head: bool) -> Mapping[str, Move]:
    state = S.WAITING if is_head else S.PARKED

    def heads(known: Known) -> list[UUID]:
        return [known.id] if is_head else []

    dead = {S.RUNNING: frozenset({"token", "dead", "calm"})}
    finished = {S.SUCCEEDED: ALWAYS, S.FAILED: ALWAYS}
    return {
        f"reap {state}": Move("work.reap", lambda k: (G, k.id, is_head, k.token, None), dead, state),
        f"redrive {state}": Move(
            "work.redrive", lambda k: (G, k.id, is_head, None), {S.ACCEPTED: ALWAYS}, state
        ),
        f"replay {state}": Move(
            "operator.revive_tasks", lambda k: (G, [k.id], heads(k)), {S.DEAD: ALWAYS}, state
        ),
        f"rerun {state}": Move(
            "repairs.rerun_tasks", lambda k: (G, [k.id], heads(k), [], [], [], [], []), finished, state
        ),
        f"admit {state}": Move(
            "work.admit_delayed",
            lambda k: (G, k.id, "a", is_head),
            {S.WAITING: ALWAYS},
            state,
            {"waiting_for": "'delay'"},
        ),
    }


MOVES: Final[Mapping[str, Move]] = {
    "claim event": Move(
        "work.claim_events", lambda k: (*columns(k), uuid4(), uuid4(), True, True), LOST, S.RUNNING, BROKER
    ),
    "claim event, no abandoned": Move(
        "work.claim_events",
        lambda k: (*columns(k), uuid4(), uuid4(), False, True),
        {S.ACCEPTED: ALWAYS},
        S.RUNNING,
        BROKER,
    ),
    "claim task": Move(
        "work.claim_tasks", lambda k: (G, [k.id], uuid4(), uuid4(), False, True), LOST, S.RUNNING, BROKER
    ),
    "claim what the database holds": Move(
        "work.claim_events", lambda k: (*columns(k), uuid4(), uuid4(), True, True), {}, None
    ),
    "park event": Move(
        "work.park_events", lambda k: (*columns(k), *([each] for each in BODY)), LOST, S.PARKED, BROKER
    ),
    "park task": Move("work.park_tasks", lambda k: (G, [k.id], ["a"], [1]), LOST, S.PARKED, BROKER),
    "start": Move("work.start_due", lambda k: (G, [k.id], uuid4(), uuid4()), {S.WAITING: ALWAYS}, S.RUNNING),
    "start early": Move("work.start_due", lambda k: (G, [k.id], uuid4(), uuid4()), {}, None, FUTURE),
    "promote": Move("work.promote", lambda k: (G, [k.id]), {S.PARKED: ALWAYS}, S.WAITING),
    "succeed": Move("work.succeed", lambda k: (G, [k.id], [k.token], True), running("token"), S.SUCCEEDED),
    "succeed without a look at gates": Move(
        "work.succeed", lambda k: (G, [k.id], [k.token], False), running("token"), S.SUCCEEDED, BROKER
    ),
    "succeed without a look at gates where the database holds it": Move(
        "work.succeed", lambda k: (G, [k.id], [k.token], False), {}, None
    ),
    "succeed with result": Move(
        "work.succeed_with_results",
        lambda k: (G, [k.id], [k.token], [b"1"], True),
        running("token"),
        S.SUCCEEDED,
    ),
    "succeed in a transaction": settle_one(S.SUCCEEDED),
    "reject in a transaction": settle_one(S.FAILED),
    "retry": wait(S.WAITING),
    "retry behind a head": wait(S.PARKED),
    "die": end(S.DEAD),
    "fail": end(S.FAILED),
    "expire": end(S.EXPIRED),
    "end cancelled": end(S.CANCELLED),
    "hand back to the broker": hand_back("broker", S.ACCEPTED),
    "hand back to the database": hand_back("database", S.WAITING),
    "dead on arrival": Move("work.dead_on_arrival", lambda k: (G, k.id, "t", "s", None, *FAILURE), {}, None),
    "broker death of a new one": Move(
        "work.insert_broker_death", lambda k: (G, k.id, "t", "event", "s", None, None, 1, *FAILURE), {}, None
    ),
    "broker death": Move(
        "work.end_broker_death",
        lambda k: (G, k.id, k.version, None, 1, *FAILURE),
        {S.ACCEPTED: VERSION, S.RUNNING: frozenset({"version", "dead"})},
        S.DEAD,
        BROKER,
    ),
    "doubt": Move(
        "doubts.doubt", lambda k: (G, k.id, k.token, 1.0, *FAILURE), running("token", "begun"), S.UNKNOWN
    ),
    "doubt the abandoned": Move(
        "doubts.doubt_abandoned", lambda k: (G, k.id, k.token), running("token", "dead", "begun"), S.UNKNOWN
    ),
    "doubt what was given up": Move(
        "doubts.doubt_given_up", lambda k: (G, [k.id], [k.token]), running("token", "begun"), S.UNKNOWN
    ),
    "resolve SUCCEEDED": resolve(S.SUCCEEDED),
    "resolve FAILED": resolve(S.FAILED),
    "resolve DEAD": resolve(S.DEAD),
    "resolve WAITING": resolve(S.WAITING),
    "resolve PARKED": resolve(S.PARKED),
    "ask": Move(
        "doubts.take_doubts", lambda _: (G, ["t"], 1.0, 9.0, 9), {S.UNKNOWN: ALWAYS}, None, versions=0
    ),
    "keep": going("work.keep", None, 1, *BODY),
    "mark an effect": going("doubts.mark_effect", "step", None, 1, *BODY),
    "unmark an effect": going("doubts.unmark_effect"),
    "progress": Move(
        "work.report_progress",
        lambda k: (G, [k.id], [k.token], ['{"fraction": 1}']),
        running("token"),
        None,
        versions=0,
    ),
    "release lost": Move(
        "work.release_lost", lambda _: (G, 0.0, 9), running("dead", "calm"), S.ACCEPTED, BROKER
    ),
    "retry now": Move(
        "repairs.retry_tasks", lambda k: (G, [k.id], LATER), {S.WAITING: ALWAYS}, S.WAITING, FUTURE
    ),
    **back(is_head=True),
    **back(is_head=False),
}


def test_no_statement_that_writes_tasks_is_left_out() -> None:
    """C7: a new one has to say here what it may move."""
    elsewhere = {
        "rebase.rebase_tasks": "numbers of transactions only",
        "revisions.import": "rows that are not there",
    }
    found = set[str]()
    for file in (files("towpath.store") / "sql").iterdir():
        family = file.name.removesuffix(".sql")
        for name, sql in load(family).items():
            if re.search(r"(update|insert into) towpath\.task\b(?!_)", sql):
                found.add(f"{family}.{name}")
    assert found - set(elsewhere) == {move.statement for move in MOVES.values()}


async def put_worker(db: Any, *, alive: bool) -> None:
    """Whom rows belong to, with or without a lease."""
    await db.execute(
        "insert into towpath.worker (id, consumer_group, host, lease_until, types) values ($1, $2, 'h',"
        " towpath.clock() + make_interval(secs => $3), '{}') on conflict (id) do update"
        " set lease_until = excluded.lease_until",
        WORKER,
        G,
        3600 if alive else -3600,
    )


async def put(
    db: Any,
    state: TaskState,
    known: Known,
    row: Mapping[str, str],
    *,
    begun: bool = False,
    source: str = "s",
    lane: str | None = None,
) -> None:
    """A row in this state, with a dead letter of an earlier life."""
    values = {"held_by": "'database'", "effect_state": "'started'" if begun else "null"}
    if state not in (S.WAITING, S.PARKED) and "held_by" in row:
        values["held_by"] = row["held_by"]
    if state is S.RUNNING:
        values |= {"worker": f"'{WORKER}'", "token": f"'{known.token}'"}
    elif state is S.WAITING:
        values |= {"due_at": "towpath.clock()", "waiting_for": "'retry'"}
        values |= {name: sql for name, sql in row.items() if name != "held_by"}
    elif state is S.UNKNOWN:
        values["reconcile_at"] = "towpath.clock()"
    elif state in FINAL:
        values["finished_at"] = "towpath.clock()"
    await db.execute(
        "insert into towpath.task (consumer_group, id, type, kind, source, lane, headers, state, version,"
        f" {', '.join(values)}) values ($1, $2, 't', 'event', $3, $4, '[]', $5, $6,"
        f" {', '.join(values.values())})",
        G,
        known.id,
        source,
        lane,
        state.value,
        known.version,
    )
    await db.execute(
        "insert into towpath.dead_letter (consumer_group, message_id, stage, state, type, kind, source,"
        " reason_code, fingerprint) values ($1, $2, 'handle', 'open', 't', 'event', 's', 'late', 'late')",
        G,
        known.id,
    )


async def everything(db: Any) -> Any:
    """What a move may have written."""
    return await db.fetchval(
        "select jsonb_build_array((select jsonb_agg(x order by x.id) from towpath.task x),"
        " (select jsonb_agg(x order by x.task_id, x.seq) from towpath.task_event x),"
        " (select jsonb_agg(x order by x.id) from towpath.dead_letter x),"
        " (select jsonb_agg(x order by x.source) from towpath.key_gate x),"
        " (select jsonb_agg(x order by x.id) from towpath.outbox x))"
    )


async def try_move(db: Any, name: str, state: TaskState, *, right: bool, alive: bool, begun: bool) -> bool:
    """Whether it moves a row, rightly; else it rightly changes nothing. Rolled back."""
    move = MOVES[name]
    known = Known(uuid4(), uuid4(), 7)
    transaction = db.transaction()
    await transaction.start()
    await put(db, state, known, move.row, begun=begun)
    before = await everything(db)
    family, statement = move.statement.split(".")
    told = known if right else Known(known.id, uuid4(), 6)
    await db.fetch(load(family)[statement], *move.arguments(told))
    after = await everything(db)
    (row,) = json.loads(after)[0]
    await transaction.rollback()
    holds = {"begun" if begun else "calm"} | (set() if alive else {"dead"})
    holds |= {"token", "version"} if right else set()
    case = f"{name}: {state}, {right=}, {alive=}, {begun=}"
    if state not in move.allowed or not move.allowed[state] <= holds:
        assert after == before, case
        return False
    became = TaskState(row["state"])
    assert became is (move.to or state), case
    assert became is state or is_allowed(state, became), case
    assert row["version"] == known.version + move.versions, case
    return True


async def test_a_move_leaves_the_states_it_may_leave_and_changes_nothing_else(db: Any) -> None:
    """C7: every state, with the right and a wrong token and version, a living and a dead worker."""
    left = {name: set[TaskState]() for name in MOVES}
    for alive in (True, False):
        await put_worker(db, alive=alive)
        for name, state, right, begun in product(MOVES, S, (True, False), (True, False)):
            if state is not S.RUNNING and (alive or begun):
                continue  # only what runs has a worker and an effect
            if await try_move(db, name, state, right=right, alive=alive, begun=begun):
                left[name].add(state)
    assert left == {name: set(move.allowed) for name, move in MOVES.items()}


async def test_a_task_is_cancelled_where_it_waits_asked_to_where_it_runs_and_left_alone_where_it_ended(
    db: Any,
) -> None:
    """C7, C15."""
    for state in S:
        known = Known(uuid4(), uuid4(), 7)
        transaction = db.transaction()
        await transaction.start()
        await put(db, state, known, {})
        before = await everything(db)
        told = await db.fetchval("select towpath.cancel_task($1, $2)", G, known.id)
        row = await db.fetchrow("select * from towpath.task where id = $1", known.id)
        after = await everything(db)
        await transaction.rollback()
        if state in (S.ACCEPTED, S.WAITING, S.PARKED):
            assert (told, row["state"], row["version"]) == ("CANCELLED", "CANCELLED", 8), state
        elif state is S.RUNNING:
            assert (told, row["state"], row["version"], row["cancel_requested"]) == (state, state, 7, True)
        else:
            assert (told, after) == (state, before), state


Late = Callable[[SettleStore, DoubtStore, Work], Awaitable[object]]
FAILED: Final = Failure("retry", "late", error_class="Late", error_message="too late", fingerprint="late")
LATE: Final[Mapping[str, Late]] = {
    "retry": lambda settles, _, work: settles.wait(
        work, FAILED, delay_seconds=0, waiting_for=WaitingFor.RETRY, spent=1
    ),
    "dead": lambda settles, _, work: settles.end(work, S.DEAD, FAILED, spent=1),
    "reject": lambda settles, _, work: settles.end(work, S.FAILED, FAILED, spent=1),
    "deadline": lambda settles, _, work: settles.end(work, S.EXPIRED, FAILED, spent=1),
    "cancelled": lambda settles, _, work: settles.end(work, S.CANCELLED, FAILED, spent=0),
    "doubt": lambda _, doubts, work: doubts.doubt(work, FAILED, reconcile_after_seconds=1),
    "hand back": lambda settles, _, work: settles.hand_back([work]),
    "keep": lambda settles, _, work: settles.keep(work),
    "mark": lambda _, doubts, work: doubts.mark(work, "step"),
    "unmark": lambda _, doubts, work: doubts.unmark(work),
}


@pytest.mark.parametrize("lane", [None, "a"])
async def test_a_failure_that_arrives_late_never_wins(migrated_url: str, db: Any, lane: str | None) -> None:
    """C7: after success, failure, death, cancellation, doubt, retry, hand-back and takeover."""
    await put_worker(db, alive=True)
    database = Database(migrated_url, pool_size=2)
    await database.start()
    settles, doubts = SettleStore(database, G, WORKER), DoubtStore(database, G)
    for state in S:
        # A RUNNING one is another member's: it took the work over under a token of its own.
        known = Known(uuid4(), uuid4(), 3)
        await put(db, state, known, {}, source=state.value, lane=lane)
        work = Work(known.id, "t", "event", state.value, lane, lane, 1, b"{}", "application/json", (), None)
        work.token = uuid4()
        before = await everything(db)
        for name, late in LATE.items():
            told = await late(settles, doubts, work)
            assert not told, f"{name} after {state}: {told}"
            assert await everything(db) == before, f"{name} after {state}"
    await database.aclose()
