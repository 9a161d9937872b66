"""`towpath dlq export` and `towpath dlq import`: dead letters as lines of JSON."""

import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import IO, Annotated, Final

import typer

from towpath.bulk import Counts
from towpath.cli import acting
from towpath.cli.editing import reason_of
from towpath.cli.option_groups import Consent, DeadLetters, Pace, grouped
from towpath.cli.options import States, dead_letter_states
from towpath.cli.session import Session, connected, run_async
from towpath.deadletters import exporting, importing
from towpath.deadletters.importing import ImportPlan
from towpath.errors import UsageError

_MEMORY_BYTES: Final = 64 << 20
"""Of standard input; what is longer is copied into a temporary file."""


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
            async for line in exporting.export(
                session.connection, meant, states=states, schema=session.schema
            ):
                print(line)

    run_async(run())


@grouped
def import_(
    file: Annotated[Path, typer.Argument(help="What towpath dlq export wrote, - for standard input.")],
    *,
    pace: Pace,
    consent: Consent,
) -> None:
    """Bring back dead letters that were exported here and are missing: shows a plan, asks, acts in batches.

    All lines are checked first. What is there stays as it is, so an interrupted import is run again, and
    importing twice changes nothing. Missing tasks come back, dead.

    towpath dlq import dead.jsonl --dry-run
    """
    with _lines(file) as lines:

        async def plan(session: Session, _now: datetime) -> ImportPlan:
            return await importing.make_plan(
                session.connection, lines, schema=session.schema, limit=pace.maximum
            )

        async def carry_out(
            session: Session, plan: ImportPlan, actor: str, reason: str, advance: acting.Progress | None
        ) -> tuple[int, Counts]:
            return await importing.carry_out(
                session.connection, plan, lines, actor=actor, reason=reason, schema=session.schema,
                rate=pace.rate, on_progress=advance,
            )  # fmt: skip

        kind = acting.Act(
            done="imported",
            columns=("consumer_group", "stage", "type", "reason_code"),
            make_plan=plan,
            carry_out=carry_out,
            left_out=lambda plan: {
                "known": (plan.known_count, "that are here already, or whose task lives or ended otherwise")
            },
        )
        run_async(acting.act(acting.Request("import", pace, consent), kind))


@contextmanager
def _lines(path: Path) -> Iterator[IO[str]]:
    """The lines of a file, or of standard input for `-`, to be read twice. Raises UsageError."""
    try:
        with ExitStack() as stack:
            yield _opened(path, stack)
    except UnicodeError as error:
        raise UsageError(f"{str(path)[:200]!r} is not UTF-8 text") from error


def _opened(path: Path, stack: ExitStack) -> IO[str]:
    """A copy of what can be read only once."""
    try:
        file = sys.stdin if str(path) == "-" else stack.enter_context(path.open(encoding="utf-8"))
        if file is not sys.stdin and file.seekable():
            return file
        copy = SpooledTemporaryFile(_MEMORY_BYTES, "w+", encoding="utf-8")  # noqa: SIM115  the stack closes it
        shutil.copyfileobj(file, stack.enter_context(copy))
    except UnicodeError:
        raise
    except (OSError, ValueError) as error:  # a name that no file system takes is a ValueError
        raise UsageError(f"{str(path)[:200]!r} cannot be read: {reason_of(error)}") from error
    return copy
