"""The people's part: the outage ends, causes are mended, dead letters are replayed with the admin CLI."""

import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import asyncpg
from rich.console import Console
from rich.text import Text

from examples.demo.script import FAULTY, OUTAGE
from examples.demo.watching import Progress
from towpath.states import TaskState

OUTAGE_SECONDS: Final = 3.0
_CLI: Final = Path(sys.executable).with_name("towpath")
_CLI_SECONDS: Final = 240


class CommandFailed(Exception):
    """An admin command ended with an error."""


class Outage:
    """Ends the outage of the warehouse some seconds after work has begun."""

    def __init__(self, connection: "asyncpg.Connection[Any]", console: Console) -> None:
        self._connection = connection
        self._console = console
        self._seen_at: float | None = None
        self._is_over = False

    async def on_progress(self, progress: Progress) -> None:
        """Look at the clock."""
        if self._seen_at is None and progress.count(TaskState.SUCCEEDED):
            self._seen_at = time.monotonic()
        if self._is_over or self._seen_at is None or time.monotonic() - self._seen_at < OUTAGE_SECONDS:
            return
        await self._connection.execute(
            "update provider_status set is_up = true, changed_at = clock_timestamp() where provider = $1",
            f"tool:{OUTAGE}",
        )
        self._is_over = True
        self._console.print(
            f"         the {OUTAGE} can be reached again after {OUTAGE_SECONDS:.0f} s of outage"
        )


def list_dead_letters(console: Console, environment: Mapping[str, str]) -> None:
    """What died and of what."""
    _run(console, environment, "dlq", "list", "--limit", "50")


async def mend(connection: "asyncpg.Connection[Any]", console: Console) -> None:
    """What a person does after reading the list."""
    console.print(f"         mended: search:{FAULTY} answers again, invoices may be larger")
    await connection.execute(
        "update provider_status set fault = null, changed_at = clock_timestamp() where provider = $1",
        f"search:{FAULTY}",
    )
    await connection.execute("alter table invoice drop constraint invoice_amount_fits")


def replay(console: Console, environment: Mapping[str, str]) -> None:
    """All of them, with a reason for the audit table."""
    reason = f"search:{FAULTY} mended, invoice constraint dropped"
    _run(console, environment, "dlq", "replay", "--all", "--yes", "--reason", reason)


def _run(console: Console, environment: Mapping[str, str], *arguments: str) -> None:
    """Run the command and show what it prints; on a terminal a row is one line, cut at its edge."""
    command = shlex.join(arguments)
    console.print(f"$ towpath {command}", style="bold", markup=False, highlight=False, soft_wrap=True)
    done = subprocess.run(
        [str(_CLI), *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=_CLI_SECONDS,
    )
    for line in done.stdout.splitlines():
        row = Text(line.rstrip())
        if console.is_terminal:
            row.truncate(console.width, overflow="ellipsis")
        console.print(row, soft_wrap=True)
    if done.returncode != 0:
        raise CommandFailed(f"towpath {command} ended with {done.returncode}")
