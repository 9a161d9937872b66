"""Idempotent effects: an outside call with a stable key; no transaction is open while it runs."""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

from towpath.consumer.effects.calling import Caller, argument_of, attempt_of
from towpath.consumer.effects.executions import Committed, Done, Dropped, Execution, done
from towpath.consumer.effects.transactional import handler_session, settle_and_commit
from towpath.context import Call, HandlerSession, SyncCall
from towpath.errors import UsageError
from towpath.handlers import Handler
from towpath.outbox import Outbox
from towpath.states import TaskState
from towpath.store.database import Database
from towpath.store.settles import SettleStore
from towpath.store.work import Work


class _TokenGone(Exception):
    """Unwinds `call.transaction()`; never leaves this module."""


class Idempotent:
    """Runs a handler outside any transaction; the engine settles what it returns in a batch."""

    def __init__(
        self,
        caller: Caller,
        database: Database,
        settles: SettleStore,
        outbox: Outbox,
        report_progress: Callable[[Work, Mapping[str, object]], None],
    ) -> None:
        self._caller = caller
        self._database = database
        self._settles = settles
        self._outbox = outbox
        self._report_progress = report_progress

    async def run(self, handler: Handler, work: Work, payload: object) -> Execution:
        """Done, or Committed and Dropped where the handler used `call.transaction()`."""
        ended: Committed | Dropped | None = None

        @asynccontextmanager
        async def settling() -> AsyncIterator[HandlerSession]:
            nonlocal ended
            if ended is not None:
                raise UsageError("call.transaction() ends the task: it can be used once, as the last act")
            async with handler_session(self._database) as session:
                yield session
                ended = await settle_and_commit(session, self._settles, work, Done(TaskState.SUCCEEDED))
            if isinstance(ended, Dropped):
                raise _TokenGone

        def report(progress: Mapping[str, object]) -> None:
            self._report_progress(work, progress)

        attempt = attempt_of(work)
        call: Call | SyncCall = Call(attempt, outbox=self._outbox, settling=settling, report=report)
        if handler.is_sync:
            call = SyncCall(attempt, report)
        context = [call] if handler.wants_context else []
        try:
            argument = argument_of(handler, payload, attempt)
            returned = await self._caller.call(handler, work, attempt, argument, *context)
        except Exception:
            if ended is None:
                raise
            return ended  # the task has ended: what the handler does afterwards cannot undo it
        return ended if ended is not None else done(handler.name, returned)
