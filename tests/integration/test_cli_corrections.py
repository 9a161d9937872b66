"""`towpath dlq edit`: corrected bodies and headers, beside the originals."""

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
