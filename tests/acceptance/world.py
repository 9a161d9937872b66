"""One test's world: a database, names of its own at a broker, and processes that never outlive it."""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, TypeVar
from uuid import uuid4

import asyncpg

from tests.acceptance.apps.messages import Messages, declare, steps_address, tasks_address
from tests.acceptance.brokers import WireBroker
from towpath.brokers.factory import broker_from_url
from towpath.brokers.ports import GroupTopology
from towpath.testing.services.processes import Command, ProcessGroup

REPOSITORY: Final = Path(__file__).parents[2]
TOWPATH: Final = str(Path(sys.executable).parent / "towpath")
BUSINESS_SCHEMA: Final = Path(__file__).parent / "apps" / "schema.sql"
_POLL_SECONDS: Final = 0.1
_LOG_LINES: Final = 25

CALM_RELAY: Final = {"TOWPATH_RELAY__LEASE": "90s", "TOWPATH_RELAY__PUBLISH_DEADLINE": "60s"}
CALM: Final[Mapping[str, str]] = {
    **CALM_RELAY,
    "TOWPATH_RELAY__RENEW_EVERY": "1s",
    "TOWPATH_WORKER__LEASE": "90s",
    "TOWPATH_WORKER__BEAT_EVERY": "1s",
    "TOWPATH_WORKER__REAP_EVERY": "1s",
}
"""A machine that stands still makes nobody give up a publish, and repeat it, or lose a lease."""
QUICK: Final[Mapping[str, str]] = {
    **CALM,
    "TOWPATH_RELAY__LEASE": "8s",
    "TOWPATH_RELAY__PUBLISH_DEADLINE": "5s",
    "TOWPATH_WORKER__LEASE": "8s",
}
"""A dead process is missed within seconds; so may be a living one on a busy machine."""


class World:
    """Starts, kills and watches the processes of one consumer group and its relay."""

    timing: Mapping[str, str] = CALM
    """How long leases last: where processes die and others take over, QUICK."""

    def __init__(
        self,
        group: str,
        database_url: str,
        broker: WireBroker,
        db: "asyncpg.Connection[Any]",
        processes: ProcessGroup,
        directory: Path,
    ) -> None:
        self.group = group
        self.database_url = database_url
        self.broker = broker
        self.db = db
        self.directory = directory
        self.messages: Messages = declare(group)
        self.steps = steps_address(group)
        self.tasks = tasks_address(group)
        self._processes = processes
        self._expected: dict[str, int | None] = {}
        self.pids: dict[str, int] = {}
        """By name, of the processes started last."""

    # Processes ---------------------------------------------------------------------------------

    @property
    def environment(self) -> dict[str, str]:
        """What every process of ours is given."""
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("TOWPATH_", "OTEL_", "PYTEST_", "COV_"))
        }
        return {
            **inherited,
            "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{REPOSITORY / 'src'}",
            "PYTHONUNBUFFERED": "1",
            "TOWPATH_DATABASE_URL": self.database_url,
            "TOWPATH_BROKER_URL": self.broker.url,
            "TOWPATH_BROKER_OPTIONS": json.dumps(self.broker.options),
            "TOWPATH_TEST_GROUP": self.group,
            **self.timing,
        }

    def spawn(self, name: str, *argv: str, **environment: str) -> None:
        """Start a process; it is expected to run until `stop` or `kill`."""
        command = Command(name, argv, {**self.environment, **environment})
        self.pids[name] = self._processes.spawn(command)
        self._expected[name] = None

    def begin(self, name: str, *argv: str, **environment: str) -> None:
        """Start a process that may end by itself, with exit code 0; wait for it with `finished`."""
        self.spawn(name, *argv, **environment)
        self._expected[name] = 0

    def relay(self, name: str = "relay", **environment: str) -> None:
        """Start a relay."""
        self.spawn(name, sys.executable, "-m", "outbox_relay", **environment)

    def consumer(self, name: str = "consumer", **environment: str) -> None:
        """Start a member of the scripted group."""
        self.spawn(name, TOWPATH, "worker", "run", "tests.acceptance.apps.scripted:app", **environment)

    def kill(self, name: str) -> None:
        """SIGKILL."""
        self._processes.stop(name, signal.SIGKILL, 10)
        del self._expected[name]

    def suspend(self, name: str) -> None:
        """Freeze a process: its connections stay open and nobody answers on them."""
        self._processes.send_signal(name, signal.SIGSTOP)

    def resume(self, name: str) -> None:
        """Let a frozen process go on where it stood."""
        self._processes.send_signal(name, signal.SIGCONT)

    def stop(self, name: str, *, grace_seconds: float = 90) -> int:
        """SIGTERM; the exit code."""
        code = self._processes.stop(name, signal.SIGTERM, grace_seconds)
        del self._expected[name]
        return code

    def expect_death(self, name: str) -> None:
        """The process will die by SIGKILL on its own, or has done so."""
        self._expected[name] = -signal.SIGKILL

    async def died(self, name: str, *, seconds: float = 150) -> None:
        """Wait until a process has died by SIGKILL."""
        self.expect_death(name)

        async def is_dead() -> bool:
            return self._processes.exit_code(name) is not None

        await self.until(f"{name} has died", is_dead, seconds=seconds)
        del self._expected[name]

    async def finished(self, name: str, *, exit_code: int = 0, seconds: float = 150) -> str:
        """Wait until a process has ended, by itself and with this code; what it printed."""
        self._expected[name] = exit_code

        async def has_ended() -> bool:
            return self._processes.exit_code(name) is not None

        await self.until(f"{name} has finished", has_ended, seconds=seconds)
        self._check_processes(f"{name} has finished")
        del self._expected[name]
        return self._processes.log_since_spawn(name)

    async def run(self, name: str, *argv: str, seconds: float = 150, **environment: str) -> str:
        """Run a process to its end, expect exit code 0, return what it printed."""
        self.begin(name, *argv, **environment)
        return await self.finished(name, seconds=seconds)

    async def cli(self, *arguments: str, **environment: str) -> str:
        """Run the `towpath` command and return what it printed."""
        return await self.run("cli", TOWPATH, *arguments, **environment)

    def logs(self) -> str:
        """The last lines of every process."""
        names = sorted(path.stem for path in self._processes.directory.glob("*.log"))
        return "\n".join(f"--- {name}\n{self._processes.log_tail(name, _LOG_LINES)}" for name in names)

    # Waiting -----------------------------------------------------------------------------------

    async def until(
        self,
        what: str,
        ask: Callable[[], Awaitable[bool]],
        *,
        seconds: float = 150,
        every: float = _POLL_SECONDS,
    ) -> None:
        """Poll until it is so. Fails at the deadline, or when a process is gone; logs are in the report."""
        deadline = time.monotonic() + seconds
        while not await ask():
            self._check_processes(what)
            if time.monotonic() > deadline:
                raise AssertionError(f"not within {seconds:.0f} s: {what}\n{await self._summary()}")
            await asyncio.sleep(every)

    async def until_counted(
        self,
        expected: int,
        query: str,
        *arguments: object,
        seconds: float = 150,
        every: float = _POLL_SECONDS,
    ) -> None:
        """Poll until a counting query returns at least this."""

        async def is_reached() -> bool:
            return bool(await self.db.fetchval(query, *arguments) >= expected)

        await self.until(f"{expected} of: {query}", is_reached, seconds=seconds, every=every)

    async def until_state(self, state: str, count: int = 1, *, seconds: float = 150) -> None:
        """Poll until that many tasks of the group are in a state."""
        query = "select count(*) from towpath.task where consumer_group = $1 and state = $2"
        await self.until_counted(count, query, self.group, state, seconds=seconds)

    async def until_sent(self) -> None:
        """Wait until the relay has noted everything as published, copies of dead letters included."""
        await self.until_counted(
            0,
            "select -count(*) from towpath.outbox_message"
            " where status = 'PENDING' and destination <> 'towpath.canary'",
        )

    async def states(self) -> dict[str, int]:
        """Tasks of the group by state."""
        query = "select state, count(*) as n from towpath.task where consumer_group = $1 group by state"
        return {row["state"]: row["n"] for row in await self.db.fetch(query, self.group)}

    def _check_processes(self, what: str) -> None:
        for name, expected in self._expected.items():
            code = self._processes.exit_code(name)
            if code is not None and code != expected:
                raise AssertionError(f"{name} exited with {code} while waiting: {what}")

    async def _summary(self) -> str:
        outbox = await self.db.fetch(
            "select status, count(*) as n from towpath.outbox_message group by status"
        )
        dead = await self.db.fetch(
            "select stage, reason_code, error_message from towpath.dead_letter limit 5"
        )
        return (
            f"tasks {await self.states()}, outbox { {row['status']: row['n'] for row in outbox} }, "
            f"dead letters {[tuple(row) for row in dead]}"
        )


W = TypeVar("W", bound=World)


@asynccontextmanager
async def world_of(
    database_url: str, broker: WireBroker, directory: Path, *, make: Callable[..., W]
) -> AsyncIterator[W]:
    """A world with its topology and business tables; nothing runs yet, and nothing is left behind."""
    processes = ProcessGroup("acceptance")
    try:
        db = await asyncpg.connect(database_url, timeout=60, command_timeout=120)
        try:
            await db.execute(BUSINESS_SCHEMA.read_text())
            group = await _new_group(broker)
            yield make(group, database_url, broker, db, processes, directory)
        finally:
            await db.close(timeout=60)
    finally:
        processes.close()


async def _new_group(broker: WireBroker) -> str:
    """A group's name, with its topics, exchanges and queues."""
    group = f"g{uuid4().hex[:10]}"
    await apply_topology(broker, group, (steps_address(group), tasks_address(group)))
    return group


async def apply_topology(broker: WireBroker, group: str, addresses: tuple[str, ...]) -> None:
    """Create what a group needs to read these addresses."""
    admin = broker_from_url(broker.url, broker.options).admin()
    try:
        await admin.apply(addresses, [GroupTopology(group, addresses)], partitions=4)
    finally:
        await admin.aclose()
