"""The caller's own session or connection, on which producing and reading tasks run.

SQLAlchemy sessions (sync, async, scoped) and asyncpg connections. Their schema search path, codecs
and statement caches are the caller's business, so statements here depend on none of them.
"""

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Final, NoReturn, TypeAlias, TypeGuard

import asyncpg
from asyncpg.pool import PoolConnectionProxy
from sqlalchemy import TextClause, column, table, text, update
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session
from sqlalchemy.orm import Session, scoped_session

from towpath.errors import NoTransaction
from towpath.store.statements import load

AnySession: TypeAlias = Session | scoped_session[Any]
AnyAsyncSession: TypeAlias = AsyncSession | async_scoped_session[Any]
AsyncpgConnection: TypeAlias = asyncpg.Connection | PoolConnectionProxy
Awaited: TypeAlias = AnyAsyncSession | AsyncpgConnection
Caller: TypeAlias = AnySession | Awaited

A_WRITE: Final = update(table("outbox", column("id")))
"""For `Session.get_bind(clause=…)`: routing sessions look at the statement and must see a write."""

_COMMENT: Final = re.compile(r"^--.*\n", re.MULTILINE)
_PARAMETER: Final = re.compile(r"\$(\d+)")


@cache
def statement(family: str, name: str, schema: str) -> str:
    """A named statement for asyncpg, without its comment: it is sent each time."""
    return _COMMENT.sub("", load(family, schema)[name])


@cache
def clause(family: str, name: str, schema: str) -> TextClause:
    """A named statement for SQLAlchemy, with `$1` as the bind `p1`."""
    return text(_PARAMETER.sub(r":p\1", statement(family, name, schema)))


def binds(values: Sequence[object]) -> Mapping[str, object]:
    """The binds of a `clause` in the order of its parameters."""
    return {f"p{number}": value for number, value in enumerate(values, 1)}


def is_asyncpg(target: object) -> TypeGuard[AsyncpgConnection]:
    """Whether it is an asyncpg connection, also one that is lent by a pool."""
    return isinstance(target, asyncpg.Connection | PoolConnectionProxy)


def is_async_session(target: object) -> TypeGuard[AnyAsyncSession]:
    """Whether it is an async session."""
    return isinstance(target, AsyncSession | async_scoped_session)


def _refuse(target: object) -> NoReturn:
    raise NoTransaction(
        "this needs a SQLAlchemy Session or AsyncSession or an asyncpg connection, in a transaction;"
        f" got {type(target).__module__}.{type(target).__qualname__}"
    )


def async_session(target: object) -> AsyncSession:
    """The async session itself, of a scoped one the current scope's. Raises NoTransaction."""
    session: object = target() if isinstance(target, async_scoped_session) else target
    return session if isinstance(session, AsyncSession) else _refuse(target)


def sync_session(target: object) -> Session:
    """The plain session behind any session. Raises NoTransaction for everything else."""
    if isinstance(target, Session):
        return target
    if is_async_session(target):
        return async_session(target).sync_session
    if isinstance(target, scoped_session):
        session: Session = target()
        return session
    _refuse(target)
