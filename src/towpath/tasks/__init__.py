"""Reading tasks: how far they are, what came of them, and cancelling them.

```python
task = await tasks.get(session, task_id, group="billing")
value = await tasks.result(engine, task_id, group="billing", timeout="30s")
```

A task belongs to a consumer group, so its id alone does not name it. The functions run inside the
transaction of the session or connection; async ones are awaited.
"""

from towpath.tasks.handles import SyncTaskHandle, TaskHandle
from towpath.tasks.reading import Task, TaskId, cancel, get, list  # noqa: A004 - tasks.list reads well
from towpath.tasks.waiting import result

__all__ = ["SyncTaskHandle", "Task", "TaskHandle", "TaskId", "cancel", "get", "list", "result"]
