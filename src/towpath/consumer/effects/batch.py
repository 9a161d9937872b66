"""Batch effects: many messages, one transaction, set-based SQL; a failure is isolated one by one."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from towpath.consumer.effects.calling import Caller, attempt_of
from towpath.consumer.effects.executions import Committed, Dropped, Execution, Failed
from towpath.consumer.effects.transactional import handler_session
from towpath.context import Attempt, Batch, Tx
from towpath.crashpoints import CrashPoint, crash_point
from towpath.failures import Classifier
from towpath.handlers import BatchLimits, Handler
from towpath.messages import Message
from towpath.outbox import Outbox
from towpath.states import TaskState
from towpath.store.database import Database
from towpath.store.settles import SettleStore
from towpath.store.work import Work


@dataclass(slots=True, eq=False)
class _Member:
    """One message that waits for its batch."""

    work: Work
    attempt: Attempt
    payload: object
    execution: "asyncio.Future[Execution]" = field(repr=False)

    def becomes(self, execution: Execution) -> None:
        """Unless whoever waited was cancelled."""
        if not self.execution.done():
            self.execution.set_result(execution)


class Batching:
    """Collects messages of a batch handler and runs them together."""

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
        self._collecting: dict[str, list[_Member]] = {}
        self._flushing: set[asyncio.Task[None]] = set()

    async def run(self, handler: Handler, limits: BatchLimits, work: Work, payload: object) -> Execution:
        """Wait for the batch this message is part of. Cancelling takes only this message out."""
        loop = asyncio.get_running_loop()
        member = _Member(work, attempt_of(work), payload, loop.create_future())
        members = self._collecting.setdefault(handler.type, [])
        members.append(member)
        if len(members) >= limits.max_size:
            self._flush(handler, members)
        elif len(members) == 1:
            loop.call_later(limits.max_wait.total_seconds(), self._flush, handler, members)
        return await member.execution

    def _flush(self, handler: Handler, members: list[_Member]) -> None:
        """Run what was collected; a timer that comes after the batch was full finds another list."""
        if self._collecting.get(handler.type) is not members:
            return
        del self._collecting[handler.type]
        task = asyncio.create_task(self._run_all(handler, members))
        self._flushing.add(task)
        task.add_done_callback(self._flushing.discard)

    async def _run_all(self, handler: Handler, members: list[_Member]) -> None:
        """Together; if that fails, one by one, so that only the culprit fails."""
        waiting = [member for member in members if not member.execution.done()]
        error = await self._try_together(handler, waiting)
        if error is None:
            return
        if len(waiting) == 1:
            waiting[0].becomes(Failed(self._classifier.classify(error)))
            return
        for member in waiting:
            await self._run_all(handler, [member])

    async def _try_together(self, handler: Handler, members: Sequence[_Member]) -> Exception | None:
        """Until all whose token still holds are settled; what the handler or the database raised."""
        remaining = list(members)
        while remaining:
            try:
                settled = await self._attempt(handler, remaining)
            except Exception as error:  # noqa: BLE001 - the edge: whatever a handler raises is classified
                return error
            if settled is None:
                return None
            for member in remaining:
                if member.work.id not in settled:
                    member.becomes(Dropped())
            remaining = [member for member in remaining if member.work.id in settled]
        return None

    async def _attempt(self, handler: Handler, members: Sequence[_Member]) -> frozenset[object] | None:
        """One transaction. None: committed. Else it was rolled back, and these still hold their token."""
        messages = [Message(member.payload, member.work.key, member.attempt.envelope) for member in members]
        batch = Batch(messages)
        async with handler_session(self._database) as session:
            context = [Tx(session, None, self._outbox)] if handler.wants_context else []
            await self._caller.call(handler, members[0].work, members[0].attempt, batch, *context)
            session.check_transaction()
            await session.flush()
            settled = await self._settles.settle_batch_in(session, [member.work for member in members])
            if len(settled.ids) < len(members):
                await session.end_with_rollback()
                return settled.ids
            crash_point(CrashPoint.SETTLED_BEFORE_COMMIT)
            await session.end_with_commit()
        for index, member in enumerate(members):
            promoted = settled.promoted_count if index == 0 else 0
            member.becomes(Committed(TaskState.SUCCEEDED, promoted))
        return None
