"""The caller's own session or connection, on which producing and reading tasks run.

SQLAlchemy sessions (sync, async, scoped), and connections without one: SQLAlchemy Core's, asyncpg's and
psycopg's. Their schema search path, codecs, row factories and statement caches are the caller's
business, so statements here depend on none of them.
"""

import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from functools import cache
from typing import Any, Final, NoReturn, Protocol, TypeAlias

import asyncpg
from asyncpg.pool import PoolConnectionProxy
from sqlalchemy import Connection, TextClause, column, table, text, update
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session
from sqlalchemy.orm import Session, scoped_session
from typing_extensions import TypeIs

from towpath.errors import NoTransaction
from towpath.store.statements import load


class PsycopgConnection(Protocol):
    """psycopg 3's `Connection`, told by its shape, since psycopg need not be installed."""

    @property
    def autocommit(self) -> bool: ...
    @property
    def prepare_threshold(self) -> int | None: ...
    @property
    def info(self) -> Any: ...
    def transaction(self) -> AbstractContextManager[Any]: ...
    def commit(self) -> None: ...


class AsyncPsycopgConnection(Protocol):
    """psycopg 3's `AsyncConnection`."""

    @property
    def autocommit(self) -> bool: ...
    @property
    def prepare_threshold(self) -> int | None: ...
    @property
    def info(self) -> Any: ...
    def transaction(self) -> AbstractAsyncContextManager[Any]: ...
    async def commit(self) -> None: ...


AnySession: TypeAlias = Session | scoped_session[Any]
AnyAsyncSession: TypeAlias = AsyncSession | async_scoped_session[Any]
AsyncpgConnection: TypeAlias = asyncpg.Connection | PoolConnectionProxy
PlainConnection: TypeAlias = Connection | PsycopgConnection
PlainAsyncConnection: TypeAlias = AsyncpgConnection | AsyncConnection | AsyncPsycopgConnection
Blocking: TypeAlias = AnySession | PlainConnection
Awaited: TypeAlias = AnyAsyncSession | PlainAsyncConnection
Caller: TypeAlias = Blocking | Awaited

Rows: TypeAlias = Sequence[Mapping[str, Any]]

A_WRITE: Final = update(table("outbox", column("id")))
"""For `Session.get_bind(clause=…)`: routing sessions look at the statement and must see a write."""

_COMMENT: Final = re.compile(r"^--.*\n", re.MULTILINE)
_PARAMETER: Final = re.compile(r"\$(\d+)")


def fetch(
    target: Blocking, family: str, name: str, schema: str, values: Sequence[object], *, is_write: bool = False
) -> Rows:
    """Run a named statement and return its rows; none for a statement that gives none."""
    if is_psycopg(target):
        import psycopg  # noqa: PLC0415  it is there if one of its connections is

        connection: Any = target
        with psycopg.RawCursor(connection, row_factory=psycopg.rows.dict_row) as cursor:
            cursor.execute(_statement(family, name, schema).encode(), values)
            return cursor.fetchall() if cursor.description else ()
    sql, given = _clause(family, name, schema), _binds(values)
    found: Any
    if isinstance(target, Connection):
        found = target.execute(sql, given)
    else:
        route = {"clause": A_WRITE} if is_write else {}
        found = sync_session(target).execute(sql, given, bind_arguments=route)
    rows: Rows = found.mappings().all() if found.returns_rows else ()
    return rows


async def fetch_async(
    target: Awaited, family: str, name: str, schema: str, values: Sequence[object], *, is_write: bool = False
) -> Rows:
    """The same, awaited."""
    if is_asyncpg(target):
        rows: Rows = await target.fetch(_statement(family, name, schema), *values)
        return rows
    if is_async_psycopg(target):
        import psycopg  # noqa: PLC0415  it is there if one of its connections is

        connection: Any = target
        async with psycopg.AsyncRawCursor(connection, row_factory=psycopg.rows.dict_row) as cursor:
            await cursor.execute(_statement(family, name, schema).encode(), values)
            return await cursor.fetchall() if cursor.description else ()
    if isinstance(target, AsyncConnection):
        return await target.run_sync(fetch, family, name, schema, values)
    return await async_session(target).run_sync(fetch, family, name, schema, values, is_write=is_write)


@cache
def _statement(family: str, name: str, schema: str) -> str:
    """A named statement for asyncpg and psycopg, without its comment: it is sent each time."""
    return _COMMENT.sub("", load(family, schema)[name])


@cache
def _clause(family: str, name: str, schema: str) -> TextClause:
    """A named statement for SQLAlchemy, with `$1` as the bind `p1`."""
    return text(_PARAMETER.sub(r":p\1", _statement(family, name, schema)))


def _binds(values: Sequence[object]) -> Mapping[str, object]:
    return {f"p{number}": value for number, value in enumerate(values, 1)}


def is_asyncpg(target: object) -> TypeIs[AsyncpgConnection]:
    """Whether it is an asyncpg connection, also one that is lent by a pool."""
    return isinstance(target, asyncpg.Connection | PoolConnectionProxy)


def is_psycopg(target: object) -> TypeIs[PsycopgConnection]:
    """Whether it is a connection of psycopg 3."""
    psycopg = sys.modules.get("psycopg")
    return psycopg is not None and isinstance(target, psycopg.Connection)


def is_async_psycopg(target: object) -> TypeIs[AsyncPsycopgConnection]:
    """Whether it is an async connection of psycopg 3."""
    psycopg = sys.modules.get("psycopg")
    return psycopg is not None and isinstance(target, psycopg.AsyncConnection)


def is_plain(target: object) -> TypeIs[PlainConnection]:
    """Whether it is a connection without a session, and answers at once."""
    return isinstance(target, Connection) or is_psycopg(target)


def is_plain_async(target: object) -> TypeIs[PlainAsyncConnection]:
    """Whether it is a connection without a session, and is awaited."""
    return is_asyncpg(target) or isinstance(target, AsyncConnection) or is_async_psycopg(target)


def is_awaited(target: object) -> TypeIs[Awaited]:
    """Whether what is asked of it is awaited."""
    return is_plain_async(target) or isinstance(target, AsyncSession | async_scoped_session)


def _refuse(target: object) -> NoReturn:
    raise NoTransaction(
        "this needs a SQLAlchemy session or connection, or a connection of asyncpg or psycopg 3, in a"
        f" transaction; got {type(target).__module__}.{type(target).__qualname__}"
    )


def async_session(target: object) -> AsyncSession:
    """The async session itself, of a scoped one the current scope's. Raises NoTransaction."""
    session: object = target() if isinstance(target, async_scoped_session) else target
    return session if isinstance(session, AsyncSession) else _refuse(target)


def sync_session(target: object) -> Session:
    """The plain session behind any session. Raises NoTransaction for everything else."""
    if isinstance(target, Session):
        return target
    if isinstance(target, AsyncSession | async_scoped_session):
        return async_session(target).sync_session
    if isinstance(target, scoped_session):
        session: Session = target()
        return session
    _refuse(target)
