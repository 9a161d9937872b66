"""Finds out which handler blocks the event loop, and says so."""

import asyncio
import sys
import threading
import time
from collections.abc import Callable, Mapping
from types import CodeType, FrameType
from typing import Final

from towpath.handlers import Handler

BEAT_SECONDS: Final = 0.2
BLOCKED_SECONDS: Final = 1.0


class LoopWatch:
    """A thread that looks at the loop's stack when the loop does not come round."""

    def __init__(self, handlers: Mapping[str, Handler], report: Callable[[str, float], None]) -> None:
        self._names: dict[CodeType, str] = {
            handler.function.__code__: handler.name
            for handler in handlers.values()
            if hasattr(handler.function, "__code__")
        }
        self._report = report
        self._beat_at = time.monotonic()
        self._stopped = threading.Event()

    async def run(self) -> None:
        """Beat until cancelled, watched from beside."""
        thread = threading.Thread(
            target=self._watch, args=(threading.get_ident(),), name="loop-watch", daemon=True
        )
        self._beat_at = time.monotonic()
        thread.start()
        try:
            while True:
                self._beat_at = time.monotonic()
                await asyncio.sleep(BEAT_SECONDS)
        finally:
            self._stopped.set()

    def _watch(self, loop_thread: int) -> None:
        reported_at = 0.0
        while not self._stopped.wait(BEAT_SECONDS):
            beat_at = self._beat_at
            blocked = time.monotonic() - beat_at
            if blocked >= BLOCKED_SECONDS and beat_at != reported_at:
                reported_at = beat_at
                self._report(self._culprit(sys._current_frames().get(loop_thread)), round(blocked, 3))  # noqa: SLF001

    def _culprit(self, frame: FrameType | None) -> str:
        """The handler on the stack, or the innermost function."""
        innermost = frame.f_code.co_qualname if frame is not None else "unknown"
        while frame is not None:
            name = self._names.get(frame.f_code)
            if name is not None:
                return name
            frame = frame.f_back
        return innermost
