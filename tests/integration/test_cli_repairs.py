"""`towpath tasks retry | rerun | stuck | show`: what a person may do about tasks, and sees of them."""

import asyncio
import json
import signal
from collections.abc import Sequence
from typing import Any, TypeAlias
from uuid import UUID, uuid4

import asyncpg
import pytest
from uuid_utils.compat import uuid7

from tests.fixtures.fix_cli import Ran, Run, towpath_process
from tests.fixtures.graveyard import TRACE, bury, everything, tasks
from tests.integration.engine import Posted, Sorted, bench, depot, until
from towpath.context import Call, Tx
from towpath.outcomes import Dead

Db: TypeAlias = "asyncpg.Connection[Any]"

_WAITING = """
insert into towpath.task (consumer_group, id, type, kind, source, key, lane, position, state, held_by,
                          attempt, due_at, waiting_for, reason_code, payload, content_type, headers,
                          updated_at)
select 'billing', x.id, 'order.placed', 'event', 'orders', x.key, null, x.n, 'WAITING', 'database', 3,
       towpath.clock() + interval '1 hour', $3, 'http_503', '{}', 'application/json', '[]', towpath.clock()
  from unnest($1::uuid[], $2::text[]) with ordinality x(id, key, n)
"""
_FINISHED = """
insert into towpath.task (consumer_group, id, type, kind, source, key, lane, position, state, held_by,
                          attempt, deliveries, effect_state, finished_at, payload, content_type, headers,
                          result, created_at)
select $3, x.id, 'order.placed', 'event', 'orders', x.key, x.key, x.n, $4, 'database', 2, 1, $5,
       towpath.clock(), case when $6 then '{}'::bytea end, case when $6 then 'application/json' end,
       case when $6 then '[]'::json end, 'r', towpath.clock() + x.n * interval '1 millisecond'
  from unnest($1::uuid[], $2::text[]) with ordinality x(id, key, n)
"""


async def waiting(db: Db, keys: Sequence[str | None], *, reason: str = "retry") -> list[UUID]:
    ids = [uuid7() for _ in keys]
    await db.execute(_WAITING, ids, list(keys), reason)
    return ids


async def finished(
    db: Db,
    keys: Sequence[str | None],
    *,
    group: str = "billing",
    state: str = "SUCCEEDED",
    effect: str | None = None,
    has_body: bool = True,
) -> list[UUID]:
    ids = [uuid7() for _ in keys]
    await db.execute(_FINISHED, ids, list(keys), group, state, effect, has_body)
    return ids


async def ask(towpath: Run, *arguments: str) -> Any:
    """`tasks …` with --json; it has to succeed."""
    ran = await asyncio.to_thread(towpath, "tasks", *arguments, "--json")
    assert (ran.code, ran.err) == (0, "")
    return json.loads(ran.out)


async def tell(towpath: Run, *arguments: str) -> Ran:
    return await asyncio.to_thread(towpath, "tasks", *arguments)


async def test_a_waiting_task_is_due_now_and_its_attempts_stay(db: Db, towpath: Run) -> None:
    one, other = await waiting(db, ["a", "b"])

    answer = await ask(towpath, "retry", str(one), "--yes", "--reason", "it is back", "--actor", "ada")

    assert (answer["planned"], answer["done"], answer["skipped"]) == (1, 1, 0)
    rows = await tasks(db)
    now = await db.fetchval("select towpath.clock()")
    assert rows[one]["due_at"] <= now < rows[other]["due_at"]
    assert (rows[one]["state"], rows[one]["waiting_for"], rows[one]["attempt"]) == ("WAITING", "retry", 3)
    event = await db.fetchrow("select * from towpath.task_event")
    assert event is not None
    assert (event["event"], event["actor"], event["error_message"]) == ("task.retried", "ada", "it is back")
    audit = await db.fetchrow("select * from towpath.audit")
    assert audit is not None
    assert (audit["actor"], audit["action"], audit["reason"]) == ("ada", "tasks.retry", "it is back")
    assert json.loads(audit["filter"]) == {"message_ids": [str(one)]}
    assert json.loads(audit["counts"])["done"] == 1


async def test_each_filter_narrows_a_retry_and_a_dry_run_changes_nothing(db: Db, towpath: Run) -> None:
    """O1"""
    one, _ = await waiting(db, ["a", "b"])
    await db.execute("update towpath.task set reason_code = 'timeout', owner = 'u1' where id = $1", one)
    before = await everything(db)

    for arguments, expected in (
        (["--group", "billing"], 2),
        (["--group", "shipping"], 0),
        (["--type", "order.placed", "--key", "a"], 1),
        (["--owner", "u1"], 1),
        (["--reason-code", "timeout"], 1),
        (["--since", "1h"], 2),
        (["--until", "1h"], 0),
        ([str(one), "--key", "b"], 0),
        (["--all", "--max", "1"], 1),
    ):
        assert (await ask(towpath, "retry", *arguments, "--dry-run"))["planned"] == expected, arguments
    assert await everything(db) == before
    assert (await tell(towpath, "retry", "--yes")).code == 2
    assert (await tell(towpath, "retry", "--all")).code == 2  # nobody to ask


async def test_a_delayed_task_is_started_early_only_by_its_id(db: Db, towpath: Run) -> None:
    [delayed] = await waiting(db, [None], reason="delay")

    assert (await ask(towpath, "retry", "--all", "--yes"))["planned"] == 0
    assert (await ask(towpath, "retry", str(delayed), "--yes"))["done"] == 1


async def test_a_rerun_is_a_new_run_with_a_new_number(db: Db, towpath: Run) -> None:
    [one] = await finished(db, ["a"])

    answer = await ask(towpath, "rerun", "--group", "billing", str(one), "--yes", "--reason", "wrong VAT")

    assert answer["done"] == 1
    task = (await tasks(db))[one]
    assert (task["state"], task["waiting_for"], task["run_no"]) == ("WAITING", "rerun", 1)
    assert (task["attempt"], task["deliveries"], task["result"], task["finished_at"]) == (0, 0, None, None)
    event = await db.fetchrow("select * from towpath.task_event")
    assert event is not None
    assert (event["event"], event["from_state"], event["to_state"]) == ("task.rerun", "SUCCEEDED", "WAITING")
    assert await db.fetchval("select action from towpath.audit") == "tasks.rerun"


async def test_reruns_of_a_key_keep_their_order_behind_what_waits(db: Db, towpath: Run) -> None:
    """C10"""
    a1, a2, b1 = await finished(db, ["a", "a", "b"])
    [failed] = await finished(db, ["b"], state="FAILED")
    [head] = await waiting(db, ["b"])
    await db.execute("insert into towpath.key_gate values ('billing', 'orders', 'b', $1)", head)

    answer = await ask(towpath, "rerun", "--group", "billing", "--all", "--state", "succeeded", "--yes")

    assert (answer["done"], answer["parked"]) == (3, 2)
    rows = await tasks(db)
    assert [rows[id_]["state"] for id_ in (a1, a2, b1, failed)] == ["WAITING", "PARKED", "PARKED", "FAILED"]
    gates = await db.fetch("select lane, head from towpath.key_gate order by lane")
    assert [(gate["lane"], gate["head"]) for gate in gates] == [("a", a1), ("b", head)]


async def test_what_may_not_run_again_is_left_out_and_told_why(db: Db, towpath: Run) -> None:
    """C9: an at-most-once effect is never repeated by accident."""
    [charged] = await finished(db, ["a"], effect="started")
    [gone] = await finished(db, ["b"], has_body=False)
    [dead] = await bury(db, ["c"])
    cancelled = await finished(db, ["d"], state="CANCELLED")
    ids = [str(id_) for id_ in (charged, gone, dead, *cancelled, uuid4())]
    before = await everything(db)

    answer = await ask(towpath, "rerun", "--group", "billing", *ids, "--yes")

    assert (answer["planned"], answer["with_effects"], answer["bodiless"]) == (0, 1, 1)
    told = (await tell(towpath, "rerun", "--group", "billing", *ids, "--yes")).out
    for id_, word in (
        (charged, "--repeat-effects"),
        (gone, "body is gone"),
        (dead, "dlq replay"),
        (cancelled[0], "submit a new task"),
        (ids[-1], "no group has such a task"),
    ):
        assert str(id_) in told
        assert word in told
    assert await everything(db) == before
    again = await ask(towpath, "rerun", "--group", "billing", str(charged), "--repeat-effects", "--yes")
    assert again["done"] == 1
    assert (await tasks(db))[charged]["effect_state"] is None
    assert (await tell(towpath, "rerun", "--group", "billing", "--state", "dead", "--all")).code == 2
    assert (await tell(towpath, "rerun", "--group", "billing", "--yes")).code == 2


async def test_a_body_that_the_row_never_held_comes_from_the_outbox(db: Db, towpath: Run) -> None:
    """O4: and the trace with it."""
    [one] = await finished(db, ["a"], has_body=False)
    headers = json.dumps([["tenant", "acme"], ["traceparent", TRACE]])
    await db.execute(
        "select towpath.emit('orders', 'order.placed', '{\"n\": 1}', 'a', $2::text::json, message_id => $1)",
        one,
        headers,
    )

    assert (await ask(towpath, "rerun", "--group", "billing", "--key", "a", "--yes"))["done"] == 1

    task = (await tasks(db))[one]
    assert (task["payload"], json.loads(task["headers"])[0]) == (b'{"n": 1}', ["tenant", "acme"])
    assert (task["state"], task["trace"]) == ("WAITING", TRACE)


# Each batch passes the point before and after its COMMIT.
@pytest.mark.parametrize("passes", [1, 2, 3])
async def test_a_rerun_killed_anywhere_goes_on_and_repeats_nothing(
    db: Db, migrated_url: str, passes: int
) -> None:
    """D3: also where what ran again has finished again meanwhile."""
    ids = await finished(db, [f"k{n % 7}" for n in range(700)])
    arguments = ("tasks", "rerun", "--group", "billing", "--all", "--yes", "--json")

    died = await asyncio.to_thread(
        towpath_process,
        migrated_url,
        *arguments,
        environment={"TOWPATH_CRASH_AT": f"replayed_batch:{passes}"},
    )
    assert died.code == -signal.SIGKILL
    await db.execute(
        "update towpath.task set state = 'SUCCEEDED', due_at = null, waiting_for = null, updated_at = now(), "
        "finished_at = towpath.clock() where state = 'WAITING'"
    )
    completed = await asyncio.to_thread(towpath_process, migrated_url, *arguments)

    assert completed.code == 0, completed.err
    assert {row["run_no"] for row in (await tasks(db)).values()} == {1}
    done = await db.fetchval("select sum((counts->>'done')::int) from towpath.audit")
    assert done == len(ids) == await db.fetchval("select count(*) from towpath.task_event")


async def test_the_handler_of_a_rerun_has_another_idempotency_key(migrated_url: str, towpath: Run) -> None:
    """C5: a retry and a replay keep it."""
    app = depot()
    keys: list[str] = []

    @app.idempotent()
    async def post(_parcel: Posted, call: Call) -> None:
        keys.append(call.idempotency_key("ship"))
        if len(keys) == 1:
            raise Dead("no_stamps")

    async with bench(app, migrated_url) as engine, engine.member():
        message = await engine.publish(Posted("p1"))
        await until(lambda: _is(engine.db, message, "DEAD"))
        assert (await asyncio.to_thread(towpath, "dlq", "replay", "--id", str(message), "--yes")).code == 0
        await until(lambda: _is(engine.db, message, "SUCCEEDED"))
        await ask(towpath, "rerun", "--group", "depot", str(message), "--yes")
        await until(lambda: len(keys) == 3)
        await until(lambda: _is(engine.db, message, "SUCCEEDED"))

    assert keys == [f"{message}:ship", f"{message}:ship", f"{message}:1:ship"]


async def _is(db: Db, message: UUID, state: str) -> bool:
    return bool(await db.fetchval("select state from towpath.task where id = $1", message) == state)


async def test_everything_that_stands_still_is_told_with_its_reason(db: Db, towpath: Run) -> None:
    """O1: one line each, what to do at its end."""
    head, overdue = await waiting(db, ["a", "b"])
    doubtful, abandoned, kept, slow, unpublished = await finished(db, [None] * 5)
    [parked] = await finished(db, ["a"])
    dead_worker, living_worker = uuid4(), uuid4()
    await db.execute(
        "insert into towpath.worker (id, consumer_group, host, lease_until) values "
        "($1, 'billing', 'h', now() - interval '1 hour'), ($2, 'shipping', 'h', now() + interval '1 hour')",
        dead_worker,
        living_worker,
    )
    accepted = "state = 'ACCEPTED', finished_at = null, kind = 'task', held_by = 'broker'"
    running = "state = 'RUNNING', finished_at = null, token = gen_random_uuid(), worker"
    for id_, change in (
        (doubtful, "state = 'UNKNOWN', finished_at = null"),
        (abandoned, f"{running} = '{dead_worker}', held_by = 'broker'"),
        (kept, f"{running} = '{dead_worker}'"),
        (slow, f"{running} = '{living_worker}', consumer_group = 'shipping'"),
        (
            unpublished,
            f"{accepted}, shard = 1, xid = '999999999'",
        ),
        (parked, "state = 'PARKED', finished_at = null, lane = 'a'"),
        (head, "lane = 'a'"),
        (overdue, "due_at = now() - interval '1 hour'"),
    ):
        await db.execute(f"update towpath.task set {change} where id = $1", id_)
    await db.execute("update towpath.task set updated_at = now() - interval '2 hours'")
    await db.execute(
        "insert into towpath.key_gate values ('billing', 'orders', 'a', $1, now() - interval '2 hours')", head
    )

    rows = {UUID(row["id"]): row for row in await ask(towpath, "stuck")}

    assert {id_: row["why"] for id_, row in rows.items()} == {
        doubtful: "in_doubt",
        abandoned: "lost_to_redeliver",
        kept: "lost_to_reap",
        slow: "runs_long",
        unpublished: "message_unpublished",
        overdue: "overdue",
        parked: "parked",
    }
    assert (rows[parked]["behind"], rows[parked]["behind_state"]) == (str(head), "WAITING")
    assert "start one" in rows[overdue]["todo"]
    assert f"towpath tasks resolve {doubtful} --group billing" in rows[doubtful]["todo"]
    lines = (await tell(towpath, "stuck", "--group", "billing")).out.splitlines()
    assert len(lines) == 6
    assert [line for line in lines if str(parked) in line and str(head) in line]
    assert (await tell(towpath, "stuck", "--older-than", "1d")).out == "nothing has stood still for 1d\n"
    assert (await tell(towpath, "stuck", "--older-than", "soon")).code == 2


async def test_a_task_tells_what_happened_what_it_came_of_and_what_came_of_it(
    migrated_url: str, towpath: Run
) -> None:
    """O4"""
    app = depot()

    @app.transactional()
    async def post(parcel: Posted, tx: Tx) -> None:
        tx.emit(Sorted(parcel.parcel), headers={"traceparent": TRACE})

    @app.transactional()
    async def sort(_parcel: Sorted) -> None: ...

    async with bench(app, migrated_url) as engine, engine.member():
        message = await engine.publish(Posted("p1"), headers=(("traceparent", TRACE.encode()),))
        await until(lambda: _is(engine.db, message, "SUCCEEDED"))
        emitted = await engine.db.fetchrow("select message_id, headers from towpath.outbox")
        assert emitted is not None
        await engine.publish(Sorted("p1"), message_id=emitted["message_id"])
        await until(lambda: _is(engine.db, emitted["message_id"], "SUCCEEDED"))
        await engine.db.execute(
            "update towpath.task set position = null"
        )  # this broker's numbers are its own

    [first] = await ask(towpath, "show", str(message))
    [second] = await ask(towpath, "show", str(emitted["message_id"]))

    assert [line["event"] for line in first["timeline"]] == ["task.created", "task.started", "task.ended"]
    assert [(row["relation"], row["id"], row["to"]) for row in first["effects"]] == [
        ("emitted", str(emitted["message_id"]), "sorted")
    ]
    assert (first["caused_by"], second["caused_by"]) == (None, str(message))
    text = (await tell(towpath, "show", str(message))).out
    assert "task.ended" in text
    assert str(emitted["message_id"]) in text
