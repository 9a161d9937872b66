"""Transactional effects: the handler's SQL, the settle and emitted events commit together. Once."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from sqlalchemy.orm import Session

from towpath.consumer.effects.calling import Caller, argument_of, attempt_of
from towpath.consumer.effects.executions import Committed, Done, Dropped, Execution, done
from towpath.context import HandlerSession, Tx
from towpath.crashpoints import CrashPoint, crash_point
from towpath.handlers import Handler
from towpath.outbox import Outbox
from towpath.store.database import Database
from towpath.store.settles import SettleStore
from towpath.store.work import Work


class Transactional:
    """Runs a handler in a transaction whose last statement settles its task."""

    def __init__(self, caller: Caller, database: Database, settles: SettleStore, outbox: Outbox) -> None:
        self._caller = caller
        self._database = database
        self._settles = settles
        self._outbox = outbox

    async def run(self, handler: Handler, work: Work, payload: object) -> Execution:
        """Committed or Dropped. Raises what the handler or the database raises: rolled back."""
        attempt = attempt_of(work)
        async with handler_session(self._database) as session:
            context = [Tx(session, attempt, self._outbox)] if handler.wants_context else []
            argument = argument_of(handler, payload, attempt)
            returned = await self._caller.call(handler, work, attempt, argument, *context)
            return await settle_and_commit(session, self._settles, work, done(handler.name, returned))


async def settle_and_commit(
    session: HandlerSession, settles: SettleStore, work: Work, outcome: Done
) -> Committed | Dropped:
    """Flush, settle as the last statement, commit; a token that is gone rolls everything back."""
    session.check_transaction()
    promoted = await settles.settle_in(
        session,
        work,
        outcome.state,
        commit=_commit,
        result=outcome.result,
        reason_code=outcome.reason_code,
        detail=outcome.detail,
    )
    if promoted is None:
        await session.end_with_rollback()
        return Dropped()
    return Committed(outcome.state, promoted, outcome.reason_code)


def _commit(session: Session) -> None:
    crash_point(CrashPoint.SETTLED_BEFORE_COMMIT)
    session.commit()


@asynccontextmanager
async def handler_session(database: Database) -> AsyncIterator[HandlerSession]:
    """A fresh session in a transaction; closing it rolls back what was not committed."""
    await database.learn_server()
    session = HandlerSession(database.engine, expire_on_commit=False)
    session.begin_for_handler()
    try:
        yield session
    finally:
        await session.leave()
