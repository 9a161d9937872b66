"""Tells a session that the server ended for idling in its transaction from one that an outage cut.

asyncpg drops the server's reason: to it both are a closed connection. The time between two statements tells.
"""

import time
from typing import Any, Final

from sqlalchemy import Connection, Engine, event
from sqlalchemy.engine import ExceptionContext

from towpath.errors import HandlerIdled

_USED_AT: Final = "towpath_used_at"
_IDLED: Final = "towpath_idled"


def raise_when_idled(engine: Engine, limit_seconds: float) -> None:
    """From now on a session of the engine that is lost after idling for that long raises HandlerIdled."""

    def begun(connection: Connection) -> None:
        connection.info[_USED_AT] = time.monotonic()

    def starts(connection: Connection, *_: Any) -> None:
        connection.info[_IDLED] = _seconds_since_use(connection)

    def ended(connection: Connection, *_: Any) -> None:
        connection.info[_USED_AT] = time.monotonic()

    def failed(context: ExceptionContext) -> None:
        if context.connection is None or not context.is_disconnect:
            return
        connection = context.connection
        idled = connection.info.get(_IDLED, 0.0) if context.statement else _seconds_since_use(connection)
        if idled >= limit_seconds:
            context.invalidate_pool_on_disconnect = False  # the others are well
            raise HandlerIdled(
                f"the handler left its transaction idle for {idled:.3g} s, longer than the "
                f"{limit_seconds:.3g} s that its worker's lease allows: use an idempotent handler for long "
                "calls, or raise TOWPATH_WORKER__LEASE"
            )

    event.listen(engine, "begin", begun)
    event.listen(engine, "before_cursor_execute", starts)
    event.listen(engine, "after_cursor_execute", ended)
    event.listen(engine, "handle_error", failed)


def _seconds_since_use(connection: Connection) -> float:
    """0 outside a transaction, where SQLAlchemy has its own look at a new server."""
    now = time.monotonic()
    used_at: float = connection.info.get(_USED_AT, now)
    return now - used_at
