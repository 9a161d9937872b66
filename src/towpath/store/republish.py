"""Statements that send again what the outbox still holds."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, TypeAlias

import asyncpg

from towpath.store.statements import DEFAULT_SCHEMA, load

Connection: TypeAlias = "asyncpg.Connection[Any]"

_LISTING_SECONDS: Final = 3600.0
_READ_ALL: Final = "set local enable_seqscan = on; set local enable_hashjoin = on"
"""What is meant is looked for in everything that is retained, which takes its time."""


@dataclass(frozen=True, slots=True)
class Run:
    """An earlier run of the same request."""

    audit_id: int
    criteria: str
    """JSON, as it was recorded."""
    counts: str


class Republishing:
    """The statements of one schema."""

    def __init__(self, schema: str = DEFAULT_SCHEMA) -> None:
        self._sql = load("republish", schema)

    async def lock(self, connection: Connection) -> bool:
        """Keep others from doing the same until the connection is closed; whether nobody does."""
        is_ours: bool = await connection.fetchval(self._sql["lock"])
        return is_ours

    async def clock(self, connection: Connection) -> datetime:
        """Now, by the database."""
        now: datetime = await connection.fetchval(self._sql["clock"])
        return now

    async def raise_synchronous_commit(self, connection: Connection) -> None:
        """Make the caller's transaction durable: what it writes into the outbox is published."""
        await connection.execute(self._sql["raise_synchronous_commit"])

    async def newest(self, connection: Connection, asked: str) -> Run | None:
        """The newest run of a request."""
        row = await connection.fetchrow(self._sql["newest"], asked)
        return None if row is None else Run(row["id"], row["filter"], row["counts"])

    async def candidates(
        self,
        connection: Connection,
        criteria: Sequence[object],
        *,
        after_id: int,
        limit: int | None,
        chunk: int,
    ) -> AsyncIterator[Sequence[asyncpg.Record]]:
        """What is meant, in order, a chunk at a time: the server keeps the list, and no lock or snapshot.

        `criteria` are since, until, destinations, types, keys and message ids.
        """
        async with connection.transaction():
            await connection.execute(_READ_ALL)
            await connection.execute(
                f"declare towpath_again no scroll cursor with hold for {self._sql['candidates']}",
                *criteria,
                after_id,
                limit,
                timeout=_LISTING_SECONDS,
            )
        try:
            while rows := await connection.fetch(f"fetch forward {chunk:d} from towpath_again"):
                yield rows
        finally:
            if not connection.is_closed():
                await connection.execute("close towpath_again")

    async def count(self, connection: Connection, criteria: Sequence[object], *, after_id: int) -> int:
        """How many `candidates` without a limit would find."""
        async with connection.transaction():
            await connection.execute(_READ_ALL)
            count: int = await connection.fetchval(
                f"select count(*) from (\n{self._sql['candidates']}\n) c",
                *criteria,
                after_id,
                None,
                timeout=_LISTING_SECONDS,
            )
        return count

    async def send_again(self, connection: Connection, rows: Sequence[asyncpg.Record], audit_id: int) -> int:
        """Append rows to the outbox once more, in the caller's transaction; returns how many it still had."""
        tag = await connection.execute(
            self._sql["send_again"],
            [row["shard"] for row in rows],
            [row["xid"] for row in rows],
            [row["id"] for row in rows],
            audit_id,
        )
        return int(tag.rpartition(" ")[2])
