"""Transactional outbox relay and idempotent consumer framework: the public names.

Producing: `event`, `task`, `emit`, `emit_many`, `submit`, `send`. Consuming: `App`, `Tx`, `Call`
and what handlers return or raise. Reading tasks: `tasks`.

A name is imported when it is first asked for, so what needs few of them starts sooner.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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

_HOMES = {
    "app": ("App",),
    "backoff": ("RetryPolicy",),
    "context": ("Attempt", "Batch", "Call", "OnceCall", "SyncCall", "SyncTx", "Tx"),
    "errors": ("TowpathError",),
    "messages": ("Message", "RawMessage", "event", "task"),
    "outbox": ("Outbox", "emit", "emit_many", "send", "submit"),
    "outcomes": ("Dead", "DidNotHappen", "Happened", "Reject", "Retry", "Snooze", "StillUnknown", "Verdict"),
    "states": ("TaskState",),
    "tasks": ("TaskHandle", "TaskId"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


if not TYPE_CHECKING:  # a checker that saw it would take every name for one of ours

    def __getattr__(name: str) -> object:
        if name == "tasks":
            return import_module("towpath.tasks")
        if name not in _HOME_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(f"towpath.{_HOME_OF[name]}"), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
