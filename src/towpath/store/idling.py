"""Tells a session that the server ended for idling in its transaction from one that an outage cut.

asyncpg drops the server's reason: to it both are a closed connection. The time between two statements tells.
"""

import time
from collections.abc import Callable
from typing import Any, Final
from weakref import WeakKeyDictionary

from sqlalchemy import Connection, Engine, event
from sqlalchemy.engine import ExceptionContext, ExecutionContext

from towpath.errors import HandlerIdled

_NEVER: Final = (float("inf"), 0.0)


def raise_when_idled(engine: Engine, limit_seconds: float) -> None:
    """From now on a session of the engine that is lost after idling for that long raises HandlerIdled.

    It listens to the dialect: for whoever listens to an engine, SQLAlchemy makes dispatchers anew with every
    transaction, which costs a tenth of all that one takes.
    """
    used: WeakKeyDictionary[Connection, tuple[float, float]] = WeakKeyDictionary()
    """When the last statement of a session's transaction ended, and how long the next one was waited for."""

    def timed(name: str) -> Callable[..., bool]:
        def execute(*arguments: Any) -> bool:
            context: ExecutionContext = arguments[-1]
            connection = context.root_connection
            used_at, _ = used.get(connection, _NEVER)
            used[connection] = used_at, time.monotonic() - used_at
            getattr(context.dialect, name)(*arguments)
            used[connection] = time.monotonic(), 0.0
            return True

        return execute

    def failed(context: ExceptionContext) -> None:
        if context.connection is None or not context.is_disconnect:
            return
        used_at, idled = used.get(context.connection, _NEVER)
        idled = idled if context.statement else time.monotonic() - used_at
        if idled >= limit_seconds:
            context.invalidate_pool_on_disconnect = False  # the others are well
            raise HandlerIdled(
                f"the handler left its transaction idle for {idled:.3g} s, longer than the "
                f"{limit_seconds:.3g} s that its worker's lease allows: use an idempotent handler for long "
                "calls, or raise TOWPATH_WORKER__LEASE"
            )

    for name in ("do_execute", "do_executemany", "do_execute_no_params"):
        event.listen(engine, name, timed(name))
    event.listen(engine, "handle_error", failed)
