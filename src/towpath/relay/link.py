"""A connection to Postgres of the relay's own, opened again after it broke."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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


class Link:
    """One direct, lazily opened connection; used by one task at a time."""

    def __init__(
        self, url: str, name: str, settings: Mapping[str, str], *, command_timeout_seconds: float
    ) -> None:
        self._url = plain_url(url)
        self._settings = {
            "application_name": f"towpath relay {name}",
            **PLANNER_PINS,
            **_KEEPALIVES,
            **settings,
        }
        self._command_timeout = command_timeout_seconds
        self._connection: asyncpg.Connection[Any] | None = None

    async def connection(self) -> asyncpg.Connection[Any]:
        """The open connection, a new one if it was lost. Raises StoreUnavailable."""
        if self._connection is None or self._connection.is_closed():
            with store_errors():
                self._connection = await asyncpg.connect(
                    self._url,
                    timeout=_CONNECT_SECONDS,
                    command_timeout=self._command_timeout,
                    server_settings=self._settings,
                    max_cached_statement_lifetime=0,
                )
            _keep_alive(self._connection)
        return self._connection

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


@contextmanager
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
    except asyncpg.InsufficientPrivilegeError as error:
        raise ConfigurationError(f"the relay's database role lacks a grant: {error}") from error
