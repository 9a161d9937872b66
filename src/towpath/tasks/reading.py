"""Tasks as rows: get, list, cancel."""

from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, NewType, overload
from uuid import UUID

import msgspec

from towpath.states import TaskState, WaitingFor
from towpath.store.callers import Awaited, Blocking, Caller, Rows, fetch, fetch_async, is_awaited
from towpath.store.statements import DEFAULT_SCHEMA

TaskId = NewType("TaskId", UUID)
FAMILY: Final = "tasks"
_LIST_LIMIT: Final = 1000
_PLAIN: Final = (
    "type",
    "kind",
    "key",
    "owner",
    "version",
    "attempt",
    "run_no",
    "due_at",
    "deadline_at",
    "created_at",
    "updated_at",
    "started_at",
    "finished_at",
    "reason_code",
    "error_class",
    "error_message",
    "trace",
)


@dataclass(frozen=True, slots=True)
class Task:
    """One message within one consumer group, as it was when it was read."""

    id: TaskId
    group: str
    type: str
    kind: str
    """`task` when it was submitted or sent, `event` when the group only heard of it."""
    key: str | None
    owner: str
    state: TaskState
    version: int
    """Grows by one with every change of state."""
    attempt: int
    """Attempts spent."""
    run_no: int
    is_cancel_requested: bool
    waiting_for: WaitingFor | None
    due_at: datetime | None
    deadline_at: datetime | None
    created_at: datetime
    updated_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    progress: dict[str, Any] | None
    result: bytes | None
    """JSON of what the handler returned; None unless it succeeded with a value."""
    reason_code: str | None
    error_class: str | None
    error_message: str | None
    trace: str | None

    @property
    def value(self) -> Any:
        """What the handler returned, as decoded JSON."""
        return None if self.result is None else msgspec.json.decode(self.result)


@overload
def get(target: Blocking, task_id: UUID, *, group: str, schema: str = ...) -> Task | None: ...
@overload
def get(
    target: Awaited, task_id: UUID, *, group: str, schema: str = ...
) -> Coroutine[Any, Any, Task | None]: ...
def get(
    target: Caller, task_id: UUID, *, group: str, schema: str = DEFAULT_SCHEMA
) -> Task | Coroutine[Any, Any, Task | None] | None:
    """One task of a group; None when it is not there: never submitted, not committed, or expired."""
    arguments = (group, str(task_id))
    if is_awaited(target):
        return _get_async(target, arguments, schema)
    return _first(_fetch(target, "get_task", arguments, schema))


@overload
def list(  # noqa: A001
    target: Blocking,
    *,
    group: str,
    state: TaskState | None = ...,
    owner: str | None = ...,
    type: str | None = ...,
    key: str | None = ...,
    before: UUID | None = ...,
    limit: int = ...,
    schema: str = ...,
) -> Sequence[Task]: ...
@overload
def list(  # noqa: A001
    target: Awaited,
    *,
    group: str,
    state: TaskState | None = ...,
    owner: str | None = ...,
    type: str | None = ...,
    key: str | None = ...,
    before: UUID | None = ...,
    limit: int = ...,
    schema: str = ...,
) -> Coroutine[Any, Any, Sequence[Task]]: ...
def list(  # noqa: A001 - tasks.list reads well
    target: Caller,
    *,
    group: str,
    state: TaskState | None = None,
    owner: str | None = None,
    type: str | None = None,  # noqa: A002 - the word used everywhere
    key: str | None = None,
    before: UUID | None = None,
    limit: int = 100,
    schema: str = DEFAULT_SCHEMA,
) -> Sequence[Task] | Coroutine[Any, Any, Sequence[Task]]:
    """Tasks of a group, newest first, at most `limit` (1 to 1000); go on with `before=` the last id.

    Read along the group's tasks in order of age: a filter that fits few of many reads them all.
    """
    if not 1 <= limit <= _LIST_LIMIT:
        raise ValueError(f"limit is 1 to {_LIST_LIMIT}, got {limit}")
    arguments = (group, None if before is None else str(before), state, owner, type, key, limit)
    if is_awaited(target):
        return _fetch_async(target, "list_tasks", arguments, schema)
    return _fetch(target, "list_tasks", arguments, schema)


@overload
def cancel(
    target: Blocking, task_id: UUID, *, group: str, actor: str | None = ..., schema: str = ...
) -> TaskState | None: ...
@overload
def cancel(
    target: Awaited, task_id: UUID, *, group: str, actor: str | None = ..., schema: str = ...
) -> Coroutine[Any, Any, TaskState | None]: ...
def cancel(
    target: Caller, task_id: UUID, *, group: str, actor: str | None = None, schema: str = DEFAULT_SCHEMA
) -> TaskState | Coroutine[Any, Any, TaskState | None] | None:
    """Cancel a task within the caller's transaction; the state it is in afterwards.

    CANCELLED: it had not begun and never will. RUNNING: it was asked to stop, and ends CANCELLED
    unless it finishes first. Any other state: it is too late. None: there is no such task.
    """
    arguments = (group, str(task_id), actor)
    if is_awaited(target):
        return _cancel_async(target, arguments, schema)
    return _state(fetch(target, FAMILY, "cancel_task", schema, arguments, is_write=True))


def _fetch(target: Blocking, name: str, arguments: Sequence[object], schema: str) -> Sequence[Task]:
    return [task_of(row) for row in fetch(target, FAMILY, name, schema, arguments)]


async def _fetch_async(
    target: Awaited, name: str, arguments: Sequence[object], schema: str
) -> Sequence[Task]:
    return [task_of(row) for row in await fetch_async(target, FAMILY, name, schema, arguments)]


async def _get_async(target: Awaited, arguments: Sequence[object], schema: str) -> Task | None:
    return _first(await _fetch_async(target, "get_task", arguments, schema))


async def _cancel_async(target: Awaited, arguments: Sequence[object], schema: str) -> TaskState | None:
    return _state(await fetch_async(target, FAMILY, "cancel_task", schema, arguments, is_write=True))


def _first(tasks: Sequence[Task]) -> Task | None:
    return tasks[0] if tasks else None


def _state(rows: Rows) -> TaskState | None:
    (found,) = rows
    return None if found["state"] is None else TaskState(found["state"])


def task_of(row: Mapping[Any, Any]) -> Task:
    """A task from a row of `get_task` or `list_tasks`."""
    return Task(
        id=TaskId(UUID(str(row["id"]))),
        group=row["consumer_group"],
        state=TaskState(row["state"]),
        is_cancel_requested=row["cancel_requested"],
        waiting_for=None if row["waiting_for"] is None else WaitingFor(row["waiting_for"]),
        progress=None if row["progress"] is None else msgspec.json.decode(row["progress"]),
        result=None if row["result"] is None else bytes(row["result"]),
        **{name: row[name] for name in _PLAIN},
    )
