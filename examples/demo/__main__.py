"""The ten steps of the demo, in order. Exit codes: 0 all promises kept, 1 not, 130 interrupted."""

import argparse
import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import asyncpg
from rich.console import Console

from examples.demo import check, promises
from examples.demo.defects import DEFECTS
from examples.demo.installation import BROKERS, Installation, ProcessDied
from examples.demo.promises import Promises
from examples.demo.repairing import CommandFailed, Outage, list_dead_letters, mend, replay
from examples.demo.tracing import show_trace
from examples.demo.watching import Progress, watch
from towpath.errors import TowpathError
from towpath.states import TaskState
from towpath.testing.services import ServiceFailed, ServiceMissing

_PLAIN_WIDTH: Final = 200


class Tour:
    """Tells the steps and takes them."""

    def __init__(self, installation: Installation, console: Console) -> None:
        self._installation = installation
        self._console = console
        self._began = time.monotonic()

    def say(self, text: str) -> None:
        """One step, with the seconds since the start."""
        seconds = time.monotonic() - self._began
        self._console.print(f"[dim]{seconds:5.1f} s[/dim]  {text}", highlight=False, soft_wrap=True)

    def set_up(self) -> None:
        """Servers are up; schema, topics and processes follow."""
        running = self._installation
        broker = f"{running.choice.name} on {urlsplit(running.broker_url).port}"
        self.say(f"Postgres on port {running.postgres.port}, {broker}")
        self.say(f"schema migrated, {running.prepare()} topics or queues created")
        running.start()
        running.start_producer()
        self.say(
            "started: relay, consumer groups agents and orders, producer; the groups join in some seconds"
        )

    async def run(self, plant: str | None = None) -> bool:
        """From the first commit to the verdict."""
        connection = await asyncpg.connect(self._installation.database_url)
        try:
            return await self._run(connection, plant)
        finally:
            await connection.close()

    async def _run(self, connection: "asyncpg.Connection[Any]", plant: str | None) -> bool:
        has_settled = await self._watch_first_round(connection)
        made = promises.read(self._installation.promises)
        environment = self._installation.environment()
        self.say(f"dead letters, {made.dead_count} by the script:")
        list_dead_letters(self._console, environment)
        await mend(connection, self._console)
        replay(self._console, environment)
        has_settled &= await self._watch_replay(connection)
        self.say("one message, from its business transaction to its replay:")
        is_traced = await show_trace(connection, self._console, self._installation.traces)
        if plant is not None:
            await connection.execute(DEFECTS[plant])
        self.say("the check, id by id:")
        claims = await check.check(connection, made)
        for line in check.lines(claims):
            self._console.print(f"         {line}", highlight=False, markup=False, soft_wrap=True)
        is_kept = all(claim.is_true for claim in claims) and has_settled and is_traced
        self.say(f"[bold]{_verdict(is_kept, has_settled, is_traced)}[/bold]")
        return is_kept

    async def _watch_first_round(self, connection: "asyncpg.Connection[Any]") -> bool:
        """Until everything has ended, the dead letters included."""
        file = self._installation.promises
        made: Promises | None = None

        def is_done(progress: Progress) -> bool:
            nonlocal made
            if made is None and file.exists():
                made = promises.read(file)
                self.say(
                    f"produced: {len(made.committed)} messages committed in "
                    f"{made.transaction_count - made.rolled_back_count} transactions, "
                    f"{made.rolled_back_count} more rolled back, in {made.seconds:.1f} s"
                )
            wanted = made and len(made.committed) + len(made.invoices_cents)
            return progress.is_idle and progress.final_count == wanted

        return await self._watch(connection, is_done, Outage(connection, self._console))

    async def _watch_replay(self, connection: "asyncpg.Connection[Any]") -> bool:
        """Until nothing is dead any more."""

        def is_done(progress: Progress) -> bool:
            return progress.is_idle and progress.count(TaskState.DEAD) == 0

        return await self._watch(connection, is_done)

    async def _watch(
        self,
        connection: "asyncpg.Connection[Any]",
        is_done: Callable[[Progress], bool],
        outage: Outage | None = None,
    ) -> bool:
        async def on_progress(progress: Progress) -> None:
            self._installation.check_alive()
            if outage is not None:
                await outage.on_progress(progress)

        has_settled = await watch(connection, self._console, is_done, on_progress)
        if not has_settled:
            self.say("[red]nothing moves any more, and not everything has ended[/red]")
        return has_settled

    def invite(self) -> None:
        """Where things are and what to try, while it is left running."""
        self.say("left running until Ctrl-C:")
        for name, address in self._installation.addresses().items():
            self._console.print(
                f"         {name:<9} {address}", highlight=False, markup=False, soft_wrap=True
            )
        directory = Path(sys.executable).parent
        print(
            f"""
  In another shell, first:  . {self._installation.write_exports()}
    {directory}/towpath tasks list --group agents --limit 10
    {directory}/towpath dlq list --state all
    {directory}/python -m examples.demo.producing --seed 2
""",
            flush=True,
        )


def _verdict(is_kept: bool, has_settled: bool, is_traced: bool) -> str:
    if is_kept:
        return "every promise was kept"
    reasons = [] if has_settled else ["not everything ended in time"]
    reasons += [] if is_traced else ["the trace is not in one piece"]
    return f"NOT every promise was kept{': ' if reasons else ''}{', '.join(reasons)}"


def _interrupt(*_: object) -> None:
    """SIGTERM ends it as Ctrl-C does."""
    os.kill(os.getpid(), signal.SIGINT)


def _run(options: argparse.Namespace, console: Console) -> bool:
    with Installation(options.broker) as installation:
        tour = Tour(installation, console)
        tour.set_up()
        is_kept = asyncio.run(tour.run(options.plant))
        if options.keep:
            tour.invite()
            with contextlib.suppress(KeyboardInterrupt):
                while True:
                    installation.check_alive()
                    time.sleep(1)
        tour.say("stopping everything")
    return is_kept


def main() -> None:
    """Run the demo and exit with its verdict."""
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description="The demo: see the README.")
    parser.add_argument(
        "--keep",
        action="store_true",
        default=os.environ.get("KEEP", "") not in ("", "0"),
        help="leave it running until Ctrl-C",
    )
    parser.add_argument(
        "--broker",
        choices=BROKERS,
        default=os.environ.get("BROKER") or "embedded",
        help="embedded needs Python alone; kafka and rabbitmq are started from what make services installed",
    )
    parser.add_argument("--plant", choices=DEFECTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job inherits it ignored
    signal.signal(signal.SIGTERM, _interrupt)
    console = Console(width=None if sys.stdout.isatty() else _PLAIN_WIDTH)
    try:
        sys.exit(0 if _run(options, console) else 1)
    except KeyboardInterrupt:
        console.print("interrupted; everything is stopped")
        sys.exit(130)
    except (ServiceFailed, ServiceMissing, ProcessDied, CommandFailed, TowpathError) as error:
        console.print(f"the demo failed: {error}", markup=False, highlight=False)
        sys.exit(1)


if __name__ == "__main__":
    main()
