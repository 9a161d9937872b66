"""On the caller's connection, whose planner is not ours, no producer or task statement scans a table."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from towpath.store.statements import load

LOOKUPS = {
    "the first of a dedupe key": """
        select t.id from towpath.task t
        where t.consumer_group = $1 and t.owner = $2 and t.request_hash = $3::text::bytea""",
    "the broker of a destination": "select d.broker from towpath.destination d where d.name = $1",
    "the head of a lane": """
        select g.head from towpath.key_gate g
        where g.consumer_group = $1 and g.source = $2 and g.lane = $3 for update""",
    "the follower in a lane": """
        select t.id from towpath.task t
        where t.consumer_group = $1 and t.source = $2 and t.lane = $3 and t.state = 'PARKED'
        order by t.position nulls first, t.id limit 1""",
}
"""What the functions of the schema do inside, where EXPLAIN does not look."""

STATEMENTS = {**LOOKUPS, **load("tasks")}
ID = "'00000000-0000-0000-0000-000000000000'"
ARGUMENTS = {
    "get_task": f"'g1', {ID}",
    "list_tasks": "'g1', null, null, null, null, null, 100",
    "cancel_task": f"'g1', {ID}, null",
    "the broker of a destination": "'d1'",
}


def nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for child in plan.get("Plans", []):
        yield from nodes(child)


async def fill(db: Any) -> None:
    await db.execute("""
        insert into towpath.task (consumer_group, id, type, kind, source, key, owner, request_hash, state,
                                  held_by, position, lane)
        select 'g' || g % 20, gen_random_uuid(), 't', 'task', 's', g::text, 'u' || g % 500,
               sha256(g::text::bytea), case g % 50 when 0 then 'PARKED' else 'ACCEPTED' end,
               'database', g, 'k'
        from generate_series(1, 20000) g;
        insert into towpath.destination (name, address) select 'd' || g, 'd' from generate_series(1, 2000) g;
        insert into towpath.key_gate
        select 'g', 's', g::text, gen_random_uuid() from generate_series(1, 2000) g;
        analyze""")


@pytest.mark.parametrize("mode", ["force_generic_plan", "force_custom_plan"])
async def test_each_statement_uses_an_index_on_filled_tables(db: Any, mode: str) -> None:
    """P6"""
    await fill(db)
    await db.execute(f"set plan_cache_mode = {mode}")
    for name, statement in STATEMENTS.items():
        await db.execute(f"prepare examined as {statement}")
        arguments = ARGUMENTS.get(name, "'x', 'x', 'x'")
        plan = json.loads(await db.fetchval(f"explain (format json) execute examined({arguments})"))[0][
            "Plan"
        ]
        await db.execute("deallocate examined")

        scanned = [node["Relation Name"] for node in nodes(plan) if node["Node Type"] == "Seq Scan"]
        assert (name, scanned) == (name, [])
