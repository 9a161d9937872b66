"""What SIGTERM and SIGINT do to a process of ours before it serves.

The kernel drops what process 1 of a container does not handle, and loading takes a second. So this is
imported and called first.
"""

import os
import signal
from collections.abc import Callable
from types import FrameType


def end_on_signals() -> None:
    """They end the process at once, with 128 + their number: for while it loads."""
    _handle(_end)


def interrupt_on_signals() -> None:
    """They raise KeyboardInterrupt."""
    _handle(signal.default_int_handler)


def _handle(handler: Callable[[int, FrameType | None], object]) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)


def _end(number: int, _: FrameType | None) -> None:
    os._exit(128 + number)  # an exception would get lost in a callback of the import system
