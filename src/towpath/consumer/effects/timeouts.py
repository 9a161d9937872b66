"""Timeouts of calls that wait: one timer for all that may take equally long, instead of one for each.

Calls with the same timeout are due in the order in which they began, and most are over long before.
"""

import asyncio
from types import TracebackType
from typing import Self


class Timeouts:
    """Of the calls of one event loop."""

    def __init__(self) -> None:
        self._lines: dict[float, _Line] = {}

    def after(self, seconds: float) -> "Bound":
        """A block that is stopped after that time and raises TimeoutError then, like `asyncio.timeout`."""
        line = self._lines.get(seconds)
        if line is None:
            line = self._lines[seconds] = _Line(seconds, self._lines)
        return Bound(line)


class _Line:
    """Those that may take equally long, the oldest first, and the timer for the oldest."""

    __slots__ = ("_lines", "_running", "_timer", "seconds")

    def __init__(self, seconds: float, lines: "dict[float, _Line]") -> None:
        self.seconds = seconds
        self._lines = lines
        self._running: dict[Bound, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, bound: "Bound") -> None:
        self._running[bound] = None
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_at(bound.due_at, self._stop)

    def remove(self, bound: "Bound") -> None:
        self._running.pop(bound, None)
        if not self._running:
            self._lines.pop(self.seconds, None)
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    def _stop(self) -> None:
        self._timer = None
        loop = asyncio.get_running_loop()
        while self._running:
            oldest = next(iter(self._running))
            if oldest.due_at > loop.time():
                self._timer = loop.call_at(oldest.due_at, self._stop)
                return
            del self._running[oldest]
            oldest.stop()
        self._lines.pop(self.seconds, None)


class Bound:
    """One such block, of one task."""

    __slots__ = ("_cancelling", "_line", "_task", "due_at", "is_expired")

    def __init__(self, line: _Line) -> None:
        self._line = line
        self.is_expired = False
        """Its time was up before it ended."""

    def __enter__(self) -> Self:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("only a task can be stopped")
        self._task, self._cancelling = task, task.cancelling()
        self.due_at = asyncio.get_running_loop().time() + self._line.seconds
        self._line.add(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.is_expired:
            self._line.remove(self)
        elif self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise TimeoutError from error

    def stop(self) -> None:
        """Its time is up."""
        self.is_expired = True
        self._task.cancel()
