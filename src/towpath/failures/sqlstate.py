"""What a Postgres error means for the message, by its SQLSTATE.

Source: https://www.postgresql.org/docs/current/errcodes-appendix.html
"""

import re
from typing import Final

from towpath.failures.model import FailureScope, Verdict

_SQLSTATE: Final = re.compile(r"[0-9A-Z]{5}")
_AGAIN_AT_ONCE: Final = frozenset({"40001", "40P01", "55P03"})
"""Serialization failure, deadlock, lock not available: the loser of a race, nobody's fault."""
_INFRASTRUCTURE: Final = ("08", "53", "57P", "58", "25006")
_CONFIGURATION: Final = ("42P01", "42703", "42501", "28", "3D000", "3F000")
"""A deploy ahead of its migration, a missing grant, wrong credentials, a missing database."""
_FEW_ATTEMPTS: Final = {"23503": 4, "23505": 3, "25P02": 2, "54": 2}
"""The referenced row may come; a unique violation may be a race; the rest is a bug in the handler."""
_HOPELESS: Final = ("22", "23", "42")
_STALE_PLAN: Final = "cached"


def sqlstate_of(error: BaseException) -> str | None:
    """The SQLSTATE an error carries itself or in the driver's error it wraps, by duck typing."""
    for carrier in (error, getattr(error, "orig", None), getattr(error, "diag", None)):
        for name in ("sqlstate", "pgcode"):
            value = getattr(carrier, name, None)
            if isinstance(value, str) and _SQLSTATE.fullmatch(value):
                return value
    return None


def by_sqlstate(error: BaseException) -> Verdict | None:
    """The verdict for one exception, or None when it is no database error."""
    state = sqlstate_of(error)
    if state is None:
        return _without_sqlstate(error)
    reason = f"sqlstate_{state.lower()}"
    if state in _AGAIN_AT_ONCE or (state == "0A000" and _STALE_PLAN in str(error)):
        return Verdict("retry", reason, in_place=True, is_free=True)
    scopes: tuple[tuple[tuple[str, ...], FailureScope], ...] = (
        (_INFRASTRUCTURE, "infrastructure"),
        (_CONFIGURATION, "configuration"),
    )
    for prefixes, scope in scopes:
        if state.startswith(prefixes):
            return Verdict("retry", reason, scope)
    for prefix, attempts in _FEW_ATTEMPTS.items():
        if state.startswith(prefix):
            return Verdict("retry", reason, max_attempts=attempts)
    if state.startswith(_HOPELESS):
        return Verdict("dead", reason)
    return Verdict("retry", reason)


def _without_sqlstate(error: BaseException) -> Verdict | None:
    """A connection that died under a driver reports no SQLSTATE."""
    if getattr(error, "connection_invalidated", False) is True:
        return Verdict("retry", "database_connection_lost", "infrastructure")
    for cls in type(error).__mro__:
        package = cls.__module__.partition(".")[0]
        if package == "asyncpg" and cls.__name__ == "InterfaceError" and "clos" in str(error):
            return Verdict("retry", "database_connection_lost", "infrastructure")
        if package == "asyncpg" and cls.__name__ == "InternalClientError":
            # Its own state machine, confused by a connection that broke at a bad moment.
            return Verdict("retry", "database_connection_lost", "infrastructure")
        if package == "psycopg" and cls.__name__ == "OperationalError":
            return Verdict("retry", "database_connection_lost", "infrastructure")
        if package == "sqlalchemy" and cls.__name__ == "TimeoutError":
            return Verdict("retry", "database_pool_timeout", "infrastructure")
    return None
