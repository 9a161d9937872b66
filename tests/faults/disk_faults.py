"""Faults of the disks below Postgres: full ones, and one that takes its time. Each on a server of its own."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

import asyncpg

from tests.faults.disk import fill, make_room, small_disk
from tests.faults.fault import Fault
from tests.faults.servers import Servers
from tests.faults.world import UNREACHABLE, FaultWorld
from towpath.store import migrate
from towpath.testing.proxy import TcpProxy
from towpath.testing.services import PostgresServer, run_sql

_DISK_MEGABYTES: Final = 128
_RESTART_SECONDS: Final = 60.0
_NO_SPACE: Final = "No space left on device"
_TABLE: Final = "create table too_large as select repeat('x', 1000) as x from generate_series(1, 10000)"
_MORE_LOG: Final = "select pg_logical_emit_message(false, 'towpath', repeat('x', 500000))"


@asynccontextmanager
async def own_postgres(
    shared: Servers, server: PostgresServer, template: str, *, disk: Path | None = None
) -> AsyncIterator[Servers]:
    """The broker is shared, Postgres is this one; databases are copies of the template, and on the disk."""
    with server:
        await asyncio.to_thread(server.create_database, template)
        if disk is not None:
            await asyncio.to_thread(
                run_sql,
                server.url(),
                f"create tablespace small location '{disk}'",
                f"alter database {template} set tablespace small",
            )
        await asyncio.to_thread(migrate.upgrade, server.url(template))
        async with TcpProxy("127.0.0.1", server.port) as proxy:
            yield replace(shared, postgres=server, postgres_proxy=proxy)


class DiskFull(Fault):
    """No table of the database can grow: SQLSTATE 53100 for whoever needs a new page. The log has room."""

    acts_on = frozenset({"postgres"})
    needs_postgres = True
    least_seconds = 10.0

    def __init__(self) -> None:
        self._disk: Path | None = None
        self._refusals = 0

    @asynccontextmanager
    async def servers(self, shared: Servers, template: str) -> AsyncIterator[Servers]:
        async with AsyncExitStack() as stack:
            self._disk = stack.enter_context(small_disk(_DISK_MEGABYTES))
            self.is_missed = self._disk is None
            if self._disk is not None:
                own = own_postgres(shared, PostgresServer(), template, disk=self._disk)
                shared = await stack.enter_async_context(own)
            yield shared

    async def begin(self, world: FaultWorld) -> None:
        if self._disk is None:
            return
        await asyncio.to_thread(fill, self._disk)
        try:
            await world.fetch(_TABLE)
        except asyncpg.DiskFullError:
            self._refusals = _refusals(world)
        else:
            raise AssertionError("the disk is not full")

    async def end(self, world: FaultWorld) -> None:
        if self._disk is not None:
            self.is_missed = _refusals(world) == self._refusals  # nobody else needed a page
            await asyncio.to_thread(make_room, self._disk)


class WalDiskFull(Fault):
    """The log cannot grow: Postgres panics. Whatever supervises it starts it again when there is room."""

    acts_on = frozenset({"postgres"})
    needs_postgres = True

    def __init__(self) -> None:
        self._disk: Path | None = None

    @asynccontextmanager
    async def servers(self, shared: Servers, template: str) -> AsyncIterator[Servers]:
        async with AsyncExitStack() as stack:
            self._disk = disk = stack.enter_context(small_disk(_DISK_MEGABYTES))
            self.is_missed = disk is None

            def initialise(server: PostgresServer) -> None:
                server.run(
                    "initdb", "-D", server.data_directory, "-X", f"{disk}/wal", "--wal-segsize=1",
                    "-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync",
                )  # fmt: skip

            if disk is not None:
                server = PostgresServer(fill=initialise, settings={"min_wal_size": "2MB"})
                shared = await stack.enter_async_context(own_postgres(shared, server, template))
            yield shared

    async def begin(self, world: FaultWorld) -> None:
        if self._disk is None:
            return
        await asyncio.to_thread(fill, self._disk)
        with suppress(*UNREACHABLE):
            while True:  # what is in the open segment still goes
                await world.fetch(_MORE_LOG)
        postgres = world.servers.postgres
        assert "PANIC" in postgres.group.log_since_spawn(postgres.name)

    async def end(self, world: FaultWorld) -> None:
        if self._disk is None:
            return
        await asyncio.to_thread(make_room, self._disk)
        async with asyncio.timeout(_RESTART_SECONDS):
            while True:
                await asyncio.to_thread(
                    world.servers.postgres.start
                )  # nothing, where it has recovered by itself
                with suppress(*UNREACHABLE):
                    await world.fetch("select 1")
                    return
                await asyncio.sleep(0.3)


class CommitsSlow(Fault):
    """Each flush of the log takes a tenth of a second longer, and holds up those who wait for the next.

    `commit_delay` at its largest: whoever is to flush sleeps that long with the log's lock in its hands, as
    in a slow fsync. (What no commit waits for, the log's own writer flushes without it.)
    """

    acts_on = frozenset({"postgres"})
    needs_postgres = True
    least_seconds = 10.0

    @asynccontextmanager
    async def servers(self, shared: Servers, template: str) -> AsyncIterator[Servers]:
        async with own_postgres(shared, PostgresServer(fsync=True), template) as own:
            yield own

    async def begin(self, world: FaultWorld) -> None:
        await self._set(world, "set commit_siblings = 0", "set commit_delay = 100000")

    async def end(self, world: FaultWorld) -> None:
        await self._set(world, "reset commit_delay", "reset commit_siblings")

    async def _set(self, world: FaultWorld, *settings: str) -> None:
        for setting in settings:
            await world.fetch(f"alter system {setting}")
        await world.fetch("select pg_reload_conf()")


def _refusals(world: FaultWorld) -> int:
    """How often the server said that its disk is full."""
    postgres = world.servers.postgres
    return postgres.group.log_since_spawn(postgres.name).count(_NO_SPACE)
