"""Exit codes, and what an exception means to the person who typed the command.

| code | meaning |
|---|---|
| 0 | done |
| 1 | failed |
| 2 | the command or a setting is wrong; nothing was tried |
| 3 | a check says no |
| 4 | a service cannot be reached: try again |
| 130 | interrupted |
| 143 | told to end while it was loading |
"""

import ssl
from typing import Final

import asyncpg

from towpath.errors import (
    BrokerUnavailable,
    ConfigurationError,
    MissingExtra,
    SettingsError,
    StoreUnavailable,
    TowpathError,
    UsageError,
)
from towpath.failures import describe, problem_of, redact
from towpath.store.database import is_unavailable

OK: Final = 0
FAILED: Final = 1
USAGE: Final = 2
SAYS_NO: Final = 3
UNREACHABLE: Final = 4
INTERRUPTED: Final = 130

_NO_TLS: Final = (
    "the database takes no TLS: turn it on there (ssl = on), or append ?sslmode=disable to "
    "TOWPATH_DATABASE_URL where the network between is trusted"
)
_POOLED: Final = (
    "TOWPATH_DATABASE_URL leads through a pooler that takes no settings of a session: give a direct URL, "
    "or set PgBouncer's ignore_startup_parameters (towpath doctor tells more)"
)
_NOT_TRUSTED: Final = (
    "the database's certificate is not trusted: append &sslrootcert=FILE with its authority to "
    "TOWPATH_DATABASE_URL, and name the host that it was made for"
)
_SQLSTATES: Final = {
    "28": (UNREACHABLE, "the database refused the login: correct user and password in TOWPATH_DATABASE_URL"),
    "3D": (UNREACHABLE, "the database does not exist: create it, or correct TOWPATH_DATABASE_URL"),
    "3F": (FAILED, "the schema is not installed: run towpath db upgrade, or correct TOWPATH_SCHEMA_NAME"),
    "42P01": (FAILED, "a table is missing: run towpath db check"),
    "42703": (FAILED, "a column is missing: run towpath db check"),
    "42883": (FAILED, "a function is missing: run towpath db check"),
    "42501": (FAILED, "the role lacks a grant: towpath db roles prints the statements"),
    "25006": (UNREACHABLE, "the database is read-only, a standby: point TOWPATH_DATABASE_URL at the primary"),
    "55P03": (FAILED, "a row is locked for too long: try again"),
    "57014": (FAILED, "the statement took too long: narrow the filter"),
}


class Stop(Exception):
    """Ends the command with a code and, if there is something to say, one line on stderr."""

    def __init__(self, code: int, line: str = "") -> None:
        super().__init__(line)
        self.code = code
        self.line = line


def explain(error: BaseException) -> tuple[str, int]:
    """One line that names the fix, and the exit code. What drivers say is redacted."""
    if isinstance(error, UsageError | SettingsError | MissingExtra):
        return str(error), USAGE
    line, code = _explained(error)
    return redact(line), code


def _explained(error: BaseException) -> tuple[str, int]:
    if isinstance(error, ConfigurationError):
        return str(error), FAILED
    cause: BaseException | None = error
    while cause is not None:
        state = getattr(cause, "sqlstate", None)
        if isinstance(cause, asyncpg.ProtocolViolationError) and "startup parameter" in str(cause):
            return f"{_POOLED} ({cause})", FAILED
        if isinstance(cause, asyncpg.PostgresError) and isinstance(state, str):
            for length in (5, 2):
                if state[:length] in _SQLSTATES:
                    code, line = _SQLSTATES[state[:length]]
                    return f"{line} ({cause})", code
        if isinstance(cause, ssl.SSLCertVerificationError):
            return f"{_NOT_TRUSTED} ({cause.verify_message})", UNREACHABLE
        if isinstance(cause, ConnectionError) and "rejected SSL upgrade" in str(cause):
            return f"{_NO_TLS} ({cause})", UNREACHABLE
        cause = cause.__cause__
    if isinstance(error, StoreUnavailable | BrokerUnavailable):
        return problem_of(error), UNREACHABLE
    if is_unavailable(error):
        return f"{error}: {StoreUnavailable.advice}", UNREACHABLE
    if isinstance(error, TowpathError):
        return str(error), FAILED
    return f"failed: {type(error).__name__}: {describe(error)} (towpath -vv … shows where)", FAILED
