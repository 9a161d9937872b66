"""Messages that were claimed together run and settle together, for as long as none of them has to wait.

A task, a future and a turn of the loop for each message cost more than a quick handler does. So one task
calls the handlers of a wave one after another and settles their successes in one statement. A handler
that waits for something keeps the task to itself: the loop, which comes round only then, starts others
for the rest, and those that end in the same turn settle together. To handlers it looks as if each had a
task of its own: they begin in the same turn of the loop, none waits for another, and what one sets in
its context the next does not see.
"""

import asyncio
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeGuard

from towpath.consumer.batches import Batches
from towpath.consumer.effects.calling import is_being_cancelled
from towpath.consumer.effects.executions import Done, Execution
from towpath.consumer.roster import Roster
from towpath.consumer.running import Runner
from towpath.consumer.runs import Phase, Run
from towpath.consumer.slots import Slots
from towpath.handlers import Handler
from towpath.states import TaskState

_TURN_SECONDS: Final = 0.05
"""Handlers that compute this long let others have a turn of the loop."""


@dataclass(slots=True, eq=False)
class _Wave:
    """What one task has still to do."""

    waiting: deque[Run]
    running: Run | None = None
    succeeded: list[tuple[Run, Done]] = field(default_factory=list)
    is_relieved: bool = False
    """All but the running one was given to other tasks."""
    has_slot: bool = False
    """The running one is of the broker and waits for something: it counts as running."""


class Waves:
    """Starts claimed messages of one worker."""

    def __init__(
        self, handlers: Mapping[str, Handler], runner: Runner, batches: Batches, roster: Roster, slots: Slots
    ) -> None:
        self._handlers = handlers
        self._collected = [handler for handler in handlers.values() if handler.batch is not None]
        self._batches = batches
        self._runner = runner
        self._roster = roster
        self._slots = slots
        self._waits: set[str] = set()
        """Types whose handler waited for something the last time: each gets a task at once."""
        self._ended: list[tuple[Run, Done]] = []
        """Handlers with a task to themselves that succeeded, until those before them are settled."""
        self._is_settling = False
        self._turn = 0
        """Of the loop; it is counted only while somebody wants to know whether he waited."""
        self._is_turning = False
        self._clean = copy_context()
        """No handler has set anything in it."""

    def start(self, runs: Sequence[Run]) -> None:
        """Run claimed messages of one owner."""
        self._clean = copy_context()
        self._runner.claimed(runs)
        self._spread(runs)

    def hurry(self) -> None:
        """Nothing more can start now."""
        for handler in self._collected:
            self._batches.hurry(handler)

    def _spread(self, runs: Iterable[Run]) -> None:
        quick: list[Run] = []
        for run in runs:
            handler = self._handlers.get(run.work.type)
            if handler is not None and handler.batch is not None:
                self._batches.add(handler, handler.batch, run)
            elif run.work.type in self._waits or self._slots.is_bounded(run.work.type):
                self._start_alone(run)
            else:
                quick.append(run)
        if quick:
            self._roster.spawn(quick, self._work_off(_Wave(deque(quick))))

    def _start_alone(self, run: Run) -> None:
        """One of a type that waits: as soon as there is a slot, where it came from the broker."""
        if run.received is None:
            self._begin_alone(run)
        elif not self._slots.enter(run.work.type, partial(self._begin_alone, run)):
            self._roster.add(run)

    def _begin_alone(self, run: Run) -> bool:
        if run.phase is Phase.HANDED_BACK:
            self._roster.forget([run])
            return False
        self._roster.spawn([run], self._work_alone(run), self._clean.copy())
        return True

    async def _work_alone(self, run: Run) -> None:
        turn = self._current_turn()
        try:
            if run.phase is Phase.HANDED_BACK:
                return
            execution = await self._runner.handle(run)
            if run.received is not None:
                self._slots.took(run.work.type, time.monotonic() - run.began_at)
        finally:
            if run.received is not None:
                self._slots.leave(run.work.type)
        if turn == self._turn:
            self._waits.discard(run.work.type)
        if _is_success(execution) and not is_being_cancelled():
            self._settle_soon(run, execution)
        else:
            await self._runner.conclude(run, execution)

    def _current_turn(self) -> int:
        if not self._is_turning:
            self._is_turning = True
            asyncio.get_running_loop().call_soon(self._end_turn)
        return self._turn

    def _end_turn(self) -> None:
        self._turn += 1
        self._is_turning = False

    async def _work_off(self, wave: _Wave) -> None:
        relief = asyncio.get_running_loop().call_soon(self._is_waiting, wave)
        try:
            await self._handle_all(wave)
        finally:
            self._leave_slot(wave)
        relief.cancel()
        await self._runner.conclude_all(wave.succeeded)

    async def _handle_all(self, wave: _Wave) -> None:
        task, clean = asyncio.current_task(), copy_context()
        turn_ends_at: float | None = None
        while wave.waiting:
            run = wave.running = wave.waiting.popleft()
            if run.phase is Phase.HANDED_BACK:
                continue
            execution = await self._runner.handle(run)
            if wave.has_slot:
                self._slots.took(run.work.type, time.monotonic() - run.began_at)
                self._leave_slot(wave)
            turn_ends_at = turn_ends_at or run.began_at + _TURN_SECONDS
            if not wave.is_relieved:
                self._waits.discard(run.work.type)
                if run.began_at > turn_ends_at or _is_spoilt(task, clean):
                    clean.run(self._relieve, wave)
            if not _is_success(execution) or is_being_cancelled():
                await self._runner.conclude(run, execution)
            elif wave.is_relieved:
                self._settle_soon(run, execution)
            else:
                wave.succeeded.append((run, execution))

    def _leave_slot(self, wave: _Wave) -> None:
        if wave.has_slot and wave.running is not None:
            wave.has_slot = False
            self._slots.leave(wave.running.work.type)

    def _settle_soon(self, run: Run, done: Done) -> None:
        """Together with those whose handlers end in this turn of the loop, or while others are settled."""
        run.task = None  # its own ends before that
        run.owner.handled([run])
        self._ended.append((run, done))
        if not self._is_settling:
            self._is_settling = True
            asyncio.get_running_loop().call_soon(self._settle_ended, context=self._clean)

    def _settle_ended(self) -> None:
        ended, self._ended = self._ended, []
        self._roster.spawn([run for run, _ in ended], self._settle(ended))

    async def _settle(self, ended: list[tuple[Run, Done]]) -> None:
        refused = await self._runner.settle_all(ended)
        self._is_settling = bool(self._ended)
        if self._ended:
            self._settle_ended()
        for run, execution in refused:
            await self._runner.conclude(run, execution)

    def _is_waiting(self, wave: _Wave) -> None:
        """The loop came round while the task runs: it waits, in a handler or for an outcome to be settled."""
        if wave.is_relieved:
            return
        if wave.running is not None and wave.running.phase is Phase.HANDLING:
            self._waits.add(wave.running.work.type)
            if wave.running.received is not None and not wave.has_slot:
                wave.has_slot = True
                self._slots.enter_at_once(wave.running.work.type)
        self._relieve(wave)

    def _relieve(self, wave: _Wave) -> None:
        """Leave the task with the running message only."""
        wave.is_relieved = True
        waiting, wave.waiting = wave.waiting, deque()
        succeeded, wave.succeeded = wave.succeeded, []
        if succeeded:
            self._roster.spawn([run for run, _ in succeeded], self._runner.conclude_all(succeeded))
        self._spread(waiting)


def _is_success(execution: Execution) -> TypeGuard[Done]:
    return isinstance(execution, Done) and execution.state is TaskState.SUCCEEDED


def _is_spoilt(task: "asyncio.Task[None] | None", clean: Context) -> bool:
    """Whether a handler left something behind in the task that the next must not find."""
    return copy_context() != clean or (task is not None and task.cancelling() > 0)
