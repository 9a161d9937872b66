"""What may come of one attempt at a message."""

from dataclasses import dataclass
from typing import Final, TypeAlias

import msgspec

from towpath.errors import UsageError
from towpath.failures import Failure, redact
from towpath.outcomes import Reject
from towpath.states import TaskState
from towpath.store.deaths import Stage

_result_encoder: Final = msgspec.json.Encoder()


class Done(msgspec.Struct, frozen=True):
    """The handler returned; the row is still RUNNING."""

    state: TaskState
    result: bytes | None = None
    reason_code: str | None = None
    detail: str | None = None


@dataclass(frozen=True, slots=True)
class Committed:
    """The handler's own transaction settled the row."""

    state: TaskState
    promoted_count: int
    reason_code: str | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """The handler raised, after this many tries."""

    failure: Failure
    tries: int = 1
    stage: Stage = "handle"


@dataclass(frozen=True, slots=True)
class InDoubt:
    """The handler was stopped after an at-most-once effect began: it may or may not have happened."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class Dropped:
    """The token was gone when the outcome was to be settled: everything was rolled back."""


Execution: TypeAlias = Done | Committed | Failed | InDoubt | Dropped


def done(handler_name: str, returned: object) -> Done:
    """What a handler's return value means. Raises UsageError for what is not a JSON value."""
    if isinstance(returned, Reject):
        return Done(TaskState.FAILED, None, returned.reason, redact(returned.detail) or None)
    if returned is None:
        return Done(TaskState.SUCCEEDED)
    try:
        return Done(TaskState.SUCCEEDED, _result_encoder.encode(returned))
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"{handler_name} returned {type(returned).__name__}: return JSON values or None"
        ) from error


def is_transient(execution: Execution) -> bool:
    """Whether trying again at once, in place, makes sense."""
    return isinstance(execution, Failed) and execution.failure.in_place
