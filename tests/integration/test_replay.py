"""Replay: dead letters go back to work once, in order, and a person can see who did it."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any, TypeAlias
from uuid import UUID

import asyncpg
import pytest

from tests.fixtures.fix_cli import Run, towpath_on_terminal, towpath_process
from tests.fixtures.graveyard import TRACE, bury, everything, tasks
from towpath.deadletters import Filter, carry_out, make_plan
from towpath.store.statements import load

Db: TypeAlias = "asyncpg.Connection[Any]"


async def command(towpath: Run, *arguments: str) -> dict[str, Any]:
    """`dlq …` with --json in a thread; it has to succeed."""
    ran = await asyncio.to_thread(towpath, "dlq", *arguments, "--json")
    assert (ran.code, ran.err) == (0, "")
    answer: dict[str, Any] = json.loads(ran.out)
    return answer


async def parked_order(db: Db, lane: str) -> list[UUID]:
    """The lane as the due poller will take it: the head, then the parked by position."""
    rows = await db.fetch(
        "select id from towpath.task where lane = $1 and state in ('WAITING', 'PARKED') "
        "order by state desc, position nulls first, id",
        lane,
    )
    return [row["id"] for row in rows]


async def test_a_replayed_task_is_due_now_and_begins_a_new_life(db: Db, towpath: Run) -> None:
    [message] = await bury(db, ["o-1"])

    answer = await command(
        towpath, "replay", "--group", "billing", "--yes", "--reason", "warehouse is back", "--actor", "ada"
    )

    assert (answer["planned"], answer["done"], answer["parked"], answer["skipped"]) == (1, 1, 0, 0)
    task = (await tasks(db))[message]
    assert (task["state"], task["waiting_for"], task["held_by"]) == ("WAITING", "replay", "database")
    assert task["due_at"] <= await db.fetchval("select towpath.clock()")
    assert (task["attempt"], task["deliveries"], task["version"]) == (0, 0, 10)
    assert (task["started_at"], task["finished_at"], task["worker"], task["token"]) == (None,) * 4
    letter = await db.fetchrow("select * from towpath.dead_letter")
    assert letter is not None
    assert (letter["state"], letter["replay_count"], letter["death_count"]) == ("replayed", 1, 1)
    assert letter["closed_at"] is not None
    event = await db.fetchrow("select * from towpath.task_event")
    assert event is not None
    assert (event["event"], event["from_state"], event["to_state"]) == ("task.replayed", "DEAD", "WAITING")
    assert (event["actor"], event["error_message"], event["version"]) == ("ada", "warehouse is back", 10)
    audit = await db.fetchrow("select * from towpath.audit")
    assert audit is not None
    assert (audit["actor"], audit["action"], audit["reason"]) == ("ada", "dlq.replay", "warehouse is back")
    assert json.loads(audit["filter"]) == {"groups": ["billing"]}
    counts = json.loads(audit["counts"])
    assert counts.pop("until") == answer["made_at"].replace("Z", "+00:00")
    assert counts == {
        "planned": 1,
        "done": 1,
        "parked": 0,
        "skipped": 0,
        "capped": 0,
        "beyond_limit": 0,
        "is_complete": True,
    }


async def test_a_replayed_message_runs_however_old_it_is(db: Db, towpath: Run) -> None:
    """D4"""
    [message] = await bury(db, ["o-1"])
    await db.execute("update towpath.task set created_at = '2020-01-01Z', deadline_at = '2020-01-02Z'")
    await db.execute(
        "update towpath.dead_letter set first_dead_at = '2020-01-01Z', last_dead_at = '2020-01-01Z'"
    )

    await command(towpath, "replay", "--group", "billing", "--yes")

    task = (await tasks(db))[message]
    assert (task["state"], task["deadline_at"], task["started_at"]) == ("WAITING", None, None)


async def test_a_deadline_still_ahead_is_kept(db: Db, towpath: Run) -> None:
    await bury(db, ["o-1"])
    await db.execute("update towpath.task set deadline_at = '2999-01-01Z'")

    await command(towpath, "replay", "--group", "billing", "--yes")

    assert await db.fetchval("select deadline_at from towpath.task") is not None


async def test_a_row_is_never_expired_while_its_dead_letter_is_open(db: Db) -> None:
    """D4"""
    open_one, closed_one = await bury(db, [None, None])
    await db.execute("update towpath.dead_letter set state = 'discarded' where message_id = $1", closed_one)
    await db.execute(
        "update towpath.task set state = 'SUCCEEDED', created_at = '2020-01-01Z', finished_at = '2020-01-01Z'"
    )

    await db.execute(load("work")["expire_finished"], "billing", 86400.0, 100)

    assert set(await tasks(db)) == {open_one}


async def test_what_the_row_lost_comes_back_from_the_dead_letter(db: Db, towpath: Run) -> None:
    [bare] = await bury(db, ["a"])
    [full] = await bury(db, ["b"], has_body=True)
    await db.execute(
        "update towpath.dead_letter set payload = 'edited by nobody' where message_id = $1", full
    )

    await command(towpath, "replay", "--group", "billing", "--yes")

    rows = await tasks(db)
    assert (rows[bare]["payload"], rows[bare]["content_type"]) == (b'{"n": 1}', "application/json")
    assert json.loads(rows[bare]["headers"]) == [["tenant", "acme"]]
    assert (rows[full]["payload"], rows[full]["headers"]) == (b'{"n": 1}', "[]")


async def test_a_message_that_could_not_be_decoded_gets_its_bytes_back(db: Db, towpath: Run) -> None:
    """C11"""
    [message] = await bury(db, ["o-1"], stage="decode", is_ordered=False)
    await db.execute("update towpath.task set position = null, trace = null, key = null")

    await command(towpath, "replay", "--stage", "decode", "--yes")

    task = (await tasks(db))[message]
    assert (task["state"], task["payload"], task["position"]) == ("WAITING", b'{"n": 1}', 1)
    assert (task["key"], task["trace"]) == ("o-1", TRACE)


async def test_several_of_one_key_keep_their_order(db: Db, towpath: Run) -> None:
    """D3, C10"""
    keys, positions = ["a", "b", "a", "a", "b"], [30, 7, 10, 20, 3]
    a30, b7, a10, a20, b3 = await bury(db, keys, positions=positions)

    answer = await command(towpath, "replay", "--group", "billing", "--yes")

    assert (answer["done"], answer["parked"]) == (5, 3)
    assert await parked_order(db, "a") == [a10, a20, a30]
    assert await parked_order(db, "b") == [b3, b7]
    gates = await db.fetch("select lane, head from towpath.key_gate order by lane")
    assert [(row["lane"], row["head"]) for row in gates] == [("a", a10), ("b", b3)]


async def test_behind_a_waiting_message_of_the_key_it_parks(db: Db, towpath: Run) -> None:
    """C10"""
    [waiting] = await bury(db, ["a"], positions=[50])
    await command(towpath, "replay", "--group", "billing", "--yes")
    early, late = await bury(db, ["a", "a"], positions=[10, 60])

    answer = await command(towpath, "replay", "--group", "billing", "--yes")

    assert (answer["done"], answer["parked"]) == (2, 2)
    assert await parked_order(db, "a") == [waiting, early, late]
    assert await db.fetchval("select head from towpath.key_gate") == waiting


async def test_a_gate_that_still_names_the_dead_message_lets_it_run(db: Db, towpath: Run) -> None:
    [message] = await bury(db, ["a"])
    await db.execute("insert into towpath.key_gate values ('billing', 'orders', 'a', $1)", message)

    await command(towpath, "replay", "--group", "billing", "--yes")

    assert (await tasks(db))[message]["state"] == "WAITING"


async def test_lanes_of_other_sources_and_groups_stay_apart(db: Db, towpath: Run) -> None:
    ids = [
        *await bury(db, ["a"], source="orders"),
        *await bury(db, ["a"], source="returns"),
        *await bury(db, ["a"], group="shipping"),
    ]

    answer = await command(towpath, "replay", "--all", "--yes")

    assert answer["parked"] == 0
    assert {row["state"] for row in (await tasks(db)).values()} == {"WAITING"}
    assert {row["head"] for row in await db.fetch("select head from towpath.key_gate")} == set(ids)


async def test_messages_without_order_all_wait_at_once_and_gate_nothing(db: Db, towpath: Run) -> None:
    await bury(db, ["a", "a", None], is_ordered=False)

    answer = await command(towpath, "replay", "--group", "billing", "--yes")

    assert answer["parked"] == 0
    assert await db.fetchval("select count(*) from towpath.key_gate") == 0


async def test_refused_messages_go_back_through_the_outbox_under_their_own_ids(db: Db, towpath: Run) -> None:
    a2, b1, a1 = await bury(db, ["a", "b", "a"], positions=[2, 5, 1], stage="publish")

    answer = await command(towpath, "replay", "--stage", "publish", "--yes")

    assert answer["done"] == 3
    rows = await db.fetch("select * from towpath.outbox order by id")
    by_key = [(row["key"], row["message_id"]) for row in rows]
    assert [entry for entry in by_key if entry[0] == "a"] == [("a", a1), ("a", a2)]
    assert ("b", b1) in by_key
    assert {row["destination"] for row in rows} == {"orders"}
    assert {row["kind"] for row in rows} == {"event"}
    assert [bytes(row["payload"]) for row in rows if row["message_id"] == a2] == [b'{"n": 2}']
    assert json.loads(rows[0]["headers"]) == [["tenant", "acme"]]
    assert await db.fetchval("select count(*) from towpath.dead_letter where state = 'open'") == 0

    again = await command(towpath, "replay", "--stage", "publish", "--yes")

    assert again["planned"] == 0
    assert await db.fetchval("select count(*) from towpath.outbox") == 3


async def test_a_dry_run_changes_nothing(db: Db, towpath: Run) -> None:
    """D3"""
    await bury(db, ["a", "a", None])
    await bury(db, ["p"], stage="publish")
    before = await everything(db)

    answer = await command(towpath, "replay", "--all", "--dry-run")

    assert (answer["planned"], answer["done"], answer["audit_id"]) == (4, 0, None)
    assert await everything(db) == before


async def test_a_maximum_takes_the_oldest_lanes_from_their_front(db: Db, towpath: Run) -> None:
    """D3"""
    a9, _b2, _b1, a8 = await bury(db, ["a", "b", "b", "a"], positions=[9, 2, 1, 8])

    answer = await command(towpath, "replay", "--group", "billing", "--max", "1", "--yes")

    assert (answer["planned"], answer["beyond_limit"]) == (1, 3)
    assert await parked_order(db, "a") == [a8]

    await command(towpath, "replay", "--group", "billing", "--max", "1", "--yes")

    assert await parked_order(db, "a") == [a8, a9]


async def test_a_rate_spreads_the_release(db: Db, towpath: Run) -> None:
    """D3"""
    await bury(db, [None] * 5)
    began = time.monotonic()

    await command(towpath, "replay", "--group", "billing", "--rate", "4", "--yes")

    assert time.monotonic() - began >= 1.0
    assert await db.fetchval("select count(*) from towpath.task where state = 'WAITING'") == 5


async def test_a_long_replay_shows_how_fast_it_is_and_how_long_it_takes(db: Db, migrated_url: str) -> None:
    """O2: on a terminal; the bar is gone when the result is printed."""
    await bury(db, [None] * 6)

    shown = await asyncio.to_thread(
        towpath_on_terminal, migrated_url, "dlq", "replay", "--group", "billing", "--rate", "1", "--yes"
    )

    assert shown.code == 0, shown
    frames = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", shown.out).splitlines()
    on_the_way = re.compile(r"━ [1-5]/6 \d+/s \d:\d\d:\d\d")
    assert any(map(on_the_way.search, frames)), "how many of how many, how fast, and the time left"
    assert frames[-1] == "replayed 6 (audit 1)"


async def test_what_was_replayed_too_often_is_left_out(db: Db, towpath: Run) -> None:
    """D3"""
    stubborn, fresh = await bury(db, [None, None])
    await db.execute("update towpath.dead_letter set replay_count = 3 where message_id = $1", stubborn)

    answer = await command(towpath, "replay", "--group", "billing", "--yes")

    assert (answer["done"], answer["capped"]) == (1, 1)
    rows = await tasks(db)
    assert (rows[stubborn]["state"], rows[fresh]["state"]) == ("DEAD", "WAITING")

    answer = await command(towpath, "replay", "--group", "billing", "--max-repeats", "0", "--yes")

    assert answer["done"] == 1


async def test_each_filter_narrows_the_plan(db: Db, towpath: Run) -> None:
    [one] = await bury(db, ["k1"])
    [two] = await bury(
        db,
        ["k2"],
        group="shipping",
        type_="parcel.sent",
        reason="timeout",
        fingerprint="feed",
        stage="decode",
    )
    await db.execute("update towpath.dead_letter set last_dead_at = '2026-01-02Z' where message_id = $1", one)
    first = await db.fetchval("select id from towpath.dead_letter where message_id = $1", one)

    for arguments, expected in (
        (["--group", "billing"], 1),
        (["--group", "billing", "--group", "shipping"], 2),
        (["--type", "parcel.sent"], 1),
        (["--reason-code", "timeout"], 1),
        (["--fingerprint", "feed"], 1),
        (["--stage", "decode"], 1),
        (["--key", "k1"], 1),
        (["--id", str(first)], 1),
        (["--id", str(two)], 1),
        (["--id", str(first), "--key", "k2"], 0),
        (["--since", "1h"], 1),
        (["--until", "2026-01-02T00:00:01+00:00"], 1),
        (["--until", "2026-01-02T00:00Z"], 0),
        (["--since", "2026-01-02T00:00Z", "--group", "billing"], 1),
        (["--all"], 2),
    ):
        answer = await command(towpath, "replay", *arguments, "--dry-run")
        assert answer["planned"] == expected, arguments


async def test_a_second_death_opens_the_row_again_and_it_can_be_replayed_again(db: Db, towpath: Run) -> None:
    [message] = await bury(db, ["a"])
    await command(towpath, "replay", "--group", "billing", "--yes")
    await db.execute("delete from towpath.key_gate")
    await db.execute(
        "update towpath.task set state = 'DEAD', due_at = null, waiting_for = null, finished_at = now()"
    )
    await db.execute(
        load("work")["bury"],
        *(
            "billing",
            message,
            "handle",
            "order.placed",
            "event",
            "orders",
            "a",
            1,
            b"",
            "text/plain",
            "[]",
            None,
        ),
        *("timeout", "TimeoutError", "slow", "f", 8, "a", TRACE),
    )

    answer = await command(towpath, "replay", "--group", "billing", "--yes")

    assert answer["done"] == 1
    letter = await db.fetchrow("select * from towpath.dead_letter")
    assert letter is not None
    assert (letter["death_count"], letter["replay_count"], letter["state"]) == (2, 2, "replayed")


async def test_a_discarded_dead_letter_stays_dead_and_recorded(db: Db, towpath: Run) -> None:
    [message] = await bury(db, ["a"])

    answer = await command(towpath, "discard", "--group", "billing", "--yes", "--reason", "test data")

    assert answer["done"] == 1
    assert (await tasks(db))[message]["state"] == "DEAD"
    assert await db.fetchval("select state from towpath.dead_letter") == "discarded"
    assert await db.fetchval("select action from towpath.audit") == "dlq.discard"
    assert (await command(towpath, "replay", "--all", "--dry-run"))["planned"] == 0


async def test_two_operators_at_once_release_each_message_once(db: Db, migrated_url: str) -> None:
    """D3"""
    await bury(db, [f"k{n % 40}" for n in range(1200)])
    await bury(db, [f"k{n % 40}" for n in range(300)], stage="publish")

    async def operator(name: str) -> int:
        connection = await asyncpg.connect(migrated_url)
        try:
            plan = await make_plan(connection, Filter())
            _, counts = await carry_out(connection, plan, actor=name, batch_size=50)
            return counts.done
        finally:
            await connection.close()

    done = await asyncio.gather(operator("ada"), operator("bob"), operator("eve"))

    assert sum(done) == 1500
    await _assert_released_once(db, 1200, 300)


async def _assert_released_once(db: Db, tasks_count: int, published_count: int) -> None:
    assert await db.fetchval("select count(*) from towpath.dead_letter where state <> 'replayed'") == 0
    assert await db.fetchval("select count(*) from towpath.dead_letter where replay_count <> 1") == 0
    assert await db.fetchval("select count(*) from towpath.task where version <> 10") == 0
    assert await db.fetchval("select count(*) from towpath.task_event") == tasks_count
    assert await db.fetchval("select count(distinct task_id) from towpath.task_event") == tasks_count
    assert await db.fetchval("select count(*) from towpath.outbox") == published_count
    assert await db.fetchval("select count(distinct message_id) from towpath.outbox") == published_count
    # Each lane: one gate, whose head waits and has the least position; everything else is parked.
    wrong = await db.fetch(
        """
        select t.lane from towpath.task t left join towpath.key_gate g using (consumer_group, source, lane)
         where t.lane is not null group by t.lane, g.head
        having count(*) filter (where t.state = 'WAITING') <> 1
            or (array_agg(t.id order by t.position))[1] is distinct from g.head
            or count(*) filter (where t.state = 'WAITING' and t.id = g.head) <> 1
        """
    )
    assert [row["lane"] for row in wrong] == []
    recorded = await db.fetchval("select sum((counts->>'done')::int) from towpath.audit")
    assert recorded == tasks_count + published_count
    # In the outbox the messages of a key are in the order of their first try.
    inverted = await db.fetchval(
        """
        select count(*) from (
          select d.position, lag(d.position) over (partition by o.key order by o.id) as previous
            from towpath.outbox o join towpath.dead_letter d using (message_id)
        ) x where previous > position
        """
    )
    assert inverted == 0


async def _dig(db: Db) -> None:
    """600 tasks on 30 lanes, the later positions dying first, and 600 refused messages: four batches."""
    count = 600
    await bury(db, [f"k{n % 30}" for n in range(count)], positions=list(range(count, 0, -1)))
    await bury(db, [f"p{n % 30}" for n in range(600)], positions=list(range(600, 0, -1)), stage="publish")


# Each batch passes the point before and after its COMMIT: odd passes die before it, even ones after.
@pytest.mark.parametrize("passes", [1, 2, 4, 5, 6, 8])
async def test_killed_at_any_step_and_run_again_it_repeats_nothing(
    db: Db, migrated_url: str, passes: int
) -> None:
    """D3"""
    await _dig(db)
    arguments = ("dlq", "replay", "--all", "--yes", "--json")

    died = await asyncio.to_thread(
        towpath_process,
        migrated_url,
        *arguments,
        environment={"TOWPATH_CRASH_AT": f"replayed_batch:{passes}"},
    )
    assert died.code == -signal.SIGKILL
    finished = await asyncio.to_thread(towpath_process, migrated_url, *arguments)

    assert finished.code == 0, finished.err
    await _assert_released_once(db, 600, 600)


async def test_killed_at_random_moments_and_run_again_it_repeats_nothing(
    db: Db, migrated_url: str, scale: float
) -> None:
    """D3"""
    await _dig(db)
    arguments = [sys.executable, "-m", "towpath.cli", "dlq", "replay", "--all", "--yes", "--rate", "2000"]
    environment = {**os.environ, "TOWPATH_DATABASE_URL": migrated_url}
    for step in range(2 + int(scale)):
        process = await asyncio.create_subprocess_exec(
            *arguments, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
        started = step + await db.fetchval("select count(*) from towpath.audit")
        await _until_audit_or_exit(db, process, started - step + 1)
        await asyncio.sleep(0.08 * step)
        if process.returncode is None:
            process.kill()
        await process.wait()

    finished = await asyncio.to_thread(towpath_process, migrated_url, "dlq", "replay", "--all", "--yes")

    assert finished.code == 0, finished.err
    await _assert_released_once(db, 600, 600)


async def _until_audit_or_exit(db: Db, process: asyncio.subprocess.Process, count: int) -> None:
    """The action has begun: its audit row is there."""
    async with asyncio.timeout(60):
        while process.returncode is None:
            if await db.fetchval("select count(*) from towpath.audit") >= count:
                return
            await asyncio.sleep(0.01)


async def test_what_died_again_since_an_interrupted_replay_waits_for_the_next_one(
    db: Db, towpath: Run
) -> None:
    """D3: the second run repeats nothing; the one after it means everything that is open."""
    stuck, repeated = await bury(db, [None, None])
    await db.execute(
        "update towpath.dead_letter set last_dead_at = '2026-01-01Z' where message_id = $1", stuck
    )
    counts = json.dumps({"until": "2026-01-02T00:00:00+00:00", "is_complete": False})
    await db.execute(
        "insert into towpath.audit (actor, action, reason, filter, counts) "
        "values ('ada', 'dlq.replay', '', $1, $2)",
        json.dumps({"groups": ["billing"]}),
        counts,
    )

    finished = await command(towpath, "replay", "--group", "billing", "--yes")
    assert (finished["planned"], (await tasks(db))[stuck]["state"]) == (1, "WAITING")
    following = await command(towpath, "replay", "--group", "billing", "--yes")

    assert (following["planned"], (await tasks(db))[repeated]["state"]) == (1, "WAITING")


async def test_an_interrupted_action_is_recorded_as_far_as_it_came(db: Db, migrated_url: str) -> None:
    """D3"""
    await _dig(db)

    await asyncio.to_thread(
        towpath_process,
        migrated_url,
        *("dlq", "replay", "--all", "--yes"),
        environment={"TOWPATH_CRASH_AT": "replayed_batch:4"},
    )

    counts = json.loads(await db.fetchval("select counts from towpath.audit"))
    replayed = await db.fetchval("select count(*) from towpath.dead_letter where state = 'replayed'")
    assert (counts["done"], counts["is_complete"]) == (replayed, False)
    assert counts["planned"] == 1200


async def _until_somebody_waits(db: Db) -> None:
    """Some session of this database waits for a lock."""
    waiting = (
        "select count(*) from pg_stat_activity "
        "where datname = current_database() and wait_event_type = 'Lock'"
    )
    async with asyncio.timeout(30):
        while not await db.fetchval(waiting):  # noqa: ASYNC110  Postgres tells nobody
            await asyncio.sleep(0.01)


async def test_replay_waits_for_a_gate_a_consumer_holds_and_parks_behind_it(
    db: Db, migrated_url: str, towpath: Run
) -> None:
    """C10"""
    [message] = await bury(db, ["a"], positions=[1])
    [head] = await bury(db, ["a"], positions=[2])
    await db.execute("delete from towpath.dead_letter where message_id = $1", head)
    await db.execute(
        "update towpath.task set state = 'WAITING', due_at = now(), waiting_for = 'retry', "
        "finished_at = null where id = $1",
        head,
    )
    await db.execute("insert into towpath.key_gate values ('billing', 'orders', 'a', $1)", head)
    consumer = await asyncpg.connect(migrated_url)
    transaction = consumer.transaction()
    await transaction.start()
    await consumer.execute("select from towpath.key_gate for update")

    replaying = asyncio.create_task(command(towpath, "replay", "--group", "billing", "--yes"))
    await _until_somebody_waits(db)
    await transaction.commit()
    answer = await replaying
    await consumer.close()

    assert (answer["done"], answer["parked"]) == (1, 1)
    assert await parked_order(db, "a") == [head, message]


async def test_a_gate_opened_while_replay_waits_for_it_is_made_anew(
    db: Db, migrated_url: str, towpath: Run
) -> None:
    """C10"""
    [message] = await bury(db, ["a"])
    await db.execute("insert into towpath.key_gate values ('billing', 'orders', 'a', gen_random_uuid())")
    consumer = await asyncpg.connect(migrated_url)
    transaction = consumer.transaction()
    await transaction.start()
    await consumer.execute("delete from towpath.key_gate")

    replaying = asyncio.create_task(command(towpath, "replay", "--group", "billing", "--yes"))
    await _until_somebody_waits(db)
    await transaction.commit()
    await replaying
    await consumer.close()

    assert (await tasks(db))[message]["state"] == "WAITING"
    assert await db.fetchval("select head from towpath.key_gate") == message


async def test_a_deadlock_with_a_careless_transaction_is_tried_again(
    db: Db, migrated_url: str, towpath: Run
) -> None:
    [message] = await bury(db, ["a"])
    other = await asyncpg.connect(migrated_url, server_settings={"deadlock_timeout": "5s"})
    transaction = other.transaction()
    await transaction.start()
    await other.execute("select from towpath.task for update")  # the wrong order: tasks, then gates

    replaying = asyncio.create_task(command(towpath, "replay", "--group", "billing", "--yes"))
    await _until_somebody_waits(db)
    try:
        await other.execute(
            "insert into towpath.key_gate values ('billing', 'orders', 'a', gen_random_uuid())"
        )
        await other.execute("delete from towpath.key_gate")
        await transaction.commit()
    except asyncpg.DeadlockDetectedError:  # the replay had waited too long by then to be the one that loses
        await transaction.rollback()
    answer = await replaying
    await other.close()

    assert answer["done"] == 1
    assert (await tasks(db))[message]["state"] == "WAITING"


async def test_what_is_no_longer_dead_is_skipped_and_its_gate_not_left_behind(db: Db) -> None:
    gone, _stays = await bury(db, ["a", "b"])
    plan = await make_plan(db, Filter())
    await db.execute("update towpath.dead_letter set state = 'discarded' where message_id = $1", gone)

    _, counts = await carry_out(db, plan, actor="ada")

    assert (counts.done, counts.skipped) == (1, 1)
    assert [row["lane"] for row in await db.fetch("select lane from towpath.key_gate")] == ["b"]


async def test_a_dead_letter_without_its_task_is_skipped(db: Db, towpath: Run) -> None:
    await bury(db, ["a"])
    await db.execute("delete from towpath.task")

    answer = await command(towpath, "replay", "--group", "billing", "--yes")

    assert (answer["planned"], answer["done"], answer["skipped"]) == (1, 0, 1)


async def test_ten_thousand_are_released_quickly_and_plans_stay_small(db: Db) -> None:
    """D3"""
    count = 10_000
    keys: Sequence[str] = [f"k{n % 1000}" for n in range(count)]
    await bury(db, keys)
    began = time.monotonic()

    plan = await make_plan(db, Filter())
    _, counts = await carry_out(db, plan, actor="ada")

    assert counts.done == count
    assert time.monotonic() - began < 60  # generous: a second or two is usual
    assert plan.count == count
