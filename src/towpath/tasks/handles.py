"""What `submit` returns."""

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from sqlalchemy import Engine

from towpath.store.statements import DEFAULT_SCHEMA
from towpath.tasks.reading import TaskId
from towpath.tasks.waiting import DEFAULT_TIMEOUT, Waitable, result, result_sync


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

        Reads on the session's engine, or on the asyncpg connection that submitted it.
        """
        return await result(self.target, self.id, group=self.group, timeout=timeout, schema=self.schema)


@dataclass(frozen=True, slots=True)
class SyncTaskHandle:
    """A task submitted on a plain session."""

    id: TaskId
    group: str
    created: bool
    """False: it had been submitted before, and this is the first one."""
    target: Engine = field(repr=False, compare=False)
    schema: str = field(default=DEFAULT_SCHEMA, repr=False)

    def result(self, timeout: str | timedelta = DEFAULT_TIMEOUT) -> Any:
        """Wait for what the handler returns, blocking the thread; see `tasks.result`. Commit first."""
        return result_sync(self.target, self.id, group=self.group, timeout=timeout, schema=self.schema)
