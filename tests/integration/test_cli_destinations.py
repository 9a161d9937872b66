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
    assert (ran.code, ran.out) == (0, "orders: broker default, address orders, policy park_key\n")
    found = await ask(towpath, "destination", "set", "orders", "--address", "orders.v2")
    assert found == {
        "name": "orders",
        "broker": "default",
        "address": "orders.v2",
        "on_poison": "park_key",
    }
    [row] = await ask(towpath, "destination", "list")
    assert row == {
        "name": "orders",
        "broker": "default",
        "address": "orders.v2",
        "on_poison": "park_key",
        "gates": 0,
        "parked": 0,
        "paused_at": None,
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
          select g.id, 9, gen_random_uuid(), 'event', 't', 'k', 'text/plain', '[]', null, now()
          from towpath.publish_gate g where g.shard = 3
        """
    )
    rows = await ask(towpath, "destination", "list")
    assert [(row["name"], row["gates"], row["parked"]) for row in rows] == [("orders", 1, 1), ("views", 1, 0)]
    ran = await tell(towpath, "outbox", "status")
    assert "1 parked behind 1 refused" in ran.out
    assert "shards [5] are blocked" in ran.out


async def test_a_broker_is_added_listed_and_named_by_destinations(db: Db, towpath: Run) -> None:
    """R24, O1: recorded with who and why; its shards and its journal are there at once."""
    ran = await tell(towpath, "broker", "add", "events", "--actor", "ann", "--reason", "audit trail")
    assert ran.out == "events: number 1; start its relays with TOWPATH_RELAY__BROKER_NUMBER=1\n"
    assert (await tell(towpath, "broker", "add", "events")).code == 2
    ran = await tell(towpath, "destination", "set", "views", "--broker", "events")
    assert ran.out == "views: broker events, address views, policy park\n"
    ran = await tell(towpath, "destination", "set", "views", "--broker", "event")
    assert (ran.code, ran.err.count("\n")) == (2, 1)
    listed = await ask(towpath, "broker", "list")
    assert [(row["number"], row["name"], row["relays"], row["destinations"]) for row in listed] == [
        (0, "default", 0, 0),
        (1, "events", 0, 1),
    ]
    assert "events" in (await tell(towpath, "broker", "list")).out
    assert await db.fetchval("select towpath.shard('views', 'k', gen_random_uuid())") >= 16
    assert await db.fetchval("select count(*) from towpath.shard_progress") == 32
    assert len((await ask(towpath, "outbox", "status"))["shards"]) == 32
    [audit] = await db.fetch("select actor, reason, filter from towpath.audit where action = 'broker.add'")
    assert (audit["actor"], audit["reason"]) == ("ann", "audit trail")
    assert json.loads(audit["filter"]) == {"name": "events", "number": 1}


async def test_unsetting_is_a_move_too(db: Db, towpath: Run) -> None:
    """R10"""
    await tell(towpath, "broker", "add", "events")
    await tell(towpath, "destination", "set", "views", "--broker", "events")
    await db.execute("select towpath.emit('views', 'view.seen', '', 'k')")
    ran = await tell(towpath, "destination", "unset", "views")
    assert (ran.code, "stop its producers" in ran.err) == (2, True)


async def test_a_broker_that_nothing_names_any_more_is_not_missed(migrated_url: str, towpath: Run) -> None:
    """R15: its shards are spoken of again as soon as something waits there."""
    await tell(towpath, "broker", "add", "events")
    await tell(towpath, "destination", "set", "views", "--broker", "events")

    async def shards() -> int:
        return len((await ask(towpath, "outbox", "status"))["shards"])

    assert await shards() == 32
    late = await asyncpg.connect(migrated_url, timeout=30)
    transaction = late.transaction()
    await transaction.start()
    await late.execute("select towpath.emit('views', 'view.seen', '', 'k')")
    assert (await tell(towpath, "destination", "unset", "views")).code == 0
    assert await shards() == 16
    await transaction.commit()
    await late.close()
    assert await shards() == 17
