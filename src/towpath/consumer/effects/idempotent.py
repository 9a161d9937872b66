"""Idempotent effects: an outside call with a stable key; no transaction is open while it runs."""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial

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
from towpath.telemetry.logging import event_logger

log = event_logger(__name__)


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
        attempt = attempt_of(work)
        argument = argument_of(handler, payload, attempt)
        if not handler.wants_context:
            return done(handler.name, await self._caller.call(handler, work, attempt, argument))
        settling = _Settling(self._database, self._settles, work)
        report = partial(self._report_progress, work)
        call: Call | SyncCall
        if handler.is_sync:
            call = SyncCall(attempt, report)
        else:
            call = Call(attempt, outbox=self._outbox, settling=settling.transaction, report=report)
        try:
            returned = await self._caller.call(handler, work, attempt, argument, call)
        except Exception as error:
            if settling.ended is None:
                raise
            if not isinstance(error, _TokenGone):  # what a handler does after its task ended undoes nothing
                log.error(  # noqa: TRY400 - an event with fields
                    "task.raised_after_settling",
                    exc=error,
                    group=self._caller.group,
                    message_id=str(work.id),
                    type=work.type,
                )
            return settling.ended
        return settling.ended if settling.ended is not None else done(handler.name, returned)


class _Settling:
    """The transaction by which one call may settle itself."""

    __slots__ = ("_database", "_settles", "_work", "ended")

    def __init__(self, database: Database, settles: SettleStore, work: Work) -> None:
        self._database = database
        self._settles = settles
        self._work = work
        self.ended: Committed | Dropped | None = None

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[HandlerSession]:
        if self.ended is not None:
            raise UsageError("call.transaction() ends the task: it can be used once, as the last act")
        async with handler_session(self._database) as session:
            yield session
            self.ended = await settle_and_commit(
                session, self._settles, self._work, Done(TaskState.SUCCEEDED)
            )
        if isinstance(self.ended, Dropped):
            raise _TokenGone
