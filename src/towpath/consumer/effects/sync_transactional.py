"""Transactional effects of plain functions: a sync session in a thread, settled in its transaction."""

from collections.abc import Iterator
from contextlib import contextmanager

from towpath.consumer.effects.calling import Caller, argument_of, attempt_of
from towpath.consumer.effects.executions import Committed, Dropped, Execution, done
from towpath.consumer.effects.threads import in_thread
from towpath.context import SyncHandlerSession, SyncTx
from towpath.crashpoints import CrashPoint, crash_point
from towpath.handlers import Handler
from towpath.outbox import Outbox
from towpath.store.database import Database
from towpath.store.sync_settles import SyncSettleStore
from towpath.store.work import Work


class SyncTransactional:
    """Runs a plain function in a thread; its transaction's last statement settles the task."""

    def __init__(self, caller: Caller, database: Database, settles: SyncSettleStore, outbox: Outbox) -> None:
        self._caller = caller
        self._database = database
        self._settles = settles
        self._outbox = outbox

    async def run(self, handler: Handler, work: Work, payload: object) -> Execution:
        """Committed or Dropped. Raises what the handler or the database raises: rolled back."""
        attempt = attempt_of(work)
        argument = argument_of(handler, payload, attempt)
        injected = self._caller.resources_of(handler.resources)

        def in_transaction() -> Committed | Dropped:
            with self._session() as session:
                context = [SyncTx(session, attempt, self._outbox)] if handler.wants_context else []
                outcome = done(handler.name, handler.function(argument, *context, **injected))
                session.check_transaction()
                session.flush()
                promoted = self._settles.settle_in(
                    session, work, outcome.state, outcome.reason_code, outcome.detail
                )
                if promoted is None:
                    session.end_with_rollback()
                    return Dropped()
                crash_point(CrashPoint.SETTLED_BEFORE_COMMIT)
                session.end_with_commit()
            return Committed(outcome.state, promoted, outcome.reason_code)

        async def threaded() -> object:
            return await in_thread(in_transaction, handler.name)

        execution = await self._caller.wrapped(handler, work, attempt, threaded)
        if not isinstance(execution, Committed | Dropped):
            raise TypeError(f"a middleware around {handler.name} must return what call_next() returned")
        return execution

    @contextmanager
    def _session(self) -> Iterator[SyncHandlerSession]:
        self._database.learn_server_in_thread()
        with SyncHandlerSession(self._database.sync_engine, expire_on_commit=False) as session:
            session.begin_for_handler()
            yield session
