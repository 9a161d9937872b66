"""No statement of the consumer engine scans a table: not on an empty one, not on a filled one."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import asyncpg
import pytest

from tests.plans.conftest import skip_while_empty
from towpath.store.database import PLANNER_PINS
from towpath.store.statements import load

FILES = ("work", "doubts")
STATEMENTS: Mapping[str, str] = {name: sql for file in FILES for name, sql in load(file).items()}
BIG = {"task", "key_gate", "worker", "dead_letter", "task_event"}
"""Tables that grow with the work, or are asked for every message."""

UNPINNED = {
    "settle_one",
    "gate_head",
    "next_of_lanes",
    "open_gates",
    "move_gates",
    "promote",
    "record_event",
    "copy_to_broker",
}
"""They run in handlers' transactions, whose planner is as the server's owner set it."""


def parameters(sql: str) -> str:
    """As many nulls as the statement takes."""
    return ", ".join(["null"] * max(map(int, re.findall(r"\$(\d+)", sql)), default=0))


def nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for child in plan.get("Plans", []):
        yield from nodes(child)


async def plan_of(connection: "asyncpg.Connection[Any]", name: str) -> list[dict[str, Any]]:
    """The nodes of the generic plan, which is what a prepared statement of the engine runs by."""
    sql = STATEMENTS[name]
    await connection.execute(f"prepare examined as {sql}")
    try:
        given = parameters(sql)
        found = await connection.fetchval(
            f"explain (format json) execute examined{f'({given})' if given else ''}"
        )
    finally:
        await connection.execute("deallocate examined")
    return list(nodes(json.loads(found)[0]["Plan"]))


def scans(plan: list[dict[str, Any]]) -> list[str]:
    """Sequential scans of big tables, as text for the message."""
    return [
        f"{node['Node Type']} on {node['Relation Name']}"
        for node in plan
        if node["Node Type"] == "Seq Scan" and node.get("Relation Name") in BIG
    ]


async def pinned(url: str) -> "asyncpg.Connection[Any]":
    return await asyncpg.connect(url, server_settings=PLANNER_PINS, timeout=30)


FILL = """
insert into towpath.worker (id, consumer_group, host, lease_until)
  select gen_random_uuid(), 'g' || n % 5, 'h', clock_timestamp() + interval '1 hour'
    from generate_series(1, 200) n;
insert into towpath.task (consumer_group, id, type, kind, source, key, lane, position, state, held_by, worker,
                          token, due_at, waiting_for, finished_at, created_at)
  select 'g' || n % 5, gen_random_uuid(), 't', case when n % 3 = 0 then 'task' else 'event' end, 's' || n % 3,
         'k' || n % 20000, case when n % 50 = 1 then 'k' || n else 'k' || n % 20000 end, n, state,
         case when state in ('WAITING', 'PARKED') then 'database' else 'broker' end,
         case when state = 'RUNNING' then (select id from towpath.worker limit 1) end,
         case when state = 'RUNNING' then gen_random_uuid() end,
         case when state = 'WAITING' then clock_timestamp() + make_interval(secs => n % 100 - 50) end,
         case when state = 'WAITING' then 'retry' end,
         case when state in ('SUCCEEDED', 'DEAD') then clock_timestamp() end,
         clock_timestamp() - make_interval(secs => 60000 - n)
    from (select n, coalesce((array['RUNNING', 'WAITING', 'WAITING', 'PARKED', 'PARKED', 'ACCEPTED',
                                    'DEAD'])[n % 50], 'SUCCEEDED') as state
            from generate_series(1, 50000) n) x;
insert into towpath.key_gate (consumer_group, source, lane, head)
  select distinct on (consumer_group, source, lane) consumer_group, source, lane, id from towpath.task
   where state = 'WAITING';
insert into towpath.dead_letter (consumer_group, message_id, stage, source, reason_code, fingerprint, state)
  select consumer_group, id, 'handle', source, 'r', 'f', 'open' from towpath.task where state = 'DEAD';
insert into towpath.task_event (consumer_group, task_id, event)
  select consumer_group, id, 'x' from towpath.task, generate_series(1, 2);
"""


@pytest.mark.parametrize("size", ["empty", "filled", "filled and analysed"])
async def test_no_statement_of_the_engine_scans_a_table(
    db: "asyncpg.Connection[Any]", migrated_url: str, size: str
) -> None:
    """C17: the plan is right on an empty, never-analysed table, and stays so while it fills."""
    if size != "empty":
        await db.execute(FILL)
    if size == "filled and analysed":
        await db.execute("analyze")
    connection = await pinned(migrated_url)
    try:
        wrong: dict[str, list[str]] = {}
        for name in STATEMENTS:
            if name == "expire_finished":
                await connection.execute("set enable_bitmapscan = on")
            found = scans(await plan_of(connection, name))
            await connection.execute("reset enable_bitmapscan")
            if found:
                wrong[name] = found
        assert wrong == {}
    finally:
        await connection.close()


@pytest.mark.parametrize("size", ["empty", "filled and analysed"])
async def test_statements_in_handlers_transactions_need_no_planner_pins(
    db: "asyncpg.Connection[Any]", size: str
) -> None:
    """C17: handlers' own connections are not pinned."""
    if size != "empty":
        await db.execute(FILL)
        await db.execute("analyze")
    await db.execute("set plan_cache_mode = force_generic_plan")
    wrong = {name: found for name in sorted(UNPINNED) if (found := scans(await plan_of(db, name)))}
    assert wrong == {}


@pytest.mark.parametrize("size", ["empty", "filled", "filled and analysed"])
async def test_rows_are_found_by_their_whole_key(
    db: "asyncpg.Connection[Any]", migrated_url: str, size: str
) -> None:
    """C17: an index scan over a whole group is a scan in disguise."""
    skip_while_empty(size, db)
    if size != "empty":
        await db.execute(FILL)
    if size == "filled and analysed":
        await db.execute("analyze")
    connection = await pinned(migrated_url)
    try:
        by_id = {
            "claim_tasks": "t",
            "park_tasks": "t",
            "states": "t",
            "start_due": "t",
            "succeed": "t",
            "succeed_with_results": "t",
            "settle_one": "t",
            "promote": "task",
            "wait": "t",
            "keep": "t",
            "mark_effect": "t",
            "unmark_effect": "t",
            "doubt": "t",
            "doubt_abandoned": "t",
            "resolve": "t",
            "end": "t",
            "hand_back": "t",
            "reap": "t",
            "redrive": "t",
            "report_progress": "t",
            "cancellations": "t",
        }
        wrong = {}
        for name, alias in by_id.items():
            plan = await plan_of(connection, name)
            target = [node for node in plan if node.get("Alias") == alias and "Index Cond" in node]
            if not target or not all("id = " in node["Index Cond"] for node in target):
                wrong[name] = [node.get("Index Cond") for node in plan]
        assert wrong == {}
    finally:
        await connection.close()


async def test_searches_walk_the_partial_index_made_for_them(
    db: "asyncpg.Connection[Any]", migrated_url: str
) -> None:
    """Few rows run, wait or are parked beside millions that are finished."""
    await db.execute(FILL)
    await db.execute("analyze")
    connection = await pinned(migrated_url)
    try:
        expected = {
            "due": "task_due_of_type",
            "first_waiting": "task_due_of_type",
            "next_of_lanes": "task_parked",
            "abandoned": "task_running",
            "claims_of_worker": "task_running",
            "abandoned_anywhere": "task_running",
            "lost": "task_accepted",
        }
        found = {}
        for name in expected:
            plan = await plan_of(connection, name)
            found[name] = next(
                node["Index Name"]
                for node in plan
                if node.get("Relation Name") == "task" and "Index Name" in node
            )
        assert found == expected
    finally:
        await connection.close()


async def test_the_least_follower_is_found_without_sorting_the_lane(
    db: "asyncpg.Connection[Any]", migrated_url: str
) -> None:
    """A lane of many thousand followers is promoted one by one: each look must be cheap."""
    await db.execute(
        "insert into towpath.task (consumer_group, id, type, kind, source, lane, position, state, held_by) "
        "select 'g', gen_random_uuid(), 't', 'event', 's', 'hot', n, 'PARKED', 'database' "
        "from generate_series(1, 20000) n"
    )
    await db.execute("analyze")
    connection = await pinned(migrated_url)
    try:
        found = await connection.fetchval(
            f"explain (analyze, buffers, format json) {STATEMENTS['next_of_lanes']}".replace("$1", "'g'")
            .replace("$2", "'s'")
            .replace("$3", "'{hot}'")
        )
        root = json.loads(found)[0]["Plan"]
        assert root["Shared Hit Blocks"] + root["Shared Read Blocks"] < 50
    finally:
        await connection.close()


WAITING = """
insert into towpath.task (consumer_group, id, type, kind, source, key, lane, position, state, held_by, due_at,
                          waiting_for)
  select (array['g', 'h'])[n % 2 + 1], gen_random_uuid(), (array['held', 'later'])[n % 2 + 1], 'event', 's',
         'k' || n, 'k' || n, n, 'WAITING', 'database', clock_timestamp() + (n % 2 - 0.5) * interval '1h',
         'retry'
    from generate_series($1::int, $2::int) n
"""
GATES = """
insert into towpath.key_gate (consumer_group, source, lane, head)
  select consumer_group, source, lane, id from towpath.task where position between $1 and $2
"""
LOOKS = {
    "due": "'g', 100, '{later}', '{null}', 1, 1",
    "first_waiting": "'g', 1",
    "abandoned": "'g', 100, '{}'",
    "abandoned_anywhere": "'g', 100",
    "release_lost": "'g', 1, 100",
    "lost": "'g', 1, 100, true",
    "stale_gates": "'g', 's', 'k1', 100",
    "census": "'h', 100",
    "expire_finished": "'g', 3600, 1000",
    "take_doubts": "'g', '{t}', 1, 60, 100",
}
"""What every member asks again and again, with the arguments for it."""


async def test_what_waits_costs_the_due_poller_and_the_reaper_nothing(
    db: "asyncpg.Connection[Any]", migrated_url: str
) -> None:
    """C14: beside 50,000 that are due and may not start, or wait, a look reads as much as beside 500."""

    async def pages(connection: "asyncpg.Connection[Any]") -> dict[str, int]:
        found = {}
        for name, given in LOOKS.items():
            await connection.execute(
                f"set enable_bitmapscan = {'on' if name == 'expire_finished' else 'off'}"
            )
            await connection.execute(f"prepare examined as {STATEMENTS[name]}")
            analysed = f"explain (analyze, buffers, format json) execute examined({given})"
            root = json.loads(await connection.fetchval(analysed))[0]["Plan"]
            await connection.execute("deallocate examined")
            found[name] = root["Shared Hit Blocks"] + root["Shared Read Blocks"]
        return found

    connection = await pinned(migrated_url)
    try:
        counts = []
        for first, last in ((1, 500), (501, 50_000)):
            await db.execute(WAITING, first, last)
            await db.execute(GATES, first, last)
            await db.execute("select brin_summarize_new_values('towpath.task_created')")  # as vacuum does
            counts.append(await pages(connection))
        before, after = counts
        assert {name: count for name, count in after.items() if count > 2 * before[name] + 20} == {}, counts
    finally:
        await connection.close()
