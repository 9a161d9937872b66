"""Delayed tasks take their place in their lane when they are due."""

from collections.abc import Sequence
from typing import Any

import asyncpg

from towpath.store.database import Database
from towpath.store.gates import hold
from towpath.store.statements import load


class _NothingToDo(Exception):
    """Rolls a transaction back: another member was quicker, or the task was cancelled."""


def is_outside(row: Any) -> bool:
    """Whether a due row has a key and is not in its lane yet."""
    return row["waiting_for"] == "delay" and row["lane"] is None and row["key"] is not None


async def admit_delayed(database: Database, group: str, due: Sequence[Any]) -> int:
    """Put due tasks that were submitted with a delay under the gate of their lane, oldest first.

    The producer does not know what its consumers order by, so such a row has a key and no lane until
    it is due. Only for groups ordered by key: a task that waited has no partition. Returns how many
    rows of `due` are no longer what they were. Raises StoreUnavailable.
    """
    sql = load("work", database.schema)
    count = 0
    for row in due:
        if not is_outside(row):
            continue
        count += 1
        try:
            async with database.transaction() as connection:
                is_head = await hold(connection, sql, group, row["source"], row["key"], row["id"])
                if (
                    await connection.fetchval(sql["admit_delayed"], group, row["id"], row["key"], is_head)
                    is None
                ):
                    raise _NothingToDo
        except (_NothingToDo, asyncpg.DeadlockDetectedError):
            continue
    return count
