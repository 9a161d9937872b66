"""Task states and THE transition table; the CHECK constraint, docs and property tests derive from it."""

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType


class TaskState(StrEnum):
    """Where a message stands within one consumer group."""

    ACCEPTED = "ACCEPTED"
    """Submitted; its message is on the way."""
    RUNNING = "RUNNING"
    """Claimed by a worker under a token."""
    WAITING = "WAITING"
    """Will be started from Postgres at `due_at`; `waiting_for` says why."""
    PARKED = "PARKED"
    """Behind another message of its key."""
    SUCCEEDED = "SUCCEEDED"
    """Its effect is there."""
    FAILED = "FAILED"
    """A business decision (`Reject`): final, no retry."""
    DEAD = "DEAD"
    """Exhausted or hopeless; has a row in the dead-letter catalog."""
    UNKNOWN = "UNKNOWN"
    """An at-most-once effect may or may not have happened."""
    CANCELLED = "CANCELLED"
    """Somebody asked for it."""
    EXPIRED = "EXPIRED"
    """Its deadline passed."""

    @property
    def is_final(self) -> bool:
        """Whether no worker will touch the row again unless a person asks for it."""
        return self in FINAL


class WaitingFor(StrEnum):
    """Why a WAITING task waits."""

    RETRY = "retry"
    """It failed and is tried again."""
    SNOOZE = "snooze"
    """Its handler asked to be called later."""
    DELAY = "delay"
    """It was submitted for later."""
    REPLAY = "replay"
    """A person sent it back to work."""
    RERUN = "rerun"
    """It had ended, and a person wants it again."""
    PROMOTED = "promoted"
    """What it was parked behind has ended."""
    LOST = "lost"
    """Its worker died, or its message never came."""


_S = TaskState
FINAL: frozenset[TaskState] = frozenset({_S.SUCCEEDED, _S.FAILED, _S.DEAD, _S.CANCELLED, _S.EXPIRED})

TRANSITIONS: Mapping[TaskState | None, frozenset[TaskState]] = MappingProxyType(
    {
        None: frozenset({_S.ACCEPTED, _S.WAITING, _S.RUNNING, _S.PARKED, _S.DEAD}),
        _S.ACCEPTED: frozenset({_S.RUNNING, _S.PARKED, _S.WAITING, _S.DEAD, _S.CANCELLED, _S.EXPIRED}),
        _S.RUNNING: frozenset(
            {
                _S.SUCCEEDED,
                _S.FAILED,
                _S.WAITING,
                _S.PARKED,
                _S.DEAD,
                _S.UNKNOWN,
                _S.ACCEPTED,
                _S.CANCELLED,
                _S.EXPIRED,
            }
        ),
        _S.WAITING: frozenset({_S.RUNNING, _S.PARKED, _S.DEAD, _S.CANCELLED, _S.EXPIRED}),
        _S.PARKED: frozenset({_S.WAITING, _S.CANCELLED, _S.EXPIRED}),
        _S.UNKNOWN: frozenset(
            {_S.SUCCEEDED, _S.FAILED, _S.WAITING, _S.PARKED, _S.DEAD, _S.CANCELLED, _S.EXPIRED}
        ),
        _S.DEAD: frozenset({_S.WAITING, _S.PARKED}),
        _S.SUCCEEDED: frozenset({_S.WAITING, _S.PARKED}),
        _S.FAILED: frozenset({_S.WAITING, _S.PARKED}),
        _S.CANCELLED: frozenset(),
        _S.EXPIRED: frozenset(),
    }
)
"""From (None: no row yet) to. DEAD leaves by replay, SUCCEEDED and FAILED by a recorded rerun."""


def is_allowed(old: TaskState | None, new: TaskState) -> bool:
    """Whether a task may move from `old` (None: it has no row yet) to `new`."""
    return new in TRANSITIONS[old]


def sql_in(states: frozenset[TaskState] | type[TaskState]) -> str:
    """The states as an SQL list, sorted, for CHECK constraints and generated statements."""
    return ", ".join(f"'{state}'" for state in sorted(states))
