"""Stopping and resuming, how relays and groups stand, where one message is: from the database alone."""

import json
from typing import Any, TypeAlias
from uuid import UUID, uuid4

import asyncpg
import pytest

from tests.fixtures.fix_cli import Run
from tests.fixtures.graveyard import TRACE, bury
from tests.integration.relaying import emit
from tests.integration.test_cli_commands import ask, tell
from tests.integration.test_reaping import journal

Db: TypeAlias = "asyncpg.Connection[Any]"
AUDITED = "select action, actor, reason, filter::text as filter from towpath.audit order by id"


async def test_publishing_is_paused_and_resumed_once_and_recorded(db: Db, towpath: Run) -> None:
    """O1: asked, previewed, told in the status; what is so already changes nothing."""
    ran = await tell(towpath, "outbox", "pause", "--destination", "orders")
    assert (ran.code, "--yes" in ran.err) == (2, True)
    ran = await tell(towpath, "outbox", "pause", "--destination", "orders", "--dry-run")
    assert (ran.code, ran.out) == (0, "to pause: orders\ndry run: nothing was changed\n")
    orders = (
        "outbox",
        "pause",
        "-d",
        "orders",
        "-d",
        "orders",
        "--yes",
        "--actor",
        "ann",
        "--reason",
        "moves",
    )
    found = await ask(towpath, *orders)
    assert found["done"] == [{"name": "orders", "type": ""}]
    assert await ask(towpath, *orders) == found | {"planned": [], "done": []}
    await tell(towpath, "outbox", "pause", "--all", "--yes", "--actor", "ann")
    status = await ask(towpath, "outbox", "status")
    assert [(row["name"], row["actor"], row["reason"]) for row in status["pauses"]] == [
        ("orders", "ann", "moves"),
        ("*", "ann", ""),
    ]
    assert "moves" in (await tell(towpath, "outbox", "status")).out
    [row] = await ask(towpath, "destination", "list")
    assert row["paused_at"] is not None
    found = await ask(towpath, "outbox", "resume", "-d", "orders", "--yes", "--actor", "bob")
    assert [each["name"] for each in found["in_force"]] == ["*"]
    await tell(towpath, "outbox", "pause", "-d", "views", "--yes", "--actor", "ann")
    found = await ask(towpath, "outbox", "resume", "--all", "--yes", "--actor", "bob")
    assert (len(found["done"]), found["in_force"]) == (2, [])
    audited = [tuple(row)[:3] for row in await db.fetch(AUDITED)]
    assert audited == [
        ("outbox.pause", "ann", "moves"),
        ("outbox.pause", "ann", ""),
        ("outbox.resume", "bob", ""),
        ("outbox.pause", "ann", ""),
        ("outbox.resume", "bob", ""),
    ]


@pytest.mark.parametrize("arguments", [(), ("--all", "-d", "orders"), ("-d", "not a name")])
@pytest.mark.parametrize("verb", ["pause", "resume"])
async def test_a_pause_of_nothing_in_particular_is_refused(
    towpath: Run, verb: str, arguments: tuple[str, ...]
) -> None:
    """O2"""
    ran = await tell(towpath, "outbox", verb, *arguments, "--yes")
    assert (ran.code, ran.err.count("\n")) == (2, 1)


async def test_a_group_is_paused_by_type_and_resumed_as_a_whole(db: Db, towpath: Run) -> None:
    """O1: other groups stay as they are."""
    await ask(towpath, "worker", "pause", "-g", "billing", "-t", "a", "-t", "b", "--yes", "--reason", "down")
    await ask(towpath, "worker", "pause", "-g", "billing", "--yes")
    await ask(towpath, "worker", "pause", "-g", "shipping", "--yes")
    found = await ask(towpath, "worker", "resume", "-g", "billing", "-t", "b", "--yes")
    assert found["done"] == [{"name": "billing", "type": "b"}]
    [row] = await ask(towpath, "worker", "status", "--group", "billing")
    assert [each["type"] for each in row["pauses"]] == ["a", ""]
    found = await ask(towpath, "worker", "resume", "-g", "billing", "--yes")
    assert found["done"] == [{"name": "billing", "type": "a"}, {"name": "billing", "type": ""}]
    assert [each["name"] for each in found["in_force"]] == ["shipping"]
    actions = [row["action"] for row in await db.fetch(AUDITED)]
    assert actions == ["worker.pause"] * 3 + ["worker.resume"] * 2


async def test_the_status_of_relays_says_who_lives_and_what_has_no_owner(db: Db, towpath: Run) -> None:
    """R15: also of one that beat long ago."""
    await db.execute(
        "insert into towpath.relay (id, host, version, seen_at) values"
        " ($1, 'alpha', '0.2', now()), ($2, 'beta', '0.1', now() - interval '5 minutes')",
        UUID(int=1),
        UUID(int=2),
    )
    await db.execute(
        "update towpath.shard_lease set relay = $1, epoch = 3, lease_until = towpath.clock() + '1 hour'"
        " where shard < 4",
        UUID(int=1),
    )
    await emit(db, "k", b"1")
    report = await ask(towpath, "relay", "status")
    alpha, beta = sorted(report["relays"], key=lambda row: str(row["host"]))
    assert (alpha["is_alive"], alpha["shards"], alpha["wakeup"]) == (True, [0, 1, 2, 3], "poll")
    assert (beta["is_alive"], beta["shards"]) == (False, [])
    assert (alpha["version"], beta["version"]) == ("0.2", "0.1")
    assert (report["pending"], report["unowned_count"], len(report["shards"])) == (1, 12, 16)
    await db.execute("select setval('towpath.relays_asleep_until', 33000000000)")
    report = await ask(towpath, "relay", "status")
    assert {row["wakeup"] for row in report["relays"]} == {"notify"}
    ran = await tell(towpath, "relay", "status")
    assert "1 relays alive; 1 pending" in ran.out
    assert "12 of 16 shards have no owner" in ran.out


async def test_the_status_of_groups_counts_members_and_work(db: Db, towpath: Run) -> None:
    """R15, O1: a dead member is told as such."""
    assert await ask(towpath, "worker", "status") == []
    await bury(db, ["a", "b"])
    await db.execute(
        "insert into towpath.worker (id, consumer_group, host, version, lease_until) values"
        " ($1, 'billing', 'h1', '0.2', now() + interval '1 hour'),"
        " ($2, 'billing', 'h2', '0.1', now() - interval '1 hour')",
        UUID(int=1),
        UUID(int=2),
    )
    await db.execute(
        "update towpath.task set state = 'RUNNING', worker = $1, token = $1, finished_at = null"
        " where key = 'a'",
        UUID(int=1),
    )
    [row] = await ask(towpath, "worker", "status")
    assert (row["consumer_group"], row["alive"], row["running"], row["dead_letters"]) == ("billing", 1, 1, 2)
    columns = ("host", "version", "is_alive", "running")
    assert [tuple(each[name] for name in columns) for each in row["workers"]] == [
        ("h1", "0.2", True, 1),
        ("h2", "0.1", False, 0),
    ]
    assert row["oldest_running_seconds"] > 86_000
    ran = await tell(towpath, "worker", "status")
    assert all(word in ran.out for word in ("h1", "0.2", "2d"))


async def test_one_message_is_found_wherever_it_is(db: Db, towpath: Run) -> None:
    """O4: before and after the relay, behind a gate, refused, and with the tasks made of it."""
    headers = json.dumps([["traceparent", TRACE], ["authorization", "secret"]])
    await emit(db, "k", b"body", headers=headers)
    first = await db.fetchrow("select * from towpath.outbox")
    assert first is not None
    [row] = (await ask(towpath, "outbox", "show", str(first["id"])))["rows"]
    assert (row["status"], row["destination"], row["key"]) == ("PENDING", "orders", "k")
    assert (row["trace_id"], row["header_names"]) == (TRACE.split("-")[1], "traceparent, authorization")
    ran = await tell(towpath, "outbox", "show", str(first["message_id"]))
    assert ("body" in ran.out, "secret" in ran.out) == (False, False)
    ran = await tell(towpath, "outbox", "show", str(first["message_id"]), "--payload")
    assert ("body" in ran.out, "secret" in ran.out) == (True, True)

    await db.execute(
        "with gate as (insert into towpath.publish_gate (shard, destination, policy)"
        " values (3, 'orders', 'pause') returning id)"
        " insert into towpath.parked_message select g.id, o.id, o.message_id, o.kind, o.type, o.key,"
        " o.content_type, o.headers, o.payload, o.created_at from gate g, towpath.outbox o"
    )
    await db.execute(
        "insert into towpath.pause (kind, name, actor, reason) values ('publish', '*', 'ann', '')"
    )
    [row] = (await ask(towpath, "outbox", "show", str(first["message_id"])))["rows"]
    assert (row["status"], row["is_paused"]) == ("PAUSED", True)
    await db.execute("truncate towpath.parked_message, towpath.publish_gate, towpath.pause")

    await journal(db)
    [row] = (await ask(towpath, "outbox", "show", str(first["message_id"])))["rows"]
    assert (row["status"], row["is_paused"]) == ("SENT", False)
    [refused] = await bury(db, ["k"], stage="publish", positions=[first["id"]])
    await db.execute("update towpath.dead_letter set message_id = $1", first["message_id"])
    report = await ask(towpath, "outbox", "show", str(first["message_id"]))
    assert [row["status"] for row in report["rows"]] == ["REFUSED (open)"]
    assert [row["stage"] for row in report["dead_letters"]] == ["publish"]

    [handled] = await bury(db, ["k"])
    report = await ask(towpath, "outbox", "show", str(handled))
    assert (report["rows"], [row["state"] for row in report["tasks"]]) == ([], ["DEAD"])
    later = uuid4()
    await db.execute(
        "select towpath.emit('orders', 't', 'body', message_id => $1, due_at => now() + interval '1 h')",
        later,
    )
    [row] = (await ask(towpath, "outbox", "show", str(later)))["rows"]
    assert (row["status"], row["due_at"] is not None) == ("DELAYED", True)
    for unknown in (str(refused), "77"):
        ran = await tell(towpath, "outbox", "show", unknown)
        assert (ran.code, ran.err.count("\n")) == (1, 1)
