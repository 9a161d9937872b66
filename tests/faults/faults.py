"""Everything that a run may be struck by: how it begins, how it ends, whom it touches.

`FAULTS` is the table. A fault belongs to one strike of one run and may remember what it did.
"""

import asyncio
import resource
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, Literal, TypeAlias, get_args

import asyncpg

from tests.faults.world import MEMBERS, PRODUCERS, RELAYS, BrokerName, FaultWorld, Link, Role
from towpath.crashpoints import ENVIRONMENT_VARIABLE, CrashPoint
from towpath.testing.proxy import Direction
from towpath.testing.services import KafkaServer, RabbitServer

BOTH: Final[frozenset[BrokerName]] = frozenset(get_args(BrokerName))
EVERYONE: Final = (*RELAYS, *MEMBERS, *PRODUCERS)
LEASE_SECONDS: Final = 8.0
"""Of relays and workers in these runs."""
LIVE_WORKERS: Final = "select count(*) from towpath.worker where lease_until > clock_timestamp()"
_OF_ROLE: Final[Mapping[Role, tuple[str, ...]]] = {"relay": RELAYS, "member": MEMBERS, "producer": PRODUCERS}


class Fault:
    """One strike. Without an `end` of its own it is over when it has begun."""

    brokers: frozenset[BrokerName] = BOTH
    links: frozenset[Link] = frozenset()
    """These go through a proxy in this run."""
    touches: tuple[str, ...] = EVERYONE
    """Processes that it may hold up or end."""
    least_seconds: float = 0.0
    is_missed: bool = False
    """It did not come about: the verdict says nothing about it."""

    async def begin(self, world: FaultWorld) -> None:
        """Strike."""
        raise NotImplementedError

    async def end(self, world: FaultWorld) -> None:
        """Make good again."""


class Killed(Fault):
    """SIGKILL; started again when it is over."""

    def __init__(self, role: Role) -> None:
        self.touches = (f"{role}-0",)

    async def begin(self, world: FaultWorld) -> None:
        for name in self.touches:
            if not world.has_ended(name):
                world.kill(name)

    async def end(self, world: FaultWorld) -> None:
        for name in self.touches:
            world.start(name)


class Terminated(Killed):
    """SIGTERM: an orderly end, then started again."""

    async def begin(self, world: FaultWorld) -> None:
        for name in self.touches:
            if (code := await world.patiently(name)) != 0:
                raise AssertionError(f"{name} ended with {code} after SIGTERM")


class Frozen(Fault):
    """SIGSTOP for longer than its lease, then SIGCONT."""

    least_seconds = LEASE_SECONDS + 2.0

    def __init__(self, role: Role) -> None:
        self.touches = (f"{role}-0",)

    async def begin(self, world: FaultWorld) -> None:
        for name in self.touches:
            world.suspend(name)

    async def end(self, world: FaultWorld) -> None:
        for name in self.touches:
            world.resume(name)


class Crashed(Fault):
    """One more process, which dies at a named point.

    Where RabbitMQ gives a queue to one member, the others make way for it.
    """

    least_seconds = 10.0

    def __init__(self, role: Role, point: CrashPoint) -> None:
        self._name = f"{role}-{point.value.replace('_', '-')}"
        self._role = role
        self._point = point
        self._away: tuple[str, ...] = ()
        self.touches = (self._name, *_OF_ROLE[role])

    async def begin(self, world: FaultWorld) -> None:
        world.start(self._name, **{ENVIRONMENT_VARIABLE: f"{self._point}:2"})
        world.expect_death(self._name)
        if self._role == "member" and world.servers.broker_name == "rabbitmq":
            await world.until_counted(len(MEMBERS) + 1, LIVE_WORKERS)
            self._away = MEMBERS
        for name in self._away:
            await world.patiently(name)

    async def end(self, world: FaultWorld) -> None:
        if world.has_ended(self._name):
            await world.died(self._name)
        else:
            self.is_missed = True
            world.kill(self._name)
        for name in self._away:
            world.start(name)


How: TypeAlias = Literal["cut", "hung", "half_open", "slow", "reset"]


class Broken(Fault):
    """The link of a role's processes to a server."""

    def __init__(self, role: Role, server: Literal["postgres", "broker"], how: How) -> None:
        self.links = frozenset({(role, server)})
        self.touches = _OF_ROLE[role]
        self._server = server
        self._how = how

    async def begin(self, world: FaultWorld) -> None:
        proxy = world.servers.postgres_proxy if self._server == "postgres" else world.servers.broker_proxy
        match self._how:
            case "cut":
                await proxy.cut()
            case "hung":
                await proxy.hang()
            case "half_open":
                await proxy.hang(Direction.REPLIES)
            case "slow":
                await proxy.delay(0.3)
            case "reset":
                await proxy.drop_connections()

    async def end(self, world: FaultWorld) -> None:
        proxy = world.servers.postgres_proxy if self._server == "postgres" else world.servers.broker_proxy
        if self._how == "half_open":  # what was held back is lost: nobody ever hears of the commit
            await proxy.cut()
        await proxy.restore()


class PostgresRestarted(Fault):
    """As after a crash: recovery from the log."""

    async def begin(self, world: FaultWorld) -> None:
        await asyncio.to_thread(world.servers.postgres.restart, immediate=True)


class BackendsTerminated(Fault):
    """Again and again, all of this database."""

    async def begin(self, world: FaultWorld) -> None:
        for _ in range(5):
            await world.db.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity"
                " where datname = current_database() and pid <> pg_backend_pid()"
            )
            await asyncio.sleep(0.5)


class HorizonHeld(Fault):
    """A transaction with a snapshot and an id stays open: nothing can be vacuumed, and the cut has a hole."""

    least_seconds = 10.0

    def __init__(self) -> None:
        self.touches = ()
        self._held: asyncpg.Connection[Any] | None = None

    async def begin(self, world: FaultWorld) -> None:
        self._held = await asyncpg.connect(world.database_url, timeout=30)
        await self._held.execute("begin isolation level repeatable read; select pg_current_xact_id()")

    async def end(self, world: FaultWorld) -> None:
        if self._held is not None:
            self._held.terminate()


class ConnectionsExhausted(Fault):
    """Every connection of the server is taken, and those of the processes are ended."""

    def __init__(self) -> None:
        self._taken: list[asyncpg.Connection[Any]] = []

    async def begin(self, world: FaultWorld) -> None:
        await world.db.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity"
            " where datname = current_database() and pid <> pg_backend_pid()"
        )
        while True:
            try:
                self._taken.append(await asyncpg.connect(world.database_url, timeout=30))
            except (asyncpg.TooManyConnectionsError, OSError):
                return

    async def end(self, world: FaultWorld) -> None:
        for each in self._taken:
            each.terminate()


class ServerFrozen(Fault):
    """The server answers nothing for a while, and all connections stay open."""

    def __init__(self, server: Literal["postgres", "broker"]) -> None:
        self._server = server

    async def begin(self, world: FaultWorld) -> None:
        getattr(world.servers, self._server).suspend()

    async def end(self, world: FaultWorld) -> None:
        getattr(world.servers, self._server).resume()


class BrokerKilled(Fault):
    """SIGKILL; it comes back with its data."""

    touches = (*RELAYS, *MEMBERS)

    async def begin(self, world: FaultWorld) -> None:
        server = world.servers.broker
        if isinstance(server, RabbitServer):
            await asyncio.to_thread(server.sync_metadata)
        await asyncio.to_thread(server.kill)

    async def end(self, world: FaultWorld) -> None:
        await asyncio.to_thread(world.servers.broker.start)


class BrokerRestarted(Fault):
    """In order."""

    touches = (*RELAYS, *MEMBERS)

    async def begin(self, world: FaultWorld) -> None:
        await asyncio.to_thread(world.servers.broker.stop)

    async def end(self, world: FaultWorld) -> None:
        await asyncio.to_thread(world.servers.broker.start)


class Controlled(Fault):
    """What RabbitMQ's own command does."""

    brokers = frozenset({"rabbitmq"})
    touches = (*RELAYS, *MEMBERS)

    def __init__(self, begin: tuple[str, ...], end: tuple[str, ...] = ()) -> None:
        self._begin, self._end = begin, end

    async def begin(self, world: FaultWorld) -> None:
        await self._ctl(world, self._begin)

    async def end(self, world: FaultWorld) -> None:
        if self._end:
            await self._ctl(world, self._end)

    async def _ctl(self, world: FaultWorld, arguments: tuple[str, ...]) -> None:
        assert isinstance(world.servers.broker, RabbitServer)
        await asyncio.to_thread(partial(world.servers.broker.ctl, *arguments, timeout_seconds=120))


class PartitionsAdded(Fault):
    """To the topic that everything is in."""

    brokers = frozenset({"kafka"})
    touches = (*RELAYS, *MEMBERS)

    async def begin(self, world: FaultWorld) -> None:
        from aiokafka.admin import AIOKafkaAdminClient, NewPartitions

        assert isinstance(world.servers.broker, KafkaServer)
        admin = AIOKafkaAdminClient(bootstrap_servers=world.servers.broker.bootstrap)
        await admin.start()
        try:
            await admin.create_partitions({world.steps: NewPartitions(7)})
        finally:
            await admin.close()


class Limited(Fault):
    """A resource of one process runs out: what it has it keeps, more it does not get."""

    def __init__(self, role: Role, limit: int, to: Callable[[int], int]) -> None:
        self.touches = (f"{role}-0",)
        self._limit = limit
        self._to = to
        self._before: dict[int, tuple[int, int]] = {}

    async def begin(self, world: FaultWorld) -> None:
        for name in self.touches:
            pid = world.pids[name]
            soft, hard = resource.prlimit(pid, self._limit)
            self._before[pid] = (soft, hard)
            resource.prlimit(pid, self._limit, (self._to(pid), hard))

    async def end(self, world: FaultWorld) -> None:
        for pid, limits in self._before.items():
            resource.prlimit(pid, self._limit, limits)


def _table() -> dict[str, Callable[[], Fault]]:
    table: dict[str, Callable[[], Fault]] = {}
    for role in ("relay", "member", "producer"):
        table[f"{role}_killed"] = partial(Killed, role)
        table[f"{role}_frozen"] = partial(Frozen, role)
    for role in ("relay", "member"):
        table[f"{role}_terminated"] = partial(Terminated, role)
        table[f"{role}_without_descriptors"] = partial(Limited, role, resource.RLIMIT_NOFILE, lambda _: 8)
    for role, point in _CRASH_POINTS:
        table[f"{role}_dies_{point}"] = partial(Crashed, role, point)
    table |= {
        "postgres_restarted": PostgresRestarted,
        "postgres_frozen": partial(ServerFrozen, "postgres"),
        "backends_terminated": BackendsTerminated,
        "connections_exhausted": ConnectionsExhausted,
        "horizon_held": HorizonHeld,
        "broker_restarted": BrokerRestarted,
        "broker_killed": BrokerKilled,
        "broker_frozen": partial(ServerFrozen, "broker"),
        "connections_closed": partial(Controlled, ("close_all_connections", "fault")),
        "memory_alarm": partial(
            Controlled,
            ("set_vm_memory_high_watermark", "absolute", "1MB"),
            ("set_vm_memory_high_watermark", "0.4"),
        ),
        "disk_alarm": partial(Controlled, ("set_disk_free_limit", "900TB"), ("set_disk_free_limit", "50MB")),
        "partitions_added": PartitionsAdded,
    }
    for how in get_args(How):
        for role in ("relay", "member", "producer"):
            table[f"{role}_postgres_{how}"] = partial(Broken, role, "postgres", how)
        for role in ("relay", "member"):
            table[f"{role}_broker_{how}"] = partial(Broken, role, "broker", how)
    return table


_CRASH_POINTS: Final[tuple[tuple[Role, CrashPoint], ...]] = (
    ("relay", CrashPoint.READ_BEFORE_PUBLISH),
    ("relay", CrashPoint.PUBLISHED_BEFORE_JOURNAL),
    ("relay", CrashPoint.JOURNALED),
    ("relay", CrashPoint.MOVED_DUE),
    ("member", CrashPoint.RECEIVED_BEFORE_CLAIM),
    ("member", CrashPoint.CLAIMED_BEFORE_HANDLE),
    ("member", CrashPoint.MARKED_BEFORE_EFFECT),
    ("member", CrashPoint.HANDLED_BEFORE_SETTLE),
    ("member", CrashPoint.SETTLED_BEFORE_COMMIT),
    ("member", CrashPoint.COMMITTED_BEFORE_ACK),
    ("member", CrashPoint.WAITING_BEFORE_ACK),
    ("member", CrashPoint.BURIED_BEFORE_ACK),
    ("member", CrashPoint.KEPT_BEFORE_ACK),
    ("member", CrashPoint.DUE_STARTED),
)
FAULTS: Final[Mapping[str, Callable[[], Fault]]] = _table()
