"""A standby that is behind takes over."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final, get_args
from urllib.parse import urlsplit
from uuid import UUID

import asyncpg

from tests.acceptance.world import TOWPATH
from tests.faults.disk_faults import own_postgres
from tests.faults.fault import Fault
from tests.faults.ledger import Lost, now
from tests.faults.servers import Servers
from tests.faults.world import FaultWorld, Link, Role
from towpath.testing.services import PostgresServer

_BEHIND_SECONDS: Final = 2.0
_SINCE: Final = "2m"
"""Longer before the failover than any message of a run waits for its handler."""


class Failover(Fault):
    """The primary dies, and a standby that lacks its last commits takes its place behind the address.

    What a person does afterwards is what the page about backups says: the outbox's messages are sent again,
    for groups that have forgotten what they had done. What the standby never received is gone, and noted as
    lost: all other promises are about what the surviving database holds.
    """

    acts_on = frozenset({"postgres", "postgres proxy"})
    needs_postgres = True
    links: frozenset[Link] = frozenset((role, "postgres") for role in get_args(Role))

    def __init__(self) -> None:
        self._standby: PostgresServer | None = None
        self._since = 0

    @asynccontextmanager
    async def servers(self, shared: Servers, template: str) -> AsyncIterator[Servers]:
        async with own_postgres(shared, PostgresServer(), template) as servers:

            def copy(standby: PostgresServer) -> None:
                standby.run(
                    "pg_basebackup", "-D", standby.data_directory, "-R", "-X", "stream", "-c", "fast",
                    "-d", servers.postgres.url(),
                )  # fmt: skip

            with PostgresServer(fill=copy) as self._standby:
                yield servers

    async def begin(self, world: FaultWorld) -> None:
        async with _session(self._url(world)) as standby:
            self._since = now()
            await standby.execute("alter system set primary_conninfo = ''")
            await standby.execute("select pg_reload_conf()")

            async def is_detached() -> bool:
                return not await standby.fetchval("select count(*) from pg_stat_wal_receiver")

            await world.until("the standby receives nothing", is_detached, every=0.01)
        await asyncio.sleep(_BEHIND_SECONDS)
        await asyncio.to_thread(world.servers.postgres.kill)
        await world.servers.postgres_proxy.cut()

    async def end(self, world: FaultWorld) -> None:
        async with _session(self._url(world)) as standby:
            assert await standby.fetchval("select pg_promote()")
            kept, kept_letters = await _held(standby)
        transactions, letters = await self._of_the_dead(world)
        lost = Lost(transactions - kept, letters - kept_letters, self._since, now())
        world.notes.write(lost)
        proxy, world.database_url = world.servers.postgres_proxy, self._url(world)
        proxy.redirect(urlsplit(world.database_url).port or 0)
        await proxy.restore()
        await world.reopen()
        again = ("outbox", "republish", "--since", _SINCE, "-y", "--reason", "the standby was behind")
        await world.run("republish", TOWPATH, *again)

    async def _of_the_dead(self, world: FaultWorld) -> tuple[frozenset[str], frozenset[UUID]]:
        """What the primary had committed; nobody else reaches it any more."""
        primary = world.servers.postgres
        await asyncio.to_thread(primary.start)
        try:
            async with _session(world.database_url) as dead:
                return await _held(dead)
        finally:
            await asyncio.to_thread(primary.kill)

    def _url(self, world: FaultWorld) -> str:
        """Of the run's database at the standby."""
        assert self._standby is not None
        return self._standby.url(urlsplit(world.database_url).path[1:])


@asynccontextmanager
async def _session(url: str) -> "AsyncIterator[asyncpg.Connection[Any]]":
    connection = await asyncpg.connect(url, timeout=30, command_timeout=60)
    try:
        yield connection
    finally:
        connection.terminate()


async def _held(db: "asyncpg.Connection[Any]") -> tuple[frozenset[str], frozenset[UUID]]:
    """Transactions and dead letters of a database."""
    deeds = await db.fetch("select transaction from deed")
    letters = await db.fetch("select message_id from towpath.dead_letter")
    return frozenset(row["transaction"] for row in deeds), frozenset(row["message_id"] for row in letters)
