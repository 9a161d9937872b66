"""What of the outbox waits, and what keeps the database from moving on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import asyncpg

from towpath.store.census import COUNTED
from towpath.store.statements import DEFAULT_SCHEMA, load


@dataclass(frozen=True, slots=True)
class Backlog:
    """A moment of one broker's shards."""

    unowned_count: int
    """Shards that no relay holds."""
    pending_count: int
    """Committed rows that the journal does not call sent, up to `COUNTED`."""
    oldest_unsent_seconds: float
    """Age of the oldest committed row that the journal does not call sent; 0 when there is none."""
    dead_letter_count: int
    """Open ones of messages that no broker took, up to `COUNTED`; of all brokers."""
    oldest_xid: int
    """Of the oldest transaction in progress in the cluster, else the next one there will be."""
    horizon_seconds: float
    """How long one transaction has held the vacuum horizon, as far as this role may see; 0 below a second."""
    has_open_transaction: bool
    """Whether a transaction is in progress that wrote something before the last one that ended."""


class BacklogStore:
    """Reads it by one statement."""

    def __init__(self, schema: str = DEFAULT_SCHEMA) -> None:
        self._statement = load("status", schema)["backlog"]

    async def take(self, connection: asyncpg.Connection[Any], shards: range) -> Backlog:
        """Of the shards of one broker."""
        row = await connection.fetchrow(self._statement, shards.start, shards.stop - 1, COUNTED)
        if row is None:
            raise RuntimeError("the backlog statement returned no row")
        return Backlog(
            row["unowned"],
            row["pending"],
            row["oldest_unsent_seconds"],
            row["dead_letters"],
            int(row["xmin"]),
            row["horizon_seconds"],
            row["xmin"] != row["xmax"],
        )
