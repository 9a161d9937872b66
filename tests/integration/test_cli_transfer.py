"""`towpath dlq export | import`: dead letters as lines of JSON, and back."""

import asyncio
import json
import re
import signal
import time
from pathlib import Path
from typing import Any, TypeAlias

import asyncpg
import pytest

from tests.fixtures.fix_cli import Ran, Run, towpath_on_terminal, towpath_process
from tests.fixtures.graveyard import bury, everything, tasks

Db: TypeAlias = "asyncpg.Connection[Any]"

GOOD = b'{"order_id": "o-1", "amount": 5}'


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory."""
    monkeypatch.chdir(tmp_path)
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
    (desk / "good.json").write_bytes(GOOD)
    await answer(towpath, "edit", "1", "--payload", "good.json", "--force")
    await export(towpath, desk)
    everything_before = await everything(db)
    revisions = await db.fetch("select to_jsonb(r) - 'dead_letter' from towpath.dead_letter_revision r")

    again = await answer(towpath, "import", "dead.jsonl", "--yes")
    assert (again["planned"], again["known"], again["audit_id"]) == (0, 4, None)
    assert await everything(db) == everything_before

    await db.execute("truncate towpath.dead_letter cascade; truncate towpath.task")
    dry = await answer(towpath, "import", "dead.jsonl", "--dry-run")
    assert (dry["planned"], dry["done"]) == (4, 0)
    assert await db.fetchval("select count(*) from towpath.dead_letter") == 0
    assert (await answer(towpath, "import", "dead.jsonl", "--yes", "--reason", "truncated"))["done"] == 4

    assert await _comparable(db) == _without_ids(everything_before["dead_letter"])
    assert (
        await db.fetch("select to_jsonb(r) - 'dead_letter' from towpath.dead_letter_revision r") == revisions
    )
    assert (await answer(towpath, "import", "dead.jsonl", "--yes"))["done"] == 0
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

    assert (await answer(towpath, "import", "dead.jsonl", "--yes"))["done"] == 1
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
        ran = await dlq(towpath, "import", "given.jsonl", "--yes")
        assert ran.code == 2, ran
        assert word in ran.err, (ran.err, word)
        assert await db.fetchval("select count(*) from towpath.dead_letter") == 0
    (desk / "given.jsonl").write_bytes(b"\xff\xfe")
    assert "not UTF-8" in (await dlq(towpath, "import", "given.jsonl", "--yes")).err
    assert (await dlq(towpath, "import", "absent.jsonl", "--yes")).code == 2
    assert await db.fetchval("select count(*) from towpath.audit") == 0


async def test_an_import_shows_its_plan_asks_and_keeps_to_its_maximum_and_rate(
    db: Db, migrated_url: str, towpath: Run, desk: Path
) -> None:
    """O1: as every other bulk action."""
    await bury(db, ["a", "b", "c"])
    await bury(db, ["d"], stage="decode", group="shipping", reason="not_json")
    await export(towpath, desk)
    await db.execute("truncate towpath.dead_letter cascade")
    count = "select count(*) from towpath.dead_letter"

    unsaid = await dlq(towpath, "import", "dead.jsonl")
    dry = await dlq(towpath, "import", "dead.jsonl", "--max", "3", "--dry-run")
    refused = await asyncio.to_thread(
        towpath_on_terminal, migrated_url, "dlq", "import", "dead.jsonl", typed="n\n"
    )

    assert (unsaid.code, "add --yes" in unsaid.err) == (2, True)
    assert dry.out.startswith("to import: 3, for example ")
    assert "left out: 1 beyond --max 3" in dry.out
    assert (refused.code, "import 4? [y/N]" in refused.out) == (1, True), refused
    assert await db.fetchval(count) == 0

    begun = time.monotonic()
    paced = await asyncio.to_thread(
        towpath_on_terminal,
        migrated_url,
        *("dlq", "import", "dead.jsonl", "--max", "3", "--rate", "2"),
        typed="y\n",
    )
    assert (paced.code, "imported 3 (audit 1)" in paced.out) == (0, True), paced
    assert re.search(r"3/3.* \d+/s", paced.out), "a bar with the rate"
    assert time.monotonic() - begun >= 1
    rest = await answer(towpath, "import", "dead.jsonl", "--yes", "--actor", "ada", "--reason", "truncated")
    assert (rest["done"], rest["known"], await db.fetchval(count)) == (1, 3, 4)
    [cause] = rest["causes"]
    assert (cause["consumer_group"], cause["stage"], cause["reason_code"]) == (
        "shipping",
        "decode",
        "not_json",
    )
    audit = await db.fetchrow(
        "select *, counts ->> 'done' as done from towpath.audit order by id desc limit 1"
    )
    assert audit is not None
    assert (audit["id"], audit["action"], audit["actor"], audit["reason"], audit["done"]) == (
        rest["audit_id"], "dlq.import", "ada", "truncated", "1",
    )  # fmt: skip


async def test_an_import_that_was_killed_is_begun_again_and_brings_the_rest(
    db: Db, migrated_url: str, towpath: Run, desk: Path
) -> None:
    """D3: no batch is lost or doubled; also from standard input, which can be read only once."""
    await bury(db, [f"k{number}" for number in range(450)])
    await export(towpath, desk)
    before = _without_ids((await everything(db))["dead_letter"])
    await db.execute("truncate towpath.dead_letter cascade")

    killed = await asyncio.to_thread(
        towpath_process, migrated_url, "dlq", "import", "dead.jsonl", "--yes",
        environment={"TOWPATH_CRASH_AT": "replayed_batch:2"},
    )  # fmt: skip

    assert killed.code == -signal.SIGKILL
    assert await db.fetchval("select count(*) from towpath.dead_letter") == 200
    with (desk / "dead.jsonl").open() as lines:
        again = await asyncio.to_thread(
            towpath_process, migrated_url, "dlq", "import", "-", "--yes", "--json", stdin=lines
        )
    assert (again.code, json.loads(again.out)["done"]) == (0, 250), again
    assert await _comparable(db) == before


async def test_an_export_takes_the_filters_of_the_list(db: Db, towpath: Run) -> None:
    await bury(db, ["a", "b"])
    await bury(db, ["c"], group="shipping")

    for arguments, count in ((("--group", "billing"), 2), (("--key", "c"), 1), (("--state", "replayed"), 0)):
        lines = (await dlq(towpath, "export", *arguments)).out.splitlines()
        assert json.loads(lines[-1]) == {"count": count}
        assert len(lines) == count + 2
