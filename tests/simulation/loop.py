"""An event loop whose clock is a number, and processes on it that can be stopped and killed.

Time passes only while nothing can run, so a minute of timeouts takes no time and every run of one
seed is the same. A process is a context: the loop holds back its callbacks while it is frozen, as a
kernel does after SIGSTOP, and runs none after its death, not even clean-up.
"""

import asyncio
import heapq
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar
from typing import Any, TypeVar
from uuid import UUID

from towpath.crashpoints import CrashPoint

T = TypeVar("T")

_MOST_CANCELS = 10
_CANCEL_SECONDS = 20.0
"""A task may begin others when it is cancelled, or be cancelled while it ends."""
_MOST_CANCELLED = 200
"""Timers that are kept though nobody waits for them."""
_MAX_ROUNDS = 20_000
"""Of the loop, while time stands still."""


class Stuck(Exception):
    """Nothing will ever happen again, or something runs for ever without waiting."""


class Killed(BaseException):
    """Ends what a process is doing at the moment of its death."""


class Process:
    """Whose callbacks may run."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_stopped = False
        """Frozen or dead."""
        self.is_dead = False
        self.died = asyncio.Event()
        self.held: list[asyncio.Handle] = []
        self.suspended_seconds = 0.0
        """How long it was frozen: a clock that stands still meanwhile is so far behind."""
        self.doom: CrashPoint | None = None
        """Where it dies."""
        self.owner: UUID | None = None
        """What it calls itself in the database."""
        self.owners: list[UUID] = []
        """All that it ever called itself."""


PROCESS: ContextVar[Process | None] = ContextVar("PROCESS", default=None)
OUTSIDE = Context()
"""Where the servers run: they go on whatever becomes of their clients."""


class SimLoop(asyncio.BaseEventLoop):
    """Runs what is ready in its order, then moves the clock on to the next timer."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._rounds = 0
        self._processes: list[Process] = []

    def time(self) -> float:
        return self._now

    def _process_events(self, event_list: object) -> None:
        """There are none."""

    def _write_to_self(self) -> None:
        """Nothing sleeps."""

    def _run_once(self) -> None:
        ready, timers = self._ready, self._scheduled
        self._rounds += 1
        if self._rounds > _MAX_ROUNDS:
            raise Stuck("something runs for ever without waiting")
        if self._timer_cancelled_count > _MOST_CANCELLED:
            timers[:] = [timer for timer in timers if not timer._cancelled]
            heapq.heapify(timers)
            self._timer_cancelled_count = 0
        if not ready and not self._stopping:
            while timers and timers[0]._cancelled:
                heapq.heappop(timers)._scheduled = False
            if not timers:
                raise Stuck("nothing will ever happen again")
            if timers[0]._when > self._now:
                self._now, self._rounds = timers[0]._when, 0
        while timers and timers[0]._when <= self._now:
            handle = heapq.heappop(timers)
            handle._scheduled = False
            ready.append(handle)
        for _ in range(len(ready)):
            handle = ready.popleft()
            if handle._cancelled:
                continue
            process = handle._context.get(PROCESS)
            if process is not None and process.is_stopped:
                process.held.append(handle)
            else:
                handle._run()

    def spawn(self, name: str, main: Callable[[Process], Coroutine[Any, Any, T]]) -> Process:
        """Start a process."""
        process = Process(name)
        self._processes.append(process)
        context = Context()
        context.run(PROCESS.set, process)
        process.task = self.create_task(main(process), name=name, context=context)  # type: ignore[attr-defined]
        return process

    def freeze(self, process: Process) -> None:
        """As SIGSTOP."""
        process.is_stopped = True

    def thaw(self, process: Process) -> None:
        """As SIGCONT."""
        if not process.is_dead:
            process.is_stopped = False
            self._ready.extend(process.held)
            process.held = []

    def kill(self, process: Process) -> None:
        """As SIGKILL."""
        process.is_stopped = process.is_dead = True
        process.died.set()

    def pass_point(self, point: CrashPoint) -> None:
        """The process that runs comes by a place where it may be told to die."""
        process = PROCESS.get()
        if process is not None and process.doom is point:
            self.kill(process)
            raise Killed

    def bury(self) -> None:
        """End every task there is, also of the dead, so that nothing is left to the garbage collector."""
        for process in self._processes:
            process.is_dead, process.doom = False, None
            self.thaw(process)
        for _ in range(_MOST_CANCELS):
            tasks = asyncio.all_tasks(self)
            for task in tasks:
                task.cancel()
            if tasks:
                self._rounds = 0
                self.run_until_complete(asyncio.wait(tasks, timeout=_CANCEL_SECONDS))
        left = asyncio.all_tasks(self)
        self.close()
        assert not left, f"cannot be ended: {left}"


def run(main: Callable[[SimLoop], Coroutine[Any, Any, T]]) -> T:
    """Run a simulation to its end on a loop of its own."""
    loop = SimLoop()
    loop.set_exception_handler(lambda *_: None)  # of the dead
    asyncio.set_event_loop(loop)
    try:
        return loop.run_until_complete(main(loop))
    finally:
        loop.bury()
        asyncio.set_event_loop(None)
