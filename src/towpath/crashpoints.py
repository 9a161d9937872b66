"""Named places where a process may be made to die, for tests of crash safety.

`TOWPATH_CRASH_AT=<name>[:<n>]` in a process's environment kills it with SIGKILL the n-th time
(default 1) it passes that point. Without the variable a point costs one dictionary lookup.
"""

import os
import signal
from collections.abc import Callable
from enum import StrEnum
from typing import Final

ENVIRONMENT_VARIABLE: Final = "TOWPATH_CRASH_AT"


class CrashPoint(StrEnum):
    """Every step whose crash has an answer, in the order a message passes them."""

    EMITTED_BEFORE_COMMIT = "emitted_before_commit"
    COMMITTED_BUSINESS = "committed_business"
    READ_BEFORE_PUBLISH = "read_before_publish"
    PUBLISHED_BEFORE_JOURNAL = "published_before_journal"
    JOURNALED_PARTIAL = "journaled_partial"
    JOURNALED = "journaled"
    JOURNALED_BEFORE_RELEASE = "journaled_before_release"
    RECEIVED_BEFORE_CLAIM = "received_before_claim"
    CLAIMED_BEFORE_HANDLE = "claimed_before_handle"
    KEPT_BEFORE_ACK = "kept_before_ack"
    MARKED_BEFORE_EFFECT = "marked_before_effect"
    HANDLED_BEFORE_SETTLE = "handled_before_settle"
    SETTLED_BEFORE_COMMIT = "settled_before_commit"
    COMMITTED_BEFORE_ACK = "committed_before_ack"
    WAITING_BEFORE_ACK = "waiting_before_ack"
    BURIED_BEFORE_ACK = "buried_before_ack"
    DUE_STARTED = "due_started"
    REPLAYED_BATCH = "replayed_batch"
    CLEARING_SLOT = "clearing_slot"
    CLEARED_SLOT = "cleared_slot"
    REPUBLISHED_BATCH = "republished_batch"
    MOVED_DUE = "moved_due"


class _Armed:
    """The one armed point of this process, read from the environment at the first pass."""

    def __init__(self) -> None:
        name, _, count = os.environ.get(ENVIRONMENT_VARIABLE, "").partition(":")
        self.point = CrashPoint(name) if name else None
        self.passes_left = int(count or 1)

    def passed(self, point: CrashPoint) -> None:
        if point is not self.point:
            return
        self.passes_left -= 1
        if self.passes_left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def _first_pass() -> Callable[[CrashPoint], None]:
    armed: _Armed | None = None

    def passed(point: CrashPoint) -> None:
        nonlocal armed
        if armed is None:
            armed = _Armed()
        armed.passed(point)

    return passed


crash_point: Final = _first_pass()
"""Die here if this process was told to."""
