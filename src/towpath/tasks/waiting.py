"""Waiting for a task to end: short reads with growing pauses, no connection held between them."""

import asyncio
import time
from datetime import timedelta
from typing import Any, Final, TypeAlias
from uuid import UUID

import asyncpg
from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import AsyncEngine

from towpath.backoff import parse_duration
from towpath.errors import TaskNotFound, TaskNotSucceeded, UsageError
from towpath.states import TaskState
from towpath.store.callers import (
    AsyncpgConnection,
    AsyncPsycopgConnection,
    PsycopgConnection,
    is_async_psycopg,
    is_psycopg,
)
from towpath.store.statements import DEFAULT_SCHEMA
from towpath.tasks.reading import Task, get

Waitable: TypeAlias = AsyncEngine | AsyncpgConnection | asyncpg.Pool | AsyncPsycopgConnection
BlockingWaitable: TypeAlias = Engine | PsycopgConnection

DEFAULT_TIMEOUT: Final = "30s"
_FIRST_PAUSE_SECONDS: Final = 0.02
_LONGEST_PAUSE_SECONDS: Final = 1.0


async def result(
    target: Waitable,
    task_id: UUID,
    *,
    group: str,
    timeout: str | timedelta = DEFAULT_TIMEOUT,
    schema: str = DEFAULT_SCHEMA,
) -> Any:
    """What the task's handler returned, as decoded JSON, once it has succeeded.

    `target` is an engine, an asyncpg pool, or a connection of asyncpg or psycopg outside a transaction.
    Raises TaskNotSucceeded when it ends otherwise, TaskNotFound when it is not there, TimeoutError when
    it has not ended in time: it goes on then and may be waited for again.
    """
    seconds = parse_duration(timeout).total_seconds()
    pause = _FIRST_PAUSE_SECONDS
    state: TaskState | None = None
    try:
        async with asyncio.timeout(seconds):
            while True:
                task = _found(await _read(target, task_id, group, schema), task_id, group)
                if task.state.is_final:
                    return _value(task)
                state = task.state
                await asyncio.sleep(pause)
                pause = _longer(pause)
    except TimeoutError as error:
        raise _timed_out(task_id, seconds, state) from error


def result_sync(
    target: BlockingWaitable, task_id: UUID, *, group: str, timeout: str | timedelta, schema: str
) -> Any:
    """The same, blocking the thread."""
    seconds = parse_duration(timeout).total_seconds()
    deadline = time.monotonic() + seconds
    pause = _FIRST_PAUSE_SECONDS
    while True:
        task = _found(_read_sync(target, task_id, group, schema), task_id, group)
        if task.state.is_final:
            return _value(task)
        left = deadline - time.monotonic()
        if left <= 0:
            raise _timed_out(task_id, seconds, task.state)
        time.sleep(min(pause, left))
        pause = _longer(pause)


async def _read(target: Waitable, task_id: UUID, group: str, schema: str) -> Task | None:
    if isinstance(target, AsyncEngine):
        async with target.connect() as connection:
            return await get(connection, task_id, group=group, schema=schema)
    if isinstance(target, asyncpg.Pool):
        async with target.acquire() as lent:
            return await _read(lent, task_id, group, schema)
    if is_async_psycopg(target):
        _refuse_transaction(is_in_one=bool(target.info.transaction_status))
        async with target.transaction():
            return await get(target, task_id, group=group, schema=schema)
    _refuse_transaction(is_in_one=target.is_in_transaction())
    found: Task | None = await get(target, task_id, group=group, schema=schema)
    return found


def _read_sync(target: BlockingWaitable, task_id: UUID, group: str, schema: str) -> Task | None:
    if is_psycopg(target):
        _refuse_transaction(is_in_one=bool(target.info.transaction_status))
        with target.transaction():  # nothing is left open between two looks
            return get(target, task_id, group=group, schema=schema)
    with target.connect() as connection:
        return get(connection, task_id, group=group, schema=schema)


def _refuse_transaction(*, is_in_one: bool) -> None:
    if is_in_one:
        raise UsageError("a task cannot end before the transaction that submitted it: commit first")


def _longer(pause: float) -> float:
    return min(pause * 1.5, _LONGEST_PAUSE_SECONDS)


def _found(task: Task | None, task_id: UUID, group: str) -> Task:
    if task is None:
        raise TaskNotFound(
            f"group {group} has no task {task_id}: its transaction is not committed, or it expired long ago"
        )
    return task


def _value(task: Task) -> Any:
    if task.state is not TaskState.SUCCEEDED:
        raise TaskNotSucceeded(str(task.id), task.state.value, task.reason_code)
    return task.value


def _timed_out(task_id: UUID, seconds: float, state: TaskState | None) -> TimeoutError:
    return TimeoutError(f"task {task_id} is {state or 'unknown'} after {seconds:g} s; it goes on")
