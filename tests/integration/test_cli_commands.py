"""Every command: what it prints, the JSON it promises, its exit code, and its patience with hostile text."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any, TypeAlias
from uuid import UUID, uuid4

import asyncpg
import pytest

from tests.fixtures.fix_cli import Ran, Run
from tests.fixtures.graveyard import TRACE, bury, everything
from tests.fixtures.json_documents import check_document
from towpath.brokers.factory import broker_from_url

Db: TypeAlias = "asyncpg.Connection[Any]"

TRACE_ID = TRACE.split("-")[1]
CAUSE = {
    "consumer_group": str,
    "stage": str,
    "type": str,
    "reason_code": str,
    "error_class": str,
    "fingerprint": str,
    "count": int,
    "keys": int,
    "first_dead_at": str,
    "last_dead_at": str,
    "replay_count": int,
    "sample_id": int,
    "error_message": str,
}
LETTER = {
    **dict.fromkeys(("id", "position", "attempts", "death_count", "replay_count", "followers_passed"), int),
    **dict.fromkeys(("consumer_group", "message_id", "stage", "state", "type", "kind", "source", "key"), str),
    **dict.fromkeys(("reason_code", "error_class", "error_message", "fingerprint", "content_type"), str),
    **dict.fromkeys(("trace", "trace_id", "first_dead_at", "last_dead_at"), str),
    **{name: type(None) for name in ("copy_error", "closed_at")},
    "payload_bytes": int,
}
TASK = {
    **dict.fromkeys(("attempt", "deliveries", "version", "run_no"), int),
    **dict.fromkeys(("consumer_group", "id", "type", "kind", "source", "key", "owner", "state"), str),
    **dict.fromkeys(("held_by", "reason_code", "error_class", "error_message", "fingerprint"), str),
    **dict.fromkeys(("created_at", "updated_at", "started_at", "finished_at", "trace", "trace_id"), str),
    **{name: type(None) for name in ("waiting_for", "worker", "due_at", "deadline_at")},
}
RESULT = {
    **dict.fromkeys(("planned", "done", "parked", "skipped", "capped", "beyond_limit"), int),
    "action": str,
    "dry_run": bool,
    "made_at": str,
    "audit_id": type(None),
    "causes": list,
    "sample_ids": list,
}


def shape(row: dict[str, Any]) -> dict[str, type]:
    return {name: type(value) for name, value in row.items()}


async def ask(towpath: Run, *arguments: str) -> Any:
    """What a command says, in the published shape."""
    ran = await asyncio.to_thread(towpath, *arguments, "--json")
    assert (ran.code, ran.err) == (0, "")
    check_document([*arguments, "--json"], ran.out)
    return json.loads(ran.out)


async def tell(towpath: Run, *arguments: str) -> Ran:
    return await asyncio.to_thread(towpath, *arguments)


async def test_lists_promise_the_same_json_every_time(db: Db, towpath: Run) -> None:
    """O1"""
    await bury(db, ["o-1"])

    assert [shape(row) for row in await ask(towpath, "dlq", "summary")] == [CAUSE]
    assert [shape(row) for row in await ask(towpath, "dlq", "list")] == [LETTER]
    assert [shape(row) for row in await ask(towpath, "tasks", "list")] == [TASK]
    assert shape(await ask(towpath, "dlq", "replay", "--all", "--dry-run")) == RESULT


async def test_empty_lists_are_empty_json_and_say_so_in_words(towpath: Run, db: Db) -> None:
    """O1"""
    for arguments, words in (
        (("dlq", "summary"), "no open dead letters"),
        (("dlq", "list"), "no dead letters"),
        (("tasks", "list"), "no tasks"),
    ):
        assert await ask(towpath, *arguments) == []
        assert (await tell(towpath, *arguments)).out == f"{words}\n"
    assert (await tell(towpath, "dlq", "replay", "--all", "--yes")).out == "nothing to do\n"


async def test_the_summary_counts_causes_and_comes_in_order(db: Db, towpath: Run) -> None:
    await bury(db, ["a", "a", "b"])
    await bury(db, ["c"], reason="timeout", fingerprint="other")

    rows = await ask(towpath, "dlq", "summary")

    assert [(row["reason_code"], row["count"], row["keys"]) for row in rows] == [
        ("http_503", 3, 2),
        ("timeout", 1, 1),
    ]
    assert [row["reason_code"] for row in await ask(towpath, "dlq", "summary", "--limit", "1")] == [
        "http_503"
    ]


async def test_dead_letters_are_listed_newest_first_page_by_page(db: Db, towpath: Run) -> None:
    await bury(db, [f"k{n}" for n in range(5)])

    first = await ask(towpath, "dlq", "list", "--limit", "3")
    rest = await ask(towpath, "dlq", "list", "--limit", "3", "--before", str(first[-1]["id"]))

    assert [row["key"] for row in first + rest] == ["k4", "k3", "k2", "k1", "k0"]


async def test_closed_dead_letters_are_listed_on_request(db: Db, towpath: Run) -> None:
    await bury(db, ["a", "b"])
    await ask(towpath, "dlq", "discard", "--key", "a", "--yes")

    assert [row["key"] for row in await ask(towpath, "dlq", "list")] == ["b"]
    assert [row["key"] for row in await ask(towpath, "dlq", "list", "--state", "discarded")] == ["a"]
    assert [row["key"] for row in await ask(towpath, "dlq", "list", "--state", "all")] == ["b", "a"]


async def test_one_dead_letter_is_shown_with_its_trace_and_without_its_body(db: Db, towpath: Run) -> None:
    """O4"""
    [message] = await bury(db, ["o-1"])

    [row] = await ask(towpath, "dlq", "show", str(message))

    assert row["trace_id"] == TRACE_ID
    assert row["task_state"] == "DEAD"
    assert row["payload_bytes"] == 8
    assert "payload" not in row
    assert "headers" not in row
    text = await tell(towpath, "dlq", "show", str(row["id"]))
    assert TRACE_ID in text.out
    assert "acme" not in text.out


async def test_a_body_is_shown_on_request_as_text_or_base64(db: Db, towpath: Run) -> None:
    """R17"""
    text, raw = await bury(db, ["a", "b"])
    await db.execute("update towpath.dead_letter set payload = '\\xff00' where message_id = $1", raw)

    [shown] = await ask(towpath, "dlq", "show", str(text), "--payload")
    assert (shown["payload"], shown["payload_base64"]) == ('{"n": 1}', None)
    assert shown["headers"] == [["tenant", "acme"]]
    [shown] = await ask(towpath, "dlq", "show", str(raw), "--payload")
    assert (shown["payload"], shown["payload_base64"]) == (None, "/wA=")


async def test_a_task_is_shown_with_its_history_and_its_dead_letter(db: Db, towpath: Run) -> None:
    """O4"""
    [message] = await bury(db, ["o-1"])
    await ask(towpath, "dlq", "replay", "--all", "--yes", "--actor", "ada", "--reason", "it is back")

    [row] = await ask(towpath, "tasks", "show", str(message))

    assert (row["state"], row["trace_id"], row["dead_letter_state"]) == ("WAITING", TRACE_ID, "replayed")
    [line] = row["history"]
    assert (line["event"], line["actor"], line["error_message"]) == ("task.replayed", "ada", "it is back")
    text = (await tell(towpath, "tasks", "show", str(message))).out
    assert "task.replayed" in text
    assert "it is back" in text
    missing = await tell(towpath, "tasks", "show", str(message), "--group", "shipping")
    assert missing.code == 1


async def test_tasks_are_filtered_by_state_type_key_owner_and_group(db: Db, towpath: Run) -> None:
    await bury(db, ["a", "b"])
    await bury(db, ["c"], group="shipping", type_="parcel.sent")
    await db.execute("update towpath.task set owner = 'acme' where key = 'b'")
    await ask(towpath, "dlq", "replay", "--key", "a", "--yes")

    for arguments, expected in (
        (("--state", "dead"), {"b", "c"}),
        (("--state", "WAITING", "--state", "DEAD"), {"a", "b", "c"}),
        (("--type", "parcel.sent"), {"c"}),
        (("--key", "a"), {"a"}),
        (("--owner", "acme"), {"b"}),
        (("--group", "shipping", "--group", "billing"), {"a", "b", "c"}),
        (("--group", "nobody"), set()),
    ):
        assert {row["key"] for row in await ask(towpath, "tasks", "list", *arguments)} == expected

    newest = await ask(towpath, "tasks", "list", "--limit", "2")
    older = await ask(towpath, "tasks", "list", "--before", newest[-1]["id"])
    assert [row["key"] for row in newest + older] == ["c", "b", "a"]


async def test_outbox_status_counts_what_is_not_published(db: Db, towpath: Run) -> None:
    """R15"""
    for number in range(5):
        await db.execute("select towpath.emit('orders', 'order.placed', '{}', $1)", f"k{number}")
    await db.execute("update towpath.outbox set created_at = towpath.clock() - interval '90 minutes'")

    report = await ask(towpath, "outbox", "status")

    assert report["pending"] == 5
    assert 5400 <= report["oldest_age_seconds"] < 5 * 3600
    assert report["relay_count"] == 0
    assert [shard["shard"] for shard in report["shards"]] == list(range(16))
    assert len(report["slots"]) == 4
    text = (await tell(towpath, "outbox", "status")).out
    assert text.startswith("5 pending, oldest 1h3")
    assert "16 of 16 shards have no owner: is a relay running?" in text


async def test_outbox_status_knows_what_is_published_and_who_owns_it(db: Db, towpath: Run) -> None:
    """R15"""
    await db.execute("select towpath.emit('orders', 'order.placed', '{}', 'a')")
    relay = uuid4()
    await db.execute("insert into towpath.relay (id, host) values ($1, 'host-7')", relay)
    await db.execute(
        "update towpath.shard_lease set relay = $1, epoch = 1, lease_until = now() + interval '1 hour'",
        relay,
    )
    await db.execute(
        """
        insert into towpath.journal (relay, shards, epochs, last_ids, snapshot_from, snapshot_to)
        select $1, array_agg(shard), array_agg(1), array_agg(null::bigint), pg_current_snapshot(),
               pg_current_snapshot() from towpath.shard_lease
        """,
        relay,
    )
    await db.execute("select towpath.emit('orders', 'order.placed', '{}', 'a')")

    report = await ask(towpath, "outbox", "status")

    assert (report["pending"], report["relay_count"]) == (1, 1)
    [busy] = [shard for shard in report["shards"] if shard["pending"]]
    assert (busy["relay_host"], busy["is_owned"], busy["epoch"]) == ("host-7", True, 1)
    sent = await db.fetchval("select count(*) from towpath.outbox_message where status = 'SENT'")
    assert sent == 1


async def test_a_bulk_action_without_a_terminal_asks_for_yes(db: Db, towpath: Run) -> None:
    """O1"""
    await bury(db, ["a"])
    before = await everything(db)

    ran = await tell(towpath, "dlq", "replay", "--all")

    assert (ran.code, ran.out) == (2, "")
    assert ran.err == "towpath: there is no terminal to ask on: add --yes, or --dry-run to see the plan\n"
    assert await everything(db) == before


@pytest.mark.parametrize(("answer", "code"), [("y\n", 0), ("n\n", 1), ("", 1)])
async def test_a_bulk_action_previews_and_asks(
    db: Db, towpath: Run, monkeypatch: pytest.MonkeyPatch, answer: str, code: int
) -> None:
    """O1"""
    import io
    import sys

    await bury(db, ["a"])
    before = await everything(db)
    terminal = io.StringIO(answer)
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stdin", terminal)

    ran = await tell(towpath, "dlq", "replay", "--all")

    assert ran.code == code
    assert "to replay: 1, for example" in ran.out
    assert ("replayed 1 (audit" in ran.out) == (code == 0)
    if code:
        assert "stopped, nothing was changed" in ran.err
        assert await everything(db) == before


async def test_a_bulk_action_without_any_filter_needs_all(db: Db, towpath: Run) -> None:
    """O1"""
    ran = await tell(towpath, "dlq", "replay", "--yes")

    assert ran.code == 2
    assert "add one, or --all" in ran.err


HOSTILE = [
    "",
    " ",
    "'; drop schema towpath cascade; --",
    '"; drop table towpath.task; --',
    "$1",
    "{}",
    "%s%n%(x)s",
    "[bold red]x[/]",
    "\x1b[2J\x1b[31mred\x07",
    "\u202egnp.exe",
    "a\nb\r\nc\td",
    "../../etc/passwd",
    "--help",
    "-1",
    "💥" * 50,
    "\udcff\udcfe",
    "x" * 5000,
    "NaN",
    "99999999999999999999999",
    "0x10",
    "１２",
    "1e400d",
    "9999999999d",
    "0001-01-01T00:00+23:59",
]
ARGUMENTS = [
    *(
        ("dlq", "list", option)
        for option in ("--group", "--type", "--reason-code", "--fingerprint", "--stage")
    ),
    *(("dlq", "list", option) for option in ("--key", "--id", "--since", "--until", "--state", "--before")),
    ("dlq", "list", "--limit"),
    ("dlq", "summary", "--group"),
    ("dlq", "show"),
    *(("dlq", "replay", "--dry-run", option) for option in ("--key", "--max", "--rate", "--max-repeats")),
    ("dlq", "replay", "--dry-run", "--group", "billing", "--actor"),
    ("dlq", "replay", "--dry-run", "--group", "billing", "--reason"),
    ("dlq", "discard", "--dry-run", "--fingerprint"),
    *(
        ("tasks", "list", option)
        for option in ("--group", "--state", "--type", "--key", "--owner", "--before")
    ),
    ("tasks", "show"),
    ("tasks", "show", "01a228ce-275e-74ae-9c50-85c29c909e84", "--group"),
    ("db", "roles", "--prefix"),
    ("worker", "validate"),
    ("broker", "check", "--app"),
    ("destination", "set", "orders", "--on-poison"),
    ("destination", "set", "orders", "--reason"),
    ("destination", "unset"),
    ("outbox", "republish", "--dry-run", "--since"),
    ("outbox", "republish", "--dry-run", "--since", "1h", "--where"),
]


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=" ".join)
async def test_hostile_text_in_any_argument_is_data_or_one_line_of_refusal(
    db: Db, towpath: Run, arguments: tuple[str, ...]
) -> None:
    """X2"""
    [message] = await bury(db, ["a"])
    before = await everything(db)

    for text in HOSTILE:
        ran = await tell(towpath, *arguments, text)
        assert ran.code in (0, 1, 2), (text, ran)
        assert "Traceback" not in ran.err, (text, ran)
        assert "\x1b" not in ran.out + ran.err, (text, ran)
        assert "\u202e" not in ran.out + ran.err, (text, ran)
        if ran.code and text != "--help":
            assert ran.err.count("\n") == 1, (text, ran)
            assert ran.err.startswith("towpath: "), (text, ran)
            assert "failed: " not in ran.err, (text, ran)

    assert await everything(db) == before
    assert isinstance(message, UUID)


async def test_hostile_text_in_rows_reaches_no_terminal(db: Db, towpath: Run) -> None:
    """X2"""
    evil = "\x1b]0;owned\x07\u202e[red]\n\u0085"
    [message] = await bury(db, [evil], message=evil, reason=evil, headers=json.dumps([[evil, evil]]))
    await db.execute("update towpath.task set owner = $1, type = $1", evil)
    await db.execute("update towpath.dead_letter set payload = $1", evil.encode())

    for arguments in (
        ("dlq", "list"),
        ("dlq", "summary"),
        ("dlq", "show", str(message), "--payload"),
        ("dlq", "replay", "--all", "--dry-run"),
        ("tasks", "list"),
        ("tasks", "show", str(message)),
    ):
        ran = await tell(towpath, *arguments)
        assert ran.code == 0
        for character in ("\x1b", "\x07", "\u202e", "\u0085"):
            assert character not in ran.out, arguments
        assert "[red]" in ran.out or arguments[1] == "show" or "replay" in arguments
        await ask(towpath, *arguments)


async def test_a_hundred_thousand_dead_letters_are_listed_and_summed_up_quickly(db: Db, towpath: Run) -> None:
    for _ in range(4):
        await bury(db, [f"k{n}" for n in range(25_000)], is_ordered=False)
    began = time.monotonic()

    assert len(await ask(towpath, "dlq", "list", "--group", "billing", "--limit", "100")) == 100
    [cause] = await ask(towpath, "dlq", "summary")

    assert cause["count"] == 100_000
    assert time.monotonic() - began < 60  # generous: a second is usual


GROUP = """
from dataclasses import dataclass
from towpath import App, event

@event("bell.rung", destination="bells")
@dataclass
class Rung:
    times: int

app = App("ringers")

@app.idempotent()
async def hear(bell: Rung) -> None: ...
"""


async def test_a_broker_gets_what_is_missing_and_is_checked_for_it(
    towpath: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """O1"""
    (tmp_path / "ringers_group.py").write_text(GROUP)
    monkeypatch.syspath_prepend(tmp_path)
    url = f"memory://{uuid4()}"
    monkeypatch.setenv("TOWPATH_BROKER_URL", url)
    broker = broker_from_url(url)  # it lasts as long as somebody holds it
    wanted = ("--app", "ringers_group:app", "--address", "audits")

    before = await tell(towpath, "broker", "check", *wanted, "--json")
    planned = await ask(towpath, "broker", "apply", *wanted, "--dry-run")
    created = await ask(towpath, "broker", "apply", *wanted)
    again = await ask(towpath, "broker", "apply", *wanted)
    after = await ask(towpath, "broker", "check", *wanted)

    assert broker is not None
    assert before.code == 3
    assert json.loads(before.out)["ok"] is False
    assert "bells" in " ".join(created["created"])
    assert "audits" in " ".join(created["created"])
    assert planned["created"] == []
    assert "audits" in " ".join(planned["missing"]), "and nothing was made"
    assert again == {"dry_run": False, "created": [], "missing": []}
    assert after == {"ok": True, "problems": [], "warnings": []}
    assert (await tell(towpath, "broker", "check")).code == 2


async def test_a_group_gets_its_destinations_at_the_addresses_they_are_mapped_to(
    towpath: Run, db: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "mapped_group.py").write_text(GROUP)
    monkeypatch.syspath_prepend(tmp_path)
    url = f"memory://{uuid4()}"
    monkeypatch.setenv("TOWPATH_BROKER_URL", url)
    broker = broker_from_url(url)
    await db.execute("insert into towpath.destination (name, address) values ('bells', 'eu.bells')")

    created = await ask(towpath, "broker", "apply", "--app", "mapped_group:app")

    assert broker is not None
    words = " ".join(created["created"]).split()
    assert "eu.bells" in " ".join(words)
    assert "bells" not in words


async def test_an_app_is_validated_and_described(
    towpath: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """O1"""
    (tmp_path / "ringers_app.py").write_text(GROUP)
    monkeypatch.syspath_prepend(tmp_path)

    assert await ask(towpath, "worker", "validate", "ringers_app:app") == {
        "ok": True,
        "group": "ringers",
        "ordering": "key",
        "destinations": ["bells"],
        "handlers": {"bell.rung": "hear"},
        "problems": [],
    }
