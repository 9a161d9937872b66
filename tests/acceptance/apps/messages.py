"""Messages that carry the script of their own handling, declared for one group.

A test's group has names of its own, so the classes are made per group, not at import.
"""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import msgspec
from pydantic import BaseModel

from towpath.messages import event, task

Fate = Literal["succeeds", "is_rejected", "fails_while_caused", "dies", "lingers", "kills"]
"""`kills`: its process dies by SIGKILL at each start, at the first beside one that `lingers` until then, and
succeeds at a later start. Both are watched."""


class Messages(NamedTuple):
    """The classes of one group."""

    step: type[Any]
    """An event; its effect is in the database."""
    work: type[Any]
    """A task; its effect is an outside call and the row that records it."""
    request: type[Any]
    """A task that is the same task when its `request_id` is the same."""


def steps_address(group: str) -> str:
    """Where the group's events are."""
    return f"steps.{group}"


def tasks_address(group: str) -> str:
    """Where the group's tasks are."""
    return f"tasks.{group}"


def declare(group: str) -> Messages:
    """The messages of a group. `n` counts within a key and kind from 1."""

    @event("acceptance.step", destination=steps_address(group), key="key")
    @dataclass(frozen=True)
    class Step:
        key: str
        n: int
        failing_attempts: int = 0
        fate: Fate = "succeeds"
        is_watched: bool = False

    @task("acceptance.work", group=group, key="key")
    class Work(BaseModel):
        key: str
        n: int
        failing_attempts: int = 0
        fate: Fate = "succeeds"

    @task("acceptance.request", group=group, key="key", unique=("request_id",))
    class Request(msgspec.Struct):
        key: str
        request_id: str
        n: int = 1

    return Messages(Step, Work, Request)
