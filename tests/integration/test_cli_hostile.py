"""Hostile strings through every argument and option of every command, found by walking the command tree."""

import asyncio
import unicodedata
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import asyncpg
import psycopg
import pytest
from typer.main import get_command

from tests.fixtures.fix_postgres import NewDatabase
from tests.fixtures.graveyard import bury
from towpath.cli.exits import FAILED, OK, SAYS_NO, UNREACHABLE, USAGE
from towpath.cli.root import app, run

CORPUS = {
    "nothing": "",
    "NUL": "a\0b",
    "SQL": "'; drop schema towpath cascade; --",
    "quotes": "\"'`\\$$",
    "path": "../../../../etc/passwd",
    "escapes": "\x1b[2J\x1b]0;owned\x07\r\n\x9b31m",
    "huge": "x" * 100_000,
    "right to left": "\u202egnp.exe\u2066\u200f\ufeff",
    "surrogate": "caf\udce9\ud800",
    "format": "%s%n{0}${HOME}$(reboot);[red]",
    "option": "--yes",
    "number": "-9223372036854775809",
    "not a number": "nan",
}
"""By what is hostile about it."""
SHARPEST = ("NUL", "SQL", "escapes", "surrogate")
PLAIN = {
    "id": "00000000-0000-4000-8000-000000000000",
    "trace_id": "0" * 32,
    "target": "json:loads",
    "outcome": "succeeded",
    "to": "now",
    "since": "1h",
}
"""What the other parameters get, by name, where they have to have something: it matches nothing."""
MESSAGES = ("outbox", "scheduled", "task", "task_event", "dead_letter", "key_gate", "meta")
HIDDEN = ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")


def leaves(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command that can be run, by its words."""
    if not hasattr(command, "commands"):
        yield path, command
        return
    for name, child in sorted(command.commands.items()):
        yield from leaves(child, (*path, name))


ROOT = get_command(app)
COMMANDS = list(leaves(ROOT))


def takes_text(parameter: Any) -> bool:
    return not parameter.is_flag and not parameter.count if is_option(parameter) else True


def is_option(parameter: Any) -> bool:
    return parameter.param_type_name == "option"


FIRST = {each.name: path for path, command in [((), ROOT), *reversed(COMMANDS)] for each in command.params}
"""Options of one name are one definition, mostly: the command that tries all of the corpus on it."""


def lines_of(path: tuple[str, ...], command: Any) -> Iterator[tuple[str, list[str]]]:
    """Each parameter in turn with hostile strings, the others plain; with all where it is seen first."""
    for hostile in filter(takes_text, command.params):
        is_first = FIRST[hostile.name] == path
        for kind in CORPUS if is_first else SHARPEST:
            text = CORPUS[kind]
            options, arguments = [], []
            for each in command.params:
                value = text if each is hostile else PLAIN.get(each.name, "nobody")
                if each is not hostile and not each.required:
                    continue
                if is_option(each):
                    options.append(f"{each.opts[0]}={value}")
                else:
                    arguments.append(value)
            spare = [name for name in ("dry_run", "yes") if name in {each.name for each in command.params}]
            options += [f"--{name.replace('_', '-')}" for name in spare[:1]]
            yield f"{hostile.name} {kind}", [*path, *options, "--", *arguments]


@pytest.fixture(scope="module")
def installation(new_database: NewDatabase, schema_template: str) -> Iterator[str]:
    """A database with messages, tasks and dead letters to lose."""

    async def fill(url: str) -> None:
        db = await asyncpg.connect(url)
        await bury(db, ["k-1", "k-2"])
        await db.execute("select towpath.emit('orders', 'order.placed', '{}', 'k-1')")
        await db.execute("select towpath.submit_task('billing', 'payment.charge', '{}')")
        await db.close()

    with new_database(schema_template) as url:
        asyncio.run(fill(url))
        yield url


def content(url: str) -> list[Any]:
    """What may not change: messages, and everything in the catalog."""
    rows = [f"select count(*), sum(hashtext(t::text)) from towpath.{table} t" for table in MESSAGES]
    catalog = """
        select count(*), sum(hashtext(c.relname || c.relkind::text || c.relnatts)) from pg_class c
        where c.relnamespace = 'towpath'::regnamespace and c.relname !~ '_seq$'
        union all select count(*), null from pg_roles
    """
    with psycopg.connect(url) as db:
        return [db.execute(statement).fetchall() for statement in (*rows, catalog)]


@pytest.mark.parametrize(
    ("path", "command"),
    [each for each in COMMANDS if any(map(takes_text, each[1].params))] + [((), ROOT)],
    ids=lambda value: (" ".join(value) or "towpath") if isinstance(value, tuple) else "",
)
def test_hostile_strings_are_refused_or_taken_as_text(
    path: tuple[str, ...],
    command: Any,
    installation: str,
    clean_environment: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """X2: no traceback, a promised exit code, nothing changed, nothing raw on the terminal."""
    clean_environment.setenv("TOWPATH_DATABASE_URL", installation)
    clean_environment.setenv("TOWPATH_BROKER_URL", f"memory://{uuid.uuid4()}")
    clean_environment.chdir(tmp_path)
    before = content(installation)
    cases = list(lines_of(path, command))
    assert cases
    for case, line in cases:
        code = run(line if path else [*line[:-1], "config", "show"])
        out, err = capsys.readouterr()
        assert code in (OK, FAILED, USAGE, SAYS_NO, UNREACHABLE), (case, code)
        assert "Traceback" not in out + err, case
        assert "failed: " not in err, (case, err[:300])
        assert err.count("\n") <= 1, (case, err[:300])
        assert len(err) < 2000, (case, err[:300])
        raw = {c for c in out + err if c != "\n" and unicodedata.category(c) in HIDDEN}
        assert not raw, (case, raw)
    assert content(installation) == before
    assert list(tmp_path.iterdir()) == []


def test_every_command_takes_no_text_or_is_tried() -> None:
    """X2: the tree is walked whole, so what is added to it is covered."""
    tried = {path for path, command in COMMANDS if any(map(takes_text, command.params))}
    assert {("dlq", "list"), ("tasks", "show"), ("worker", "run"), ("destination", "set")} <= tried
    assert all(
        not takes_text(each) for path, command in COMMANDS if path not in tried for each in command.params
    )
