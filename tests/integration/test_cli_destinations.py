"""`towpath destination`: addresses and policies, validated, recorded, and shown with what waits."""

import json
from typing import TypeAlias

import asyncpg
import pytest

from tests.fixtures.fix_cli import Run
from tests.integration.test_cli_commands import ask, tell

Db: TypeAlias = "asyncpg.Connection[object]"


async def test_a_destination_is_set_listed_and_unset(db: Db, towpath: Run) -> None:
    """O1: what is not given stays as it is; every change is recorded with who and why."""
    assert await ask(towpath, "destination", "list") == []
    ran = await tell(
        towpath,
        "destination",
        "set",
        "orders",
        "--on-poison",
        "park_key",
        "--actor",
        "ann",
        "--reason",
        "order",
    )
    assert (ran.code, ran.out) == (0, "orders: address orders, policy park_key\n")
    found = await ask(towpath, "destination", "set", "orders", "--address", "orders.v2")
    assert found == {"name": "orders", "address": "orders.v2", "on_poison": "park_key"}
    [row] = await ask(towpath, "destination", "list")
    assert row == {
        "name": "orders",
        "broker": "default",
        "address": "orders.v2",
        "on_poison": "park_key",
        "gates": 0,
        "parked": 0,
    }
    assert (await tell(towpath, "destination", "unset", "orders")).code == 0
    assert (await tell(towpath, "destination", "unset", "orders")).code == 1
    audits = await db.fetch("select actor, action, reason, filter from towpath.audit order by id")
    assert [row["action"] for row in audits] == ["destination.set", "destination.set", "destination.unset"]
    assert (audits[0]["actor"], audits[0]["reason"]) == ("ann", "order")
    assert json.loads(audits[0]["filter"])["on_poison"] == "park_key"


@pytest.mark.parametrize(
    "arguments",
    [("set", "orders"), ("set", "orders", "--on-poison", "stop"), ("set", "or ders", "--address", "x")],
)
async def test_a_destination_that_cannot_be_is_refused(
    db: Db, towpath: Run, arguments: tuple[str, ...]
) -> None:
    """O2"""
    ran = await tell(towpath, "destination", *arguments)
    assert ran.code == 2
    assert ran.err.count("\n") == 1
    assert await db.fetchval("select count(*) from towpath.destination") == 0


async def test_what_waits_for_a_decision_is_shown_where_no_relay_runs(db: Db, towpath: Run) -> None:
    """R15: gates and parked messages by destination, blocked shards in the status."""
    await db.execute(
        """
        insert into towpath.publish_gate (shard, destination, key, policy, message_id, sequence) values
          (3, 'orders', 'k', 'park_key', gen_random_uuid(), 1),
          (5, 'views', null, 'block', gen_random_uuid(), 2);
        insert into towpath.parked_message
          select g.id, 9, gen_random_uuid(), 'event', 't', 'text/plain', '[]', null, now()
          from towpath.publish_gate g where g.shard = 3
        """
    )
    rows = await ask(towpath, "destination", "list")
    assert [(row["name"], row["gates"], row["parked"]) for row in rows] == [("orders", 1, 1), ("views", 1, 0)]
    ran = await tell(towpath, "outbox", "status")
    assert "1 parked behind 1 refused" in ran.out
    assert "shards [5] are blocked" in ran.out
