"""No statement that an operator's bulk action repeats scans a table, however many rows there are."""

import json
from collections.abc import Mapping
from typing import Any, TypeAlias

import asyncpg
import pytest

from tests.plans.conftest import skip_while_empty
from tests.plans.test_consumer_plans import FILL, nodes, parameters, pinned, scans
from towpath.store.statements import load

Db: TypeAlias = "asyncpg.Connection[Any]"

STATEMENTS: Mapping[str, str] = {
    name: sql for file in ("operator", "repairs", "revisions", "audit") for name, sql in load(file).items()
}
IN_BATCHES = (
    "lanes_of_dead_letters",
    "lock_replay_gates",
    "lock_dead_tasks",
    "lock_open_dead_letters",
    "move_replay_gate",
    "drop_replay_gate",
    "revive_tasks",
    "republish",
    "open_publish_gates",
    "close_dead_letters",
    "record_moves",
    "retry_tasks",
    "lanes_of_finished",
    "lock_finished",
    "rerun_tasks",
    "revisions",
    "lock_for_edit",
    "missing",
    "import",
    "update",
)
BY_ID = {
    "lock_dead_tasks": "t",
    "lock_open_dead_letters": "d",
    "revive_tasks": "t",
    "close_dead_letters": "d",
    "retry_tasks": "t",
    "lock_finished": "t",
    "rerun_tasks": "t",
}


async def explained(connection: Db, name: str, *given: object) -> list[dict[str, Any]]:
    """The nodes of the plan: the generic one of a pinned session, else the one for these values."""
    sql = STATEMENTS[name]
    if given:
        rows = await connection.fetch(f"explain (format json) {sql}", *given)
        return list(nodes(json.loads(rows[0][0])[0]["Plan"]))
    await connection.execute(f"prepare examined as {sql}")
    try:
        nulls = parameters(sql)
        found = await connection.fetchval(f"explain (format json) execute examined({nulls})")
    finally:
        await connection.execute("deallocate examined")
    return list(nodes(json.loads(found)[0]["Plan"]))


@pytest.mark.parametrize("size", ["empty", "filled", "filled and analysed"])
async def test_the_batches_of_bulk_actions_scan_no_table(db: Db, migrated_url: str, size: str) -> None:
    """D3: 100,000 dead letters are released as quickly as the first thousand."""
    skip_while_empty(size, db)
    if size != "empty":
        await db.execute(FILL)
    if size == "filled and analysed":
        await db.execute("analyze")
    connection = await pinned(migrated_url)
    try:
        plans = {name: await explained(connection, name) for name in IN_BATCHES}
    finally:
        await connection.close()
    plans["missing, as a plan is made"] = await explained(db, "missing")

    assert {name: scans(plan) for name, plan in plans.items() if scans(plan)} == {}
    wide = {
        name: [node.get("Index Cond") for node in plans[name]]
        for name, alias in BY_ID.items()
        if not any(
            node.get("Alias") == alias and "id = " in node.get("Index Cond", "") for node in plans[name]
        )
    }
    assert wide == {}


async def test_a_page_of_dead_letters_is_read_off_an_index(db: Db) -> None:
    """D3: the newest are found without sorting the others."""
    await db.execute(
        """
        insert into towpath.dead_letter (consumer_group, message_id, stage, source, reason_code, fingerprint)
        select 'g' || n % 2, gen_random_uuid(), 'handle', 's', 'r', 'f' from generate_series(1, 20000) n
        """
    )
    await db.execute("analyze")

    for groups in (None, ["g1"]):
        plan = await explained(db, "list_dead_letters", groups, *[None] * 9, ["open"], None, 50)
        assert scans(plan) == []
        assert not [node for node in plan if "Sort" in node["Node Type"]]


async def test_what_waits_is_planned_from_the_index_of_what_waits(db: Db) -> None:
    await db.execute(FILL)
    await db.execute("analyze")
    soon = await db.fetchval("select towpath.clock()")

    plan = await explained(db, "plan_retry", ["g1"], *[None] * 7, soon)

    used = [node["Index Name"] for node in plan if "Index Name" in node]
    assert len(used) == 1
    assert used[0] in ("task_due", "task_due_of_type")
