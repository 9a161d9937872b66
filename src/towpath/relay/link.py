"""A connection to Postgres of the relay's own, opened again after it broke."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Mapping
from typing import Any, Final

import asyncpg

from towpath.errors import ConfigurationError, SchemaMismatch, StoreUnavailable
from towpath.store.database import PLANNER_PINS, plain_url, store_errors

_CONNECT_SECONDS: Final = 10.0
_KEEPALIVES: Final = {
    "tcp_keepalives_idle": "10",
    "tcp_keepalives_interval": "5",
    "tcp_keepalives_count": "3",
}
"""For the server; the socket of this side gets the same numbers."""
_KEEPALIVE_OPTIONS: Final = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}

READS: Final[Mapping[str, str]] = {"default_transaction_read_only": "on"}
"""Session settings of the reading connection: a snapshot taken in a transaction with an xid lies."""
PROGRESS: Final[Mapping[str, str]] = {
    "synchronous_commit": "off",
    "lock_timeout": "5s",
    "idle_in_transaction_session_timeout": "10s",
}
"""Of the journal's: losing its last rows in a crash costs duplicates only."""
SCHEDULE: Final[Mapping[str, str]] = {"lock_timeout": "5s", "statement_timeout": "60s"}
"""Of the mover's, which commits durably: what it moved is published."""
LEASES: Final[Mapping[str, str]] = {"lock_timeout": "5s"}
LISTENS: Final[Mapping[str, str]] = {"synchronous_commit": "off"}
"""Of the listening connection's: when to wake is worth nothing after a crash."""


SHARED_SESSIONS: Final = (
    "the relay's database URL leads through a transaction pooler, where sessions are shared: give the "
    "relay a direct URL or a pool by session (PgBouncer: pool_mode = session); producers may stay"
)
_IS_SET: Final = "select current_setting('plan_cache_mode')"
_BACKEND: Final = "select pg_backend_pid()"
_LOOKS: Final = 10


class Link:
    """One session, direct or through a session pooler, lazily opened; used by one task at a time."""

    def __init__(
        self, url: str, name: str, settings: Mapping[str, str], *, command_timeout_seconds: float
    ) -> None:
        self._url = plain_url(url)
        self._name = f"towpath relay {name}"
        self._settings = {**PLANNER_PINS, **_KEEPALIVES, **settings}
        self._command_timeout = command_timeout_seconds
        self._connection: asyncpg.Connection[Any] | None = None

    async def connection(self) -> asyncpg.Connection[Any]:
        """The open connection, a new one if it was lost.

        Raises StoreUnavailable, and ConfigurationError where a pooler gives each transaction another
        session: settings, prepared statements and what was read would not belong together.
        """
        if self._connection is None or self._connection.is_closed():
            with store_errors():
                self._connection = await self._open()
            _keep_alive(self._connection)
        return self._connection

    async def _open(self) -> asyncpg.Connection[Any]:
        with contextlib.ExitStack() as stack:
            try:
                connection = await self._connect(self._settings)
            except asyncpg.ProtocolViolationError as error:
                if "startup parameter" not in str(error):
                    raise
            else:
                stack.callback(connection.terminate)
                if await connection.fetchval(_IS_SET) == PLANNER_PINS["plan_cache_mode"]:
                    stack.pop_all()
                    return connection
        # A pooler, which refuses or ignores what a client that connects wants set.
        if await are_sessions_shared(self._url):
            raise ConfigurationError(SHARED_SESSIONS)
        with contextlib.ExitStack() as stack:
            connection = await self._connect({})
            stack.callback(connection.terminate)
            await connection.execute(
                "; ".join(f"set {name} = '{value}'" for name, value in self._settings.items())
            )
            stack.pop_all()
        return connection

    async def _connect(self, settings: Mapping[str, str]) -> asyncpg.Connection[Any]:
        return await asyncpg.connect(
            self._url,
            timeout=_CONNECT_SECONDS,
            command_timeout=self._command_timeout,
            server_settings={"application_name": self._name, **settings},
            max_cached_statement_lifetime=0,
        )

    def drop(self) -> None:
        """Close at once, without a word to a server that may not answer."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.terminate()


def _keep_alive(connection: asyncpg.Connection[Any]) -> None:
    transport = getattr(connection, "_transport", None)
    sock = transport.get_extra_info("socket") if transport is not None else None
    if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE_OPTIONS.items():
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


async def are_sessions_shared(url: str) -> bool:
    """Whether a connection sees several sessions, or two see the same.

    A pooler for transactions hands out the session used last, so that two connections taking turns
    see the same; where other clients come between, each sees several. Neither waits while it keeps
    a session of the pooler's from others.
    """
    with contextlib.ExitStack() as stack:
        pair = []
        for _ in range(2):
            connection = await asyncpg.connect(
                url, timeout=_CONNECT_SECONDS, command_timeout=_CONNECT_SECONDS, statement_cache_size=0
            )
            stack.callback(connection.terminate)
            pair.append((connection, set[int]()))
        for _ in range(_LOOKS):
            for connection, seen in pair:
                seen.add(await connection.fetchval(_BACKEND))
    (_, first), (_, second) = pair
    return not (len(first) == len(second) == 1 and first != second)


@contextlib.contextmanager
def link_errors() -> Iterator[None]:
    """Like `store_errors`, with two more meanings.

    A lock not granted in time is the database being away too; a missing table or grant is a
    ConfigurationError.
    """
    try:
        with store_errors():
            yield
    except (
        asyncpg.LockNotAvailableError,
        asyncpg.DeadlockDetectedError,
        asyncpg.SerializationError,
        asyncpg.QueryCanceledError,
    ) as error:
        raise StoreUnavailable(f"the database did not answer in time: {error}") from error
    except (
        asyncpg.UndefinedTableError,
        asyncpg.UndefinedFunctionError,
        asyncpg.InvalidSchemaNameError,
    ) as error:
        raise SchemaMismatch(
            f"the schema is not what this towpath needs: {error}: run towpath db upgrade"
        ) from error
    except (asyncpg.InvalidSQLStatementNameError, asyncpg.DuplicatePreparedStatementError) as error:
        raise ConfigurationError(SHARED_SESSIONS) from error
    except asyncpg.InsufficientPrivilegeError as error:
        raise ConfigurationError(f"the relay's database role lacks a grant: {error}") from error
