"""Batch effects: many messages, one transaction, set-based SQL; a failure is isolated one by one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias
from uuid import UUID

from towpath.consumer.effects.calling import Caller, attempt_of
from towpath.consumer.effects.executions import Committed, Dropped, Execution, Failed
from towpath.consumer.effects.transactional import handler_session
from towpath.context import Attempt, Batch, Tx
from towpath.crashpoints import CrashPoint, crash_point
from towpath.failures import Classifier
from towpath.handlers import Handler
from towpath.messages import Message
from towpath.outbox import Outbox
from towpath.states import TaskState
from towpath.store.database import Database
from towpath.store.settles import SettleStore
from towpath.store.work import Work


@dataclass(slots=True, eq=False)
class Member:
    """One message of a batch."""

    work: Work
    payload: object
    attempt: Attempt = field(init=False)

    def __post_init__(self) -> None:
        self.attempt = attempt_of(self.work)


Became: TypeAlias = Callable[[Sequence[Member], Execution], None]
"""Told what came of members, each exactly once."""


class Batching:
    """Runs the messages of one batch of a handler together."""

    def __init__(
        self,
        caller: Caller,
        database: Database,
        settles: SettleStore,
        outbox: Outbox,
        classifier: Classifier,
    ) -> None:
        self._caller = caller
        self._database = database
        self._settles = settles
        self._outbox = outbox
        self._classifier = classifier

    async def run(self, handler: Handler, members: Sequence[Member], became: Became) -> None:
        """Together; if that fails, one by one, so that only the culprit fails."""
        error = await self._try_together(handler, members, became)
        if error is None:
            return
        if len(members) == 1:
            became(members, Failed(self._classifier.classify(error)))
            return
        for member in members:
            await self.run(handler, [member], became)

    async def run_alone(self, handler: Handler, member: Member) -> Execution:
        """A batch of one."""
        executions: list[Execution] = []
        await self.run(handler, [member], lambda _, execution: executions.append(execution))
        return executions[0]

    async def _try_together(
        self, handler: Handler, members: Sequence[Member], became: Became
    ) -> Exception | None:
        """Until all whose token still holds are settled; what the handler or the database raised."""
        while members:
            try:
                settled_ids, promoted_count = await self._attempt(handler, members)
            except Exception as error:  # noqa: BLE001 - the edge: whatever a handler raises is classified
                return error
            if len(settled_ids) == len(members):
                became(members, Committed(TaskState.SUCCEEDED, promoted_count))
                return None
            became([member for member in members if member.work.id not in settled_ids], Dropped())
            members = [member for member in members if member.work.id in settled_ids]
        return None

    async def _attempt(self, handler: Handler, members: Sequence[Member]) -> tuple[frozenset[UUID], int]:
        """One transaction: whose token held, and how many followers were promoted.

        Committed if all held, else rolled back.
        """
        messages = [Message(member.payload, member.work.key, member.attempt.envelope) for member in members]
        async with handler_session(self._database) as session:
            context = [Tx(session, None, self._outbox)] if handler.wants_context else []
            await self._caller.call(handler, members[0].work, members[0].attempt, Batch(messages), *context)
            crash_point(CrashPoint.HANDLED_BEFORE_SETTLE)
            session.check_transaction()
            await session.flush()
            settled = await self._settles.settle_batch_in(session, [member.work for member in members])
            if len(settled.ids) < len(members):
                await session.end_with_rollback()
            else:
                crash_point(CrashPoint.SETTLED_BEFORE_COMMIT)
                await session.end_with_commit()
        return settled.ids, settled.promoted_count
