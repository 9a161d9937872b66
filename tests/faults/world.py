"""The processes of a run, on servers and links that can be broken."""

import asyncio
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import asyncpg

from tests.acceptance.brokers import WireMessage
from tests.acceptance.world import CALM_RELAY, QUICK, TOWPATH, World
from tests.faults import ledger
from tests.faults.defects import ENVIRONMENT_VARIABLE as DEFECT
from tests.faults.plan import LANES
from tests.faults.servers import Servers, at_port
from towpath.cli.exits import Stop
from towpath.cli.health import asked
from towpath.testing.services import faketime
from towpath.testing.services.ports import ReservedPort

if TYPE_CHECKING:
    from tests.faults.fault import Fault

Role: TypeAlias = Literal["relay", "member", "producer"]
Link: TypeAlias = tuple[Role, Literal["postgres", "broker"]]

RELAYS: Final = ("relay-0", "relay-1")
MEMBERS: Final = ("member-0", "member-1")
PRODUCERS: Final = ("producer-0", "producer-1")
SCHEMA: Final = Path(__file__).parent / "schema.sql"
_ENVIRONMENT: Final[Mapping[str, str]] = {
    "TOWPATH_RELAY__CANARIES": "false",
    "TOWPATH_RELAY__ENVIRONMENT": "faults",  # a proxy is another address of the same database
    "TOWPATH_WORKER__CONCURRENCY": "16",
    "TOWPATH_WORKER__SESSIONS": "8",
    "TOWPATH_WORKER__ACK_AFTER": "700ms",
    "TOWPATH_WORKER__LOST_AFTER": "20s",
    "TOWPATH_WORKER__QUIET": "5s",
    "TOWPATH_WORKER__MAX_DELIVERIES": "50",  # the faults kill, not the messages
    "TOWPATH_TELEMETRY__LOG_LEVEL": "INFO",
}
_CONNECT_SECONDS: Final = 60.0
UNREACHABLE: Final = (
    OSError,
    TimeoutError,
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,  # the driver's state machine, confused by a connection that broke
)
"""What a database raises that is struck."""


class FaultWorld(World):
    """Two relays, two members of the group and two processes of producers."""

    def __init__(
        self,
        *arguments: Any,
        servers: Servers,
        seed: int,
        faults: Sequence["Fault"] = (),
        defect: str = "",
    ) -> None:
        super().__init__(*arguments)
        self.servers = servers
        self.seed = seed
        # Where only others are struck a busy machine must not make a relay repeat a copy: nothing excuses it.
        are_relays_spared = faults and not any({*RELAYS}.intersection(fault.touches) for fault in faults)
        self.timing = {**QUICK, **CALM_RELAY} if are_relays_spared else QUICK
        self._broken_links = frozenset(link for fault in faults for link in fault.links)
        self._defect = defect
        self.ledger = self.directory / "ledger"
        self.ledger.mkdir(parents=True)
        self._clocks: set[str] = set()
        for fault in faults:
            for name, offset in fault.clocks.items():
                self.set_clock(name, offset)
        self._ports: dict[str, ReservedPort] = {}
        self.notes = ledger.Ledger(self.ledger, "controller")
        self.heard_before: list[WireMessage] = []
        """What lay at the broker and is there no more."""

    def spawn(self, name: str, *argv: str, **environment: str) -> None:
        """Start a process; its links go through a proxy where they are to be broken."""
        role = name.partition("-")[0]
        database_url = self.database_url
        if (role, "postgres") in self._broken_links:
            database_url = at_port(database_url, self.servers.postgres_proxy.port)
        ours = {
            **_ENVIRONMENT,
            "TOWPATH_DATABASE_URL": database_url,
            "TOWPATH_BROKER_URL": self.servers.broker_url(is_proxied=(role, "broker") in self._broken_links),
            ledger.ENVIRONMENT_VARIABLE: str(self.ledger),
            ledger.PROCESS_VARIABLE: name,
            DEFECT: self._defect,
        }
        if name in self._clocks:
            ours |= faketime.environment(self._clock_file(name))
        super().spawn(name, *argv, **{**ours, **environment})

    def set_clock(self, name: str, offset: str) -> None:
        """Let a process's wall clock be ahead by so many seconds, such as `+3600`."""
        self._clocks.add(name)
        draft = self._clock_file(name).with_suffix(".draft")
        draft.write_text(offset)
        draft.replace(self._clock_file(name))

    def _clock_file(self, name: str) -> Path:
        return self.directory / f"clock-{name}"

    def start(self, name: str, **environment: str) -> None:
        """Start a process by the role in its name."""
        role, _, number = name.partition("-")
        if role == "relay":
            environment["TOWPATH_RELAY__HEALTH_PORT"] = self._health_port(name)
            self.spawn(name, sys.executable, "-m", "tests.faults.relay", **environment)
        elif role == "member":
            environment["TOWPATH_WORKER__HEALTH_PORT"] = self._health_port(name)
            self.spawn(name, TOWPATH, "worker", "run", "tests.faults.member:app", **environment)
        else:
            each = LANES // len(PRODUCERS)
            lanes = (str(int(number) * each), str(each))
            self.begin(
                name, sys.executable, "-m", "tests.faults.producer", str(self.seed), *lanes, **environment
            )

    def _health_port(self, name: str) -> str:
        if name not in self._ports:
            self._ports[name] = ReservedPort()
        return str(self._ports[name].number)

    async def is_live(self, name: str, *, seconds: float) -> bool:
        """Whether a relay or member answers its liveness probe, and that it is well, within a while."""

        async def answers() -> bool:
            with suppress(Stop):
                port = self._ports[name].number
                return bool((await asyncio.to_thread(asked, name, "127.0.0.1", port, is_live=True))["ok"])
            return False

        with suppress(AssertionError):
            await self.until(f"{name} is live", answers, seconds=seconds)
            return True
        return False

    def has_ended(self, name: str) -> bool:
        """Whether it has, by itself or not."""
        return name not in self._expected or self._processes.exit_code(name) is not None

    async def patiently(self, name: str, *, seconds: float = 90) -> int:
        """SIGTERM, and wait without holding up the proxies, which live in this process; the exit code."""
        self._processes.send_signal(name, signal.SIGTERM)
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._exited(name)
        return self.stop(name, grace_seconds=0.1)

    async def _exited(self, name: str) -> None:
        while self._processes.exit_code(name) is None:  # noqa: ASYNC110 - the supervisor is asked, it does not tell
            await asyncio.sleep(0.1)

    async def attempt(self, name: str, *argv: str, **environment: str) -> None:
        """Run a process to its end, whatever that is."""
        self.spawn(name, *argv, **environment)
        del self._expected[name]
        await self._exited(name)

    async def fetch(self, query: str, *arguments: object) -> list[Any]:
        """On a connection of its own: replays use the other one at any time."""
        connection = await asyncpg.connect(self.database_url, timeout=60, command_timeout=120)
        try:
            return list(await connection.fetch(query, *arguments))
        finally:
            connection.terminate()

    async def until_counted(
        self, expected: int, query: str, *arguments: object, seconds: float = 150, every: float = 0.1
    ) -> None:
        """Poll until a counting query returns at least this, also where the database is struck meanwhile."""

        async def is_reached() -> bool:
            try:
                return bool(await self.db.fetchval(query, *arguments) >= expected)
            except UNREACHABLE:
                await self.reopen()
                return False

        await self.until(f"{expected} of: {query}", is_reached, seconds=seconds, every=every)

    async def reopen(self) -> None:
        """A control connection that no fault has touched."""
        self.db.terminate()
        deadline = asyncio.get_running_loop().time() + _CONNECT_SECONDS
        while True:
            try:
                self.db = await asyncpg.connect(self.database_url, timeout=10, command_timeout=60)
            except UNREACHABLE:
                if asyncio.get_running_loop().time() > deadline:
                    raise
                await asyncio.sleep(0.3)
            else:
                return

    def close(self, directory: Path) -> None:
        """Copies of what the processes printed; their ports are free again."""
        for port in self._ports.values():
            port.release()
        for path in self._processes.directory.glob("*.log"):
            with suppress(OSError):
                (directory / path.name).write_bytes(path.read_bytes())
