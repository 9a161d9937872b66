"""Messages of batch handlers: collected over several claims, run and settled as one.

Nothing but its place in the list and its span belongs to a single message here: no task, no statement.
"""

import asyncio
from collections.abc import Sequence
from functools import partial

from towpath.consumer.effects.batch import Member
from towpath.consumer.effects.executions import Committed, Execution, Failed
from towpath.consumer.endings import CANCELLED
from towpath.consumer.execution import Executor
from towpath.consumer.roster import Roster
from towpath.consumer.running import Runner, span_of
from towpath.consumer.runs import Phase, Run
from towpath.handlers import BatchLimits, Handler
from towpath.telemetry.tracing import ProcessSpan


class Batches:
    """Collects for one worker."""

    def __init__(self, runner: Runner, executor: Executor, roster: Roster) -> None:
        self._runner = runner
        self._executor = executor
        self._roster = roster
        self._collecting: dict[str, dict[Member, Run]] = {}
        self._running: dict[Member, Run] = {}

    def add(self, handler: Handler, limits: BatchLimits, run: Run) -> None:
        """Put it into the batch that is collected now."""
        member = self._runner.begin(run) or self._executor.member(run.work)
        if isinstance(member, Failed):
            self._roster.spawn([run], self._runner.conclude(run, member))
            return
        run.withdraw = self._withdraw
        self._roster.add(run)
        batch = self._collecting.setdefault(handler.type, {})
        batch[member] = run
        if len(batch) == limits.max_size:
            self._start(handler, batch)
        elif len(batch) == 1:
            seconds = limits.max_wait.total_seconds()
            asyncio.get_running_loop().call_later(seconds, self._start, handler, batch)

    def hurry(self, handler: Handler) -> None:
        """No lane can give more now: run the batch whose own lanes hold as much again behind it.

        Order alone keeps it small then, and most of what it could wait for waits for it.
        """
        batch = self._collecting.get(handler.type, {})
        if batch and sum(_followers(run) for run in batch.values()) >= len(batch):
            self._start(handler, batch)

    def _start(self, handler: Handler, batch: dict[Member, Run]) -> None:
        """Run what was collected; a timer that comes after the batch was full finds another one."""
        if self._collecting.get(handler.type) is not batch:
            return
        del self._collecting[handler.type]
        if batch:
            self._running.update(batch)
            span = span_of(next(iter(batch.values())))  # what it emits hangs below its first message
            self._roster.spawn(list(batch.values()), self._run(handler, list(batch), span))

    async def _run(self, handler: Handler, members: Sequence[Member], span: ProcessSpan) -> None:
        with span.current:
            await self._executor.execute_batch(handler, members, partial(self._became, handler))

    def _became(self, handler: Handler, members: Sequence[Member], execution: Execution) -> None:
        """What came of some; those that were withdrawn meanwhile are not here any more."""
        present = [(member, self._running.pop(member)) for member in members if member in self._running]
        for _, run in present:
            run.withdraw = None
        if isinstance(execution, Committed):
            for _, run in present:
                run.phase = Phase.SETTLING  # its task, which may have others to try one by one, is let alone
            self._runner.committed([run for _, run in present], execution.promoted_count)
            return
        for member, run in present:
            if isinstance(execution, Failed) and execution.failure.in_place:
                self._roster.spawn([run], self._runner.try_alone(run, handler, member, execution))
            else:
                self._roster.spawn([run], self._runner.conclude(run, execution))

    def _withdraw(self, run: Run) -> None:
        """It is cancelled or handed back: its batch goes on without it.

        A transaction that runs already is not stopped; whoever is first has the token.
        """
        for batch in (*self._collecting.values(), self._running):
            for member in [member for member, each in batch.items() if each is run]:
                del batch[member]
        run.withdraw = None
        if run.phase is Phase.CANCELLED:
            self._roster.spawn([run], self._runner.conclude(run, Failed(CANCELLED, 0)))
        else:
            span_of(run).end()
            self._roster.forget([run])


def _followers(run: Run) -> int:
    """How many of the broker's messages wait for this one."""
    lane = None if run.received is None else run.received.lane
    return 0 if lane is None else len(lane.waiting)
