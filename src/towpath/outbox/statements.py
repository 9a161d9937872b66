"""The producer's statements, on any connection."""

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple
from uuid import UUID

from sqlalchemy import Connection

from towpath.errors import DedupeConflict
from towpath.outbox.rows import EventRow, OutboxRow, ScheduledRow, TaskRow
from towpath.store.callers import PlainAsyncConnection, PlainConnection, Rows, fetch, fetch_async
from towpath.tasks import TaskId

FAMILY: Final = "producer"
_CHUNK_ROWS: Final = 10_000
_CHUNK_BYTES: Final = 32 * 1024 * 1024


class Acceptance(NamedTuple):
    """What became of a submit."""

    task_id: TaskId
    """The new task's, or the first one's."""
    created: bool


def insert(target: PlainConnection, rows: Sequence[EventRow], schema: str) -> None:
    """Write rows in their order: one statement per table, or one for each 32 MiB or 10,000 rows."""
    for name, parameters in _inserts(rows):
        fetch(target, FAMILY, name, schema, parameters)


async def insert_async(target: PlainAsyncConnection, rows: Sequence[EventRow], schema: str) -> None:
    """Write rows in their order: one statement per table, or one for each 32 MiB or 10,000 rows."""
    for name, parameters in _inserts(rows):
        await fetch_async(target, FAMILY, name, schema, parameters)


def accept(target: PlainConnection, row: TaskRow, schema: str) -> Acceptance:
    """Write a task's row unless it was submitted before. Raises DedupeConflict."""
    return _acceptance(fetch(target, FAMILY, "accept_task", schema, row), row)


async def accept_async(target: PlainAsyncConnection, row: TaskRow, schema: str) -> Acceptance:
    """Write a task's row unless it was submitted before. Raises DedupeConflict."""
    return _acceptance(await fetch_async(target, FAMILY, "accept_task", schema, row), row)


def has_changed(connection: Connection, schema: str) -> bool:
    """Whether the connection's transaction has written or locked a row."""
    (found,) = fetch(connection, FAMILY, "has_changed", schema, ())
    return bool(found["has_changed"])


def _acceptance(rows: Rows, row: TaskRow) -> Acceptance:
    (found,) = rows
    if not found["same_body"]:
        raise DedupeConflict(
            f"{row.type} was submitted before under this dedupe key with another body,"
            f" as task {found['task_id']}",
            found["task_id"],
        )
    return Acceptance(TaskId(UUID(found["task_id"])), found["created"])


def _inserts(rows: Sequence[EventRow]) -> Iterator[tuple[str, Sequence[object]]]:
    """The statements' names and parameters."""
    now = [row for row in rows if isinstance(row, OutboxRow)]
    if len(now) == 1:
        yield "insert_outbox_row", now[0]
    else:
        yield from _chunks("insert_outbox", now)
    if len(now) < len(rows):
        yield from _chunks("insert_scheduled", [row for row in rows if isinstance(row, ScheduledRow)])


def _chunks(name: str, rows: Sequence[EventRow]) -> Iterator[tuple[str, Sequence[object]]]:
    """Postgres takes no array of more than 1 GB."""
    start, size = 0, 0
    for end, row in enumerate(rows):
        size += len(row.payload or b"") + len(row.headers)
        if end - start == _CHUNK_ROWS or (size > _CHUNK_BYTES and end > start):
            yield name, _columns(rows[start:end])
            start, size = end, len(row.payload or b"") + len(row.headers)
    if rows:
        yield name, _columns(rows[start:])


def _columns(rows: Sequence[EventRow]) -> list[list[object]]:
    return [list(values) for values in zip(*rows, strict=True)]
