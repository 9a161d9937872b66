"""What `submit` returns."""

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from towpath.store.statements import DEFAULT_SCHEMA
from towpath.tasks.reading import TaskId
from towpath.tasks.waiting import DEFAULT_TIMEOUT, BlockingWaitable, Waitable, result, result_sync


@dataclass(frozen=True, slots=True)
class TaskHandle:
    """A submitted task. Keep `id` and `group` to ask for it later."""

    id: TaskId
    group: str
    created: bool
    """False: it had been submitted before, and this is the first one."""
    target: Waitable = field(repr=False, compare=False)
    schema: str = field(default=DEFAULT_SCHEMA, repr=False)

    async def result(self, timeout: str | timedelta = DEFAULT_TIMEOUT) -> Any:
        """Wait for what the handler returns; see `tasks.result`. Commit first.

        Reads on the engine of the session or connection that submitted it, or on that connection itself
        where there is no engine.
        """
        return await result(self.target, self.id, group=self.group, timeout=timeout, schema=self.schema)


@dataclass(frozen=True, slots=True)
class SyncTaskHandle:
    """A task submitted on a sync session or connection."""

    id: TaskId
    group: str
    created: bool
    """False: it had been submitted before, and this is the first one."""
    target: BlockingWaitable = field(repr=False, compare=False)
    schema: str = field(default=DEFAULT_SCHEMA, repr=False)

    def result(self, timeout: str | timedelta = DEFAULT_TIMEOUT) -> Any:
        """Wait for what the handler returns, blocking the thread; see `tasks.result`. Commit first."""
        return result_sync(self.target, self.id, group=self.group, timeout=timeout, schema=self.schema)
