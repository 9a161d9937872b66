"""Settings and one checked connection for a command."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeVar

import asyncpg

from towpath import settings
from towpath.settings import Settings
from towpath.store.audit import AuditStore
from towpath.store.database import PLANNER_PINS, plain_url, store_errors
from towpath.store.installed import ensure_installed

T = TypeVar("T")

_CONNECT_SECONDS = 10
_STATEMENT_SECONDS = 120


@dataclass(frozen=True, slots=True)
class Session:
    """What a command works with."""

    connection: "asyncpg.Connection[Any]"
    schema: str

    async def clock(self) -> datetime:
        """The database's time."""
        return await AuditStore(self.schema).clock(self.connection)


def database_of(loaded: Settings) -> tuple[str, str]:
    """URL and schema, as the store's functions take them."""
    return plain_url(loaded.database_url.get_secret_value()), loaded.schema_name


@asynccontextmanager
async def connected(*, is_pinned: bool = False) -> AsyncIterator[Session]:
    """A connection to the database of the settings, whose schema is the right one.

    `is_pinned`: every statement is a lookup by index, as in the engines. Raises SettingsError,
    StoreUnavailable, SchemaMismatch.
    """
    url, schema = database_of(settings.load())
    pins = PLANNER_PINS if is_pinned else {"jit": "off"}
    with store_errors():
        connection = await asyncpg.connect(
            url,
            timeout=_CONNECT_SECONDS,
            command_timeout=_STATEMENT_SECONDS,
            server_settings={"application_name": "towpath cli", "lock_timeout": "30s", **pins},
        )
        try:
            await ensure_installed(connection, schema)
            yield Session(connection, schema)
            await connection.close(timeout=_CONNECT_SECONDS)
        finally:
            if not connection.is_closed():
                connection.terminate()


def run_async(work: Coroutine[Any, Any, T]) -> T:
    """Run one command's coroutine to its end."""
    return asyncio.run(work)
