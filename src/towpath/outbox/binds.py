"""Which connection of a SQLAlchemy session holds the business change.

A session may hold several: reader and writer, or a database per class. An outbox row that travels
on another connection than the change is the dual write all over again, so it is the one that has
changed something, or the call is refused.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import UnboundExecutionError
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.orm import Session

from towpath.errors import NoTransaction
from towpath.outbox.statements import has_changed
from towpath.store.callers import (
    A_WRITE,
    PlainAsyncConnection,
    PlainConnection,
    is_async_psycopg,
    is_asyncpg,
    is_psycopg,
)


def route(session: Session) -> Engine | Connection | None:
    """Where the session sends writes that belong to no class; None if it does not say."""
    try:
        return session.get_bind(clause=A_WRITE)
    except UnboundExecutionError:
        return None


def check_options(session_options: Mapping[str, Any], bind: Engine | Connection) -> None:
    """Raise NoTransaction for settings that make every statement its own transaction."""
    level = session_options.get("isolation_level") or bind.get_execution_options().get("isolation_level")
    if level is None:
        level = getattr(bind.dialect, "_on_connect_isolation_level", None)
    if level == "AUTOCOMMIT":
        _refuse_autocommit()


def check_plain(target: PlainConnection | PlainAsyncConnection) -> None:
    """Raise NoTransaction unless a connection without a session is in a transaction, or begins one itself."""
    if is_asyncpg(target):
        if not target.is_in_transaction():
            raise NoTransaction(
                "the connection is not in a transaction: begin one first,"
                " as in `async with connection.transaction():`"
            )
    elif is_psycopg(target) or is_async_psycopg(target):
        if target.autocommit and not target.info.transaction_status:
            raise NoTransaction(
                "the connection is in autocommit and not in a transaction: begin one first,"
                " as in `with connection.transaction():`"
            )
    else:
        connection = target.sync_connection if isinstance(target, AsyncConnection) else target
        if connection is None:
            raise NoTransaction("the connection is not open: begin first, as in `async with engine.begin()`")
        check_options(connection.get_execution_options(), connection.engine)
        check_connection(connection)


def check_connection(connection: Connection) -> None:
    """Raise NoTransaction when the driver commits each statement, or when it is not Postgres."""
    if connection.dialect.name != "postgresql":
        raise NoTransaction(
            f"the outbox is in Postgres, but the session's change is in {connection.dialect.name}"
        )
    dbapi_connection: Any = connection.connection.dbapi_connection
    if connection.dialect.detect_autocommit_setting(dbapi_connection):
        _refuse_autocommit()


def holder(session: Session, connections: Sequence[Connection], schema: str) -> Connection:
    """The connection of this transaction that a message has to travel on.

    Raises NoTransaction when several databases were changed, or none and the session does not say
    where writes go.
    """
    routed = route(session)
    if len(connections) == 1 and (routed is None or routed.engine is connections[0].engine):
        found = connections[0]
    else:
        found = _changed_one(connections, routed, schema)
    check_connection(found)
    return found


def changed(connections: Sequence[Connection], schema: str) -> list[Connection]:
    """Those whose transaction has written or locked a row."""
    # Of other databases than Postgres we cannot know.
    return [c for c in connections if c.dialect.name == "postgresql" and has_changed(c, schema)]


def _changed_one(
    connections: Sequence[Connection], routed: Engine | Connection | None, schema: str
) -> Connection:
    found = changed(connections, schema)
    if len(found) > 1:
        urls = ", ".join(str(connection.engine.url) for connection in found)
        raise NoTransaction(f"the session changed several databases, a message commits with one: {urls}")
    if found:
        return found[0]
    for connection in connections:
        if routed is not None and connection.engine is routed.engine:
            return connection
    raise NoTransaction("the session has several binds and changed none: emit on a session with one bind")


def _refuse_autocommit() -> None:
    raise NoTransaction(
        "this connection is in AUTOCOMMIT: each statement commits by itself, so a message could not be"
        " tied to your change; use an engine with a real isolation level"
    )
