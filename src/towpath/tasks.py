"""Reading tasks (being written)."""

from dataclasses import dataclass
from typing import Any, NewType
from uuid import UUID

TaskId = NewType("TaskId", UUID)


@dataclass(frozen=True, slots=True)
class TaskHandle:
    """A submitted task."""

    id: TaskId
    group: str
    created: bool
    schema: str
    caller: Any


class SyncTaskHandle(TaskHandle):
    """The same."""
