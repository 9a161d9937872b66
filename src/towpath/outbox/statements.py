"""The producer's statements, through SQLAlchemy's and asyncpg's connections."""

from collections.abc import Sequence
from typing import NamedTuple
from uuid import UUID

from sqlalchemy import Connection

from towpath.outbox.rows import OutboxRow, TaskRow
from towpath.store.callers import AsyncpgConnection, binds, clause, statement

FAMILY = "producer"


class Acceptance(NamedTuple):
    """What became of a submit."""

    task_id: UUID
    """The new task's, or the first one's."""
    created: bool
    same_body: bool


def insert(connection: Connection, rows: Sequence[OutboxRow], schema: str) -> None:
    """Write outbox rows in their order with one statement."""
    name, parameters = _insert_of(rows)
    connection.execute(clause(FAMILY, name, schema), binds(parameters))


async def insert_async(connection: AsyncpgConnection, rows: Sequence[OutboxRow], schema: str) -> None:
    """Write outbox rows in their order with one statement."""
    name, parameters = _insert_of(rows)
    await connection.execute(statement(FAMILY, name, schema), *parameters)


def accept(connection: Connection, row: TaskRow, schema: str) -> Acceptance:
    """Write a task's row unless it was submitted before."""
    found = connection.execute(clause(FAMILY, "accept_task", schema), binds(row)).one()
    return Acceptance(UUID(found.task_id), found.created, found.same_body)


async def accept_async(connection: AsyncpgConnection, row: TaskRow, schema: str) -> Acceptance:
    """Write a task's row unless it was submitted before."""
    (found,) = await connection.fetch(statement(FAMILY, "accept_task", schema), *row)
    return Acceptance(UUID(found["task_id"]), found["created"], found["same_body"])


def has_changed(connection: Connection, schema: str) -> bool:
    """Whether the connection's transaction has written or locked a row."""
    return bool(connection.scalar(clause(FAMILY, "has_changed", schema)))


def _insert_of(rows: Sequence[OutboxRow]) -> tuple[str, Sequence[object]]:
    if len(rows) == 1:
        return "insert_outbox_row", rows[0]
    return "insert_outbox", [list(values) for values in zip(*rows, strict=True)]
