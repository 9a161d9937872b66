"""Transactional outbox relay and idempotent consumer framework: the public names.

Producing: `event`, `task`, `emit`, `emit_many`, `submit`, `send`. Consuming: `App`, `Tx`, `Call`
and what handlers return or raise. Reading tasks: `tasks`.
"""

from towpath import tasks
from towpath.app import App
from towpath.backoff import RetryPolicy
from towpath.context import Attempt, Batch, Call, OnceCall, SyncCall, SyncTx, Tx
from towpath.errors import TowpathError
from towpath.messages import Message, RawMessage, event, task
from towpath.outbox import Outbox, emit, emit_many, send, submit
from towpath.outcomes import Dead, DidNotHappen, Happened, Reject, Retry, Snooze, StillUnknown, Verdict
from towpath.states import TaskState
from towpath.tasks import TaskHandle, TaskId

__all__ = [
    "App",
    "Attempt",
    "Batch",
    "Call",
    "Dead",
    "DidNotHappen",
    "Happened",
    "Message",
    "OnceCall",
    "Outbox",
    "RawMessage",
    "Reject",
    "Retry",
    "RetryPolicy",
    "Snooze",
    "StillUnknown",
    "SyncCall",
    "SyncTx",
    "TaskHandle",
    "TaskId",
    "TaskState",
    "TowpathError",
    "Tx",
    "Verdict",
    "emit",
    "emit_many",
    "event",
    "send",
    "submit",
    "task",
    "tasks",
]
