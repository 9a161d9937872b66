"""A pool of connections to the model of Postgres, as asyncpg's."""

import asyncio
import math
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import asyncpg

from tests.simulation.links import Connection, Server


class PooledConnection(Connection):
    """Waits for a lock until its client gives up."""

    lock_seconds = math.inf


class Pool:
    """What the consumer engine uses of an asyncpg pool."""

    def __init__(
        self, server: Server, max_size: int, command_timeout: float, server_settings: Mapping[str, str]
    ) -> None:
        self._server = server
        self._settings = {"server_settings": server_settings, "command_timeout": command_timeout}
        self._free = asyncio.Semaphore(max_size)
        self._idle: list[Connection] = []
        self._used: set[Connection] = set()
        self._is_closed = False

    async def open(self) -> "Pool":
        self._idle.append(await self._connect())
        return self

    async def _connect(self) -> Connection:
        return await self._server.connect(kind=PooledConnection, **self._settings)  # type: ignore[arg-type]

    @asynccontextmanager
    async def acquire(self, *, timeout: float | None = None) -> AsyncIterator[Connection]:
        if self._is_closed:
            raise asyncpg.InterfaceError("pool is closed")
        async with asyncio.timeout(timeout):
            await self._free.acquire()
        try:
            connection = await self._take()
            try:
                yield connection
            finally:
                self._used.discard(connection)
                if not connection.is_closed():
                    self._idle.append(connection)
        finally:
            self._free.release()

    async def _take(self) -> Connection:
        self._idle = [connection for connection in self._idle if not connection.is_closed()]
        connection = self._idle.pop() if self._idle else await self._connect()
        self._used.add(connection)
        return connection

    def terminate(self) -> None:
        self._is_closed = True
        for connection in sorted({*self._idle, *self._used}, key=lambda each: each.number):
            connection.break_off()

    async def fetch(self, sql: str, *arguments: Any) -> Any:
        async with self.acquire() as connection:
            return await connection.fetch(sql, *arguments)

    async def fetchrow(self, sql: str, *arguments: Any) -> Any:
        async with self.acquire() as connection:
            return await connection.fetchrow(sql, *arguments)

    async def fetchval(self, sql: str, *arguments: Any) -> Any:
        async with self.acquire() as connection:
            return await connection.fetchval(sql, *arguments)

    execute = fetch
