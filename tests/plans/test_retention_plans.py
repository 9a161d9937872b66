"""What is checked under a slot's lock goes by index, whatever the slot holds."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.plans.test_relay_plans import fill, generic_plan, like_the_relay
from towpath.relay.retention import RETENTION
from towpath.store.retention import Retention

SLOT_STATEMENTS = ("verdict", "oldest_age", "delete_sent")


@pytest.fixture(params=[False, True], ids=["never analysed", "filled"])
async def connection(request: pytest.FixtureRequest, db: Any, migrated_url: str) -> AsyncIterator[Any]:
    """As the retention loop has it."""
    if request.param:
        await fill(db)
    async with like_the_relay(migrated_url) as connection:
        for name, value in RETENTION.items():
            await connection.execute(f"set {name} = '{value}'")
        yield connection


async def test_no_statement_about_a_slot_scans_it(connection: Any) -> None:
    """R12, R22: polls wait while the verdict is found, so it must not grow with what is retained."""
    store = Retention()
    for slot in range(4):
        for name in SLOT_STATEMENTS:
            plan = await generic_plan(connection, store.statements(slot)[name])
            kinds = {node["Node Type"] for node in plan if node.get("Relation Name") == f"outbox_{slot}"} - {
                "ModifyTable"
            }
            allowed = {"Index Scan", "Index Only Scan", "Tid Scan", "Tid Range Scan"}
            assert kinds, name
            assert kinds <= allowed, name


async def test_rows_of_what_was_in_progress_are_found_by_their_transaction(connection: Any) -> None:
    """R22: the verdict looks for one row past the cut by shard and transaction; by shard it would read all.

    What else it reads of a slot by the index is one row per shard, in the index's order.
    """
    store = Retention()
    for slot in range(4):
        plan = await generic_plan(connection, store.statements(slot)["verdict"])
        scans = [node for node in plan if node.get("Relation Name") == f"outbox_{slot}"]
        assert sum("xid" in node.get("Index Cond", "") for node in scans) == 2
        assert [node for node in scans if "Filter" in node] == []
