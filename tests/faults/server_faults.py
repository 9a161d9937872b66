"""Faults of the servers, and of the links to them."""

import asyncio
from functools import partial
from typing import Any, Final, Literal, TypeAlias

import asyncpg

from tests.acceptance.world import TOWPATH
from tests.faults.fault import OF_ROLE, Fault
from tests.faults.world import MEMBERS, RELAYS, FaultWorld, Role
from towpath.brokers.rabbitmq.topology import group_queue
from towpath.testing.proxy import Direction
from towpath.testing.services import RabbitServer

_TERMINATE: Final = (
    "select pg_terminate_backend(pid) from pg_stat_activity"
    " where datname = current_database() and pid <> pg_backend_pid()"
)

How: TypeAlias = Literal["cut", "hung", "half_open", "slow", "reset"]


class Broken(Fault):
    """The link of a role's processes to a server."""

    def __init__(self, role: Role, server: Literal["postgres", "broker"], how: How) -> None:
        self.links = frozenset({(role, server)})
        self.touches = OF_ROLE[role]
        self.acts_on = frozenset({f"{server} proxy"})
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

    acts_on = frozenset({"postgres"})

    async def begin(self, world: FaultWorld) -> None:
        await asyncio.to_thread(world.servers.postgres.restart, immediate=True)


class PostgresKilled(Fault):
    """SIGKILL with all its processes; away for a while."""

    acts_on = frozenset({"postgres"})

    async def begin(self, world: FaultWorld) -> None:
        await asyncio.to_thread(world.servers.postgres.kill)

    async def end(self, world: FaultWorld) -> None:
        await asyncio.to_thread(world.servers.postgres.start)


class BackendsTerminated(Fault):
    """Again and again, all of this database."""

    acts_on = frozenset({"postgres"})

    async def begin(self, world: FaultWorld) -> None:
        for _ in range(5):
            await world.fetch(_TERMINATE)
            await asyncio.sleep(0.5)


class HorizonHeld(Fault):
    """A transaction with a snapshot and an id stays open: nothing can be vacuumed, and the cut has a hole."""

    acts_on = frozenset({"postgres"})
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

    acts_on = frozenset({"postgres"})

    def __init__(self) -> None:
        self._taken: list[asyncpg.Connection[Any]] = []

    async def begin(self, world: FaultWorld) -> None:
        await world.fetch(_TERMINATE)
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
        self.acts_on = frozenset({server})

    async def begin(self, world: FaultWorld) -> None:
        getattr(world.servers, self._server).suspend()

    async def end(self, world: FaultWorld) -> None:
        getattr(world.servers, self._server).resume()


class BrokerKilled(Fault):
    """SIGKILL; it comes back with its data."""

    acts_on = frozenset({"broker"})
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

    acts_on = frozenset({"broker"})
    touches = (*RELAYS, *MEMBERS)

    async def begin(self, world: FaultWorld) -> None:
        await asyncio.to_thread(world.servers.broker.stop)

    async def end(self, world: FaultWorld) -> None:
        await asyncio.to_thread(world.servers.broker.start)


class Controlled(Fault):
    """What RabbitMQ's own command does."""

    acts_on = frozenset({"broker"})
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


class QueueDeleted(Controlled):
    """Of the group, with all that waits in it: the broker cancels its consumers.

    A person declares it again, and has sent again what the outbox holds. A member that was just starting
    has ended for the want of it, and whatever supervises it starts it again.
    """

    def __init__(self) -> None:
        super().__init__(())

    async def begin(self, world: FaultWorld) -> None:
        await self._ctl(world, ("delete_queue", group_queue(world.group, world.steps, 0)))

    async def end(self, world: FaultWorld) -> None:
        await world.attempt("apply", TOWPATH, "broker", "apply", "--app", "tests.faults.member:app")
        again = ("outbox", "republish", "--since", "1h", "-y", "--reason", "the queue was deleted")
        await world.attempt("republish", TOWPATH, *again)
        for name in MEMBERS:
            if world.has_ended(name):
                world.start(name)
