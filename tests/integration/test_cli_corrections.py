"""`towpath dlq edit | export | import`: corrected bodies, and dead letters as lines of JSON."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any, TypeAlias

import asyncpg
import pytest

from tests.fixtures.fix_cli import Ran, Run, towpath_on_terminal
from tests.fixtures.graveyard import bury, everything, tasks
from towpath.deadletters.editing import open_for_edit, revise
from towpath.errors import UsageError

Db: TypeAlias = "asyncpg.Connection[Any]"

APP = """
from dataclasses import dataclass
from towpath import App, event

@event("order.placed", destination="orders", key="order_id")
@dataclass(frozen=True)
class OrderPlaced:
    order_id: str
    amount: int

app = App("billing")

@app.idempotent()
async def invoice(order: OrderPlaced) -> None: ...
"""
GOOD, BAD = b'{"order_id": "o-1", "amount": 5}', b'{"order_id": "o-1", "amount": "five"}'


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with an app and two bodies."""
    (tmp_path / "correcting_shop.py").write_text(APP)
    (tmp_path / "good.json").write_bytes(GOOD)
    (tmp_path / "bad.json").write_bytes(BAD)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


async def dlq(towpath: Run, *arguments: str) -> Ran:
    return await asyncio.to_thread(towpath, "dlq", *arguments)


async def answer(towpath: Run, *arguments: str) -> Any:
    ran = await dlq(towpath, *arguments, "--json")
    assert (ran.code, ran.err) == (0, "")
    return json.loads(ran.out)


async def export(towpath: Run, desk: Path) -> None:
    """Everything that is open, into a file there."""
    ran = await dlq(towpath, "export")
    assert (ran.code, ran.err) == (0, "")
    (desk / "dead.jsonl").write_text(ran.out)


async def test_a_replay_sends_the_newest_correction_and_the_original_stays(
    db: Db, towpath: Run, desk: Path
) -> None:
    [message] = await bury(db, ["o-1"], has_body=True)
    app = ("--app", "correcting_shop:app", "--reason", "amount was text", "--actor", "ada")

    assert (await answer(towpath, "edit", str(message), "--payload", "bad.json", "--force"))["revision"] == 1
    assert await answer(towpath, "edit", "1", "--payload", "good.json", *app) == {
        "id": 1,
        "revision": 2,
        "is_validated": True,
    }
    assert (await answer(towpath, "edit", "1", "--header", "tenant=emca", "--drop-header", "x"))[
        "revision"
    ] == 3
    await answer(towpath, "replay", "--id", "1", "--yes")

    task = (await tasks(db))[message]
    assert (task["payload"], json.loads(task["headers"])) == (GOOD, [["tenant", "emca"]])
    letter = await db.fetchrow("select payload, headers from towpath.dead_letter")
    assert letter is not None
    assert (letter["payload"], json.loads(letter["headers"])) == (b'{"n": 1}', [["tenant", "acme"]])
    [shown] = await answer(towpath, "show", "1", "--payload")
    assert [(one["revision"], one["is_validated"], one["payload"]) for one in shown["revisions"]] == [
        (1, False, BAD.decode()),
        (2, True, GOOD.decode()),
        (3, True, GOOD.decode()),
    ]
    assert GOOD.decode() not in (await dlq(towpath, "show", "1")).out
    audit = await db.fetch("select action, actor, reason from towpath.audit order by id")
    assert [row["action"] for row in audit] == [*["dlq.edit"] * 3, "dlq.replay"]
    assert (audit[1]["actor"], audit[1]["reason"]) == ("ada", "amount was text")


async def test_a_correction_of_a_refused_message_goes_back_through_the_outbox(
    db: Db, towpath: Run, desk: Path
) -> None:
    await bury(db, ["o-1"], stage="publish")

    await answer(towpath, "edit", "1", "--payload", "good.json", "--app", "correcting_shop:app")
    await answer(towpath, "replay", "--stage", "publish", "--yes")

    assert await db.fetchval("select payload from towpath.outbox") == GOOD


async def test_a_body_that_is_not_of_its_type_or_cannot_be_checked_is_refused(
    db: Db, towpath: Run, desk: Path
) -> None:
    """X2"""
    await bury(db, ["o-1"])
    await bury(db, ["o-2"], group="shipping")
    before = await everything(db)
    app = ("--app", "correcting_shop:app")

    for arguments, code, word in (
        (("1", "--payload", "bad.json", *app), 1, "--force"),
        (("1", "--payload", "good.json"), 2, "--app"),
        (("2", "--payload", "good.json", *app), 2, "group shipping"),
        (("1", "--payload", "absent.json", *app), 2, "absent.json"),
        (("1", "--header", "tenant"), 2, "name=value"),
        (("1", "--header", "ce_id=x"), 2, "ours"),
        (("1", "--drop-header", "ce_id"), 2, "ours"),
        (("1",), 2, "no terminal"),
        (("99", "--header", "a=b"), 1, "no dead letter 99"),
    ):
        ran = await dlq(towpath, "edit", *arguments)
        assert (ran.code, word in ran.err) == (code, True), (arguments, ran)
    assert (await dlq(towpath, "edit", "1", "--header", "tenant=acme")).out == "nothing changed\n"
    assert await everything(db) == before
    assert await db.fetchval("select count(*) from towpath.dead_letter_revision") == 0
    await answer(towpath, "discard", "--id", "1", "--yes")
    assert "is discarded" in (await dlq(towpath, "edit", "1", "--header", "a=b")).err


async def test_an_export_comes_back_whole_and_a_second_time_changes_nothing(
    db: Db, towpath: Run, desk: Path
) -> None:
    """R17: bytes and headers as they were."""
    first, second = await bury(db, ["o-1", "o-1"], positions=[2, 1])
    await bury(db, ["p"], stage="publish")
    await bury(db, ["d"], stage="decode", group="shipping")
    await db.execute("update towpath.dead_letter set payload = '\\xff00' where message_id = $1", second)
    await db.execute(
        "update towpath.dead_letter set headers = $2::text::json where message_id = $1",
        first,
        '[["n", {"b64": "/wA="}], ["ü", "ü"]]',
    )
    await answer(towpath, "edit", "1", "--payload", "good.json", "--force")
    await export(towpath, desk)
    everything_before = await everything(db)
    revisions = await db.fetch("select to_jsonb(r) - 'dead_letter' from towpath.dead_letter_revision r")

    assert await answer(towpath, "import", "dead.jsonl") == {
        "dry_run": False,
        "read": 4,
        "imported": 0,
        "known": 4,
    }
    assert await everything(db) == everything_before

    await db.execute("truncate towpath.dead_letter cascade; truncate towpath.task")
    assert (await answer(towpath, "import", "dead.jsonl", "--dry-run"))["imported"] == 4
    assert await db.fetchval("select count(*) from towpath.dead_letter") == 0
    assert (await answer(towpath, "import", "dead.jsonl", "--reason", "truncated"))["imported"] == 4

    assert await _comparable(db) == _without_ids(everything_before["dead_letter"])
    assert (
        await db.fetch("select to_jsonb(r) - 'dead_letter' from towpath.dead_letter_revision r") == revisions
    )
    assert (await answer(towpath, "import", "dead.jsonl"))["imported"] == 0
    replayed = await answer(towpath, "replay", "--all", "--yes")
    assert (replayed["done"], replayed["skipped"], replayed["parked"]) == (4, 0, 1)
    rows = await tasks(db)
    assert (rows[second]["state"], rows[first]["state"]) == ("WAITING", "PARKED")
    assert (rows[second]["payload"], rows[first]["payload"]) == (b"\xff\x00", GOOD)


async def _comparable(db: Db) -> list[dict[str, Any]]:
    return _without_ids((await everything(db))["dead_letter"])


def _without_ids(rows: list[Any]) -> list[dict[str, Any]]:
    letters = [json.loads(row[0]) for row in rows]
    return sorted(({**one, "id": None} for one in letters), key=lambda one: str(one["message_id"]))


async def test_an_import_leaves_out_what_lives(db: Db, towpath: Run, desk: Path) -> None:
    """D1: one outcome per message and group."""
    await bury(db, ["a", "b"])
    await export(towpath, desk)
    await db.execute("truncate towpath.dead_letter cascade")
    await db.execute("update towpath.task set state = 'SUCCEEDED' where key = 'a'")

    assert (await answer(towpath, "import", "dead.jsonl"))["imported"] == 1
    assert await db.fetchval("select key from towpath.dead_letter") == "b"


async def test_dead_letters_of_another_place_or_damaged_lines_are_refused_whole(
    db: Db, towpath: Run, desk: Path
) -> None:
    """X2 X6"""
    await bury(db, ["a", "b"])
    await export(towpath, desk)
    await db.execute("truncate towpath.dead_letter cascade")
    head, first, second, end = (desk / "dead.jsonl").read_text().splitlines()
    other = json.loads(head) | {"installation": "elsewhere"}
    old = json.loads(head) | {"schema_version": "0"}
    strange = json.loads(second)

    for lines, word in (
        ([json.dumps(other), first, end], "import them where they were exported"),
        ([json.dumps(old), first, end], "schema version 0"),
        ([first, second, end], "not the first line"),
        ([head, first, second], "cut off"),
        ([head, first, end], "export again"),
        ([head, first, second, end, first], "export again"),
        ([head, first, "{}", end], "line 3"),
        ([head, first, second[:-20], end], "line 3"),
        ([head, first, json.dumps(strange | {"stage": "nowhere"}), end], "line 3"),
        ([head, first, json.dumps(strange | {"payload_base64": "%"}), end], "line 3"),
        ([head, first, json.dumps(strange | {"payload": None, "payload_base64": "%"}), end], "line 3"),
        ([head, first, json.dumps(strange | {"headers": {"a": 1}}), end], "line 3"),
        ([head, first, json.dumps(strange | {"type": "a\0b"}), end], "line 3"),
        ([head, first, json.dumps(strange | {"attempts": 2**40}), end], "line 3"),
        ([head, first, "[" * 100_000, end], "line 3"),
        ([], "not the first line"),
    ):
        (desk / "given.jsonl").write_text("".join(line + "\n" for line in lines))
        ran = await dlq(towpath, "import", "given.jsonl")
        assert ran.code == 2, ran
        assert word in ran.err, (ran.err, word)
        assert await db.fetchval("select count(*) from towpath.dead_letter") == 0
    (desk / "given.jsonl").write_bytes(b"\xff\xfe")
    assert "not UTF-8" in (await dlq(towpath, "import", "given.jsonl")).err
    assert (await dlq(towpath, "import", "absent.jsonl")).code == 2


async def test_an_export_takes_the_filters_of_the_list(db: Db, towpath: Run) -> None:
    await bury(db, ["a", "b"])
    await bury(db, ["c"], group="shipping")

    for arguments, count in ((("--group", "billing"), 2), (("--key", "c"), 1), (("--state", "replayed"), 0)):
        lines = (await dlq(towpath, "export", *arguments)).out.splitlines()
        assert json.loads(lines[-1]) == {"count": count}
        assert len(lines) == count + 2


async def test_two_corrections_at_once_are_not_mixed(db: Db, desk: Path) -> None:
    await bury(db, ["a"])
    seen = await open_for_edit(db, 1)
    said: Any = {"headers": (), "is_validated": False, "actor": "ada"}

    assert await revise(db, seen, payload=b"1", **said) == 1
    with pytest.raises(UsageError, match="corrected meanwhile"):
        await revise(db, seen, payload=b"2", **said)


EDITORS = {
    "corrects": "import sys; open(sys.argv[1], 'wb').write(open('good.json', 'rb').read())",
    "spoils": "import sys; open(sys.argv[1], 'wb').write(open('bad.json', 'rb').read())",
    "leaves": "import sys; assert sys.stdin.isatty() and sys.stdout.isatty(); open(sys.argv[1]).read()",
    "fails": "raise SystemExit(1)",
    "deletes": "import os, sys; os.remove(sys.argv[1])",
}


@pytest.mark.parametrize(
    ("editor", "code", "says"),
    [
        ("corrects", 0, "dead letter 1 has revision 1"),
        ("spoils", 1, "what you wrote is in "),
        ("leaves", 0, "nothing changed"),
        ("fails", 1, "the editor failed: nothing was changed"),
        ("deletes", 1, "the editor left no file: nothing was changed"),
    ],
)
async def test_a_body_is_corrected_in_the_editor_on_a_terminal(
    db: Db, migrated_url: str, desk: Path, editor: str, code: int, says: str
) -> None:
    """As a person does it; what failed changes nothing, and what was typed is not lost."""
    await bury(db, ["o-1"], has_body=True)
    (desk / "editor.py").write_text(EDITORS[editor])

    command = ("dlq", "edit", "1", "--app", "correcting_shop:app", "--reason", "amount was text")
    environment = {
        "EDITOR": f"{sys.executable} editor.py", "VISUAL": "", "PYTHONPATH": ".", "TMPDIR": str(desk)
    }  # fmt: skip

    ran = await asyncio.to_thread(towpath_on_terminal, migrated_url, *command, environment=environment)

    assert (ran.code, says in ran.out) == (code, True), ran.out
    revisions = await db.fetch("select payload from towpath.dead_letter_revision")
    assert [row["payload"] for row in revisions] == ([GOOD] if editor == "corrects" else [])
    assert [path.read_bytes() for path in desk.glob("towpath-*")] == ([BAD] if editor == "spoils" else [])
