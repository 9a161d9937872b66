"""Events for later: when the next is due, moving the due ones into the outbox, deleting the moved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import asyncpg

from towpath.errors import ConfigurationError, SchemaMismatch
from towpath.store.statements import DEFAULT_SCHEMA, load


@dataclass(frozen=True, slots=True)
class Outlook:
    """What there is to move at a moment."""

    next_seconds: float | None
    """Until the next row is due, negative when it is overdue; None when nothing waits."""
    is_late: bool
    """A row was committed after its due time had been passed."""
    is_behind: bool
    """Rows were written since the last step, due or not."""

    @property
    def is_due(self) -> bool:
        """Whether a step would move something."""
        return self.is_late or (self.next_seconds is not None and self.next_seconds <= 0)


class Place(NamedTuple):
    """A row's place in the order of due times; the time as the database writes it."""

    due_at: str = "-infinity"
    id: int = 0


def outlook_of(found: Mapping[str, Any] | None) -> Outlook:
    """What the row of the statement `look` says.

    Raises ConfigurationError when progress was written under another cluster's transaction ids:
    this database was restored or copied, and going on could skip or repeat events.
    """
    if found is None:
        raise SchemaMismatch("scheduled_progress has no row: it was edited by hand")
    if not found["is_ours"]:
        raise ConfigurationError(
            "the progress of delayed events was written by another database cluster: this database was "
            "restored or copied, and going on could skip events; no relay may run here before a "
            "starting point is set: towpath outbox rebase --to journal --dry-run"
        )
    seconds = found["next_seconds"]
    return Outlook(None if seconds is None else float(seconds), found["is_late"], found["is_behind"])


class ScheduledStore:
    """The statements of one schema. Each method takes the connection to run on, in autocommit."""

    def __init__(self, schema: str = DEFAULT_SCHEMA) -> None:
        self.statements = load("scheduled", schema)

    async def look(self, connection: asyncpg.Connection[Any]) -> Outlook:
        """What there is to move. Raises what `outlook_of` does."""
        return outlook_of(await connection.fetchrow(self.statements["look"]))

    async def move(self, connection: asyncpg.Connection[Any], limit: int) -> int | None:
        """Move due events: up to `limit`, and all that were committed after their due time.

        Returns how many; None when another mover made this step.
        """
        row = await connection.fetchrow(self.statements["move"], limit)
        return None if row is None else row["count"]

    async def forget_moved(
        self, connection: asyncpg.Connection[Any], after: Place, limit: int
    ) -> tuple[int, Place]:
        """Delete moved rows in their order. Returns how many, fewer than `limit` at the end, and the last."""
        row = await connection.fetchrow(self.statements["forget_moved"], after.due_at, after.id, limit)
        return (0, after) if row is None else (row["count"], Place(row["due_at"], row["id"]))

    async def trim(self, connection: asyncpg.Connection[Any], after: int, limit: int) -> int:
        """Delete old progress rows. Returns the last number deleted, `after` when there was none."""
        last: int | None = await connection.fetchval(self.statements["trim_progress"], after, limit)
        return after if last is None else last
