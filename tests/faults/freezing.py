"""A process that freezes itself at a named crash point instead of dying there: `TOWPATH_TEST_FREEZE_AT`."""

import os
import signal
import sys
from contextvars import ContextVar
from typing import Final

from towpath import crashpoints
from towpath.crashpoints import CrashPoint

ENVIRONMENT_VARIABLE: Final = "TOWPATH_TEST_FREEZE_AT"
FAILURE: Final = "failure"
"""`<point>:failure` waits for a message whose handler failed."""
_has_failed: Final = ContextVar("has_failed", default=False)


def failing() -> None:
    """The handler of this task is about to fail."""
    _has_failed.set(True)


def arm() -> None:
    """SIGSTOP at the first pass, in every module that is loaded by now; SIGCONT lets it go on."""
    name, _, condition = os.environ.get(ENVIRONMENT_VARIABLE, "").partition(":")
    if not name:
        return
    armed, original = {CrashPoint(name)}, crashpoints.crash_point

    def freeze(point: CrashPoint) -> None:
        if point in armed and (condition != FAILURE or _has_failed.get()):
            armed.clear()
            os.kill(os.getpid(), signal.SIGSTOP)
        original(point)

    for module in list(sys.modules.values()):
        if getattr(module, "crash_point", None) is original:
            module.crash_point = freeze  # type: ignore[attr-defined]
