"""`towpath dlq export` and `towpath dlq import`: dead letters as lines of JSON."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Annotated

import typer

from towpath.cli.editing import reason_of
from towpath.cli.option_groups import DeadLetters, grouped
from towpath.cli.options import Actor, Because, DryRun, Json, States, actor_name, dead_letter_states, text
from towpath.cli.output import as_json
from towpath.cli.session import connected, run_async
from towpath.deadletters import transfer
from towpath.deadletters.transfer import Imported
from towpath.errors import UsageError


@grouped
def export(
    wanted: DeadLetters,
    state: States = None,
) -> None:
    """Write dead letters with their bodies as lines of JSON, the oldest first. Changes nothing.

    The first line says where they come from, the last how many there are. Bodies may be private.

    towpath dlq export --group billing > dead.jsonl
    """
    states = dead_letter_states(state)

    async def run() -> None:
        async with connected() as session:
            meant = wanted.at(await session.clock())
            async for line in transfer.export(
                session.connection, meant, states=states, schema=session.schema
            ):
                print(line)

    run_async(run())


def import_(
    file: Annotated[Path, typer.Argument(help="What towpath dlq export wrote, - for standard input.")],
    dry_run: DryRun = False,
    reason: Because = "",
    actor: Actor = None,
    json: Json = False,
) -> None:
    """Bring back dead letters that were exported here and are missing: all of them, or nothing at all.

    What is there stays as it is, so that importing twice changes nothing. Missing tasks come back, dead.

    towpath dlq import dead.jsonl --dry-run
    """
    who, why = actor_name(actor), text(reason, "--reason")

    async def run() -> Imported:
        async with connected() as session:
            with _lines(file) as lines:
                return await transfer.bring(
                    session.connection, lines, actor=who, reason=why, dry_run=dry_run, schema=session.schema
                )

    done = run_async(run())
    if json:
        as_json({"dry_run": dry_run, "read": done.read, "imported": done.imported, "known": done.known})
    else:
        verb = "would import" if dry_run else "imported"
        print(f"{verb} {done.imported} of {done.read}; {done.known} are there, or their task went on")


@contextmanager
def _lines(path: Path) -> Iterator[IO[str]]:
    """The lines of a file, or of standard input for `-`. Raises UsageError."""
    if str(path) == "-":
        yield sys.stdin
        return
    try:
        file = path.open(encoding="utf-8")
    except (OSError, ValueError) as error:  # a name that no file system takes is a ValueError
        raise UsageError(f"{str(path)[:200]!r} cannot be read: {reason_of(error)}") from error
    with file:
        try:
            yield file
        except UnicodeDecodeError as error:
            raise UsageError(f"{str(path)[:200]!r} is not UTF-8 text") from error
