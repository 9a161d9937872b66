"""Reading the dead-letter catalog and moving its rows: every method takes the connection to run on."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, TypeAlias
from uuid import UUID

import asyncpg

from towpath.store.revival import Revival
from towpath.store.statements import DEFAULT_SCHEMA, load

Connection: TypeAlias = "asyncpg.Connection[Any]"
Row: TypeAlias = Mapping[str, Any]
Closed: TypeAlias = Literal["replayed", "discarded"]
_SCAN_CHUNK = 2000


@dataclass(frozen=True, slots=True)
class Released:
    """One dead letter that went back to work, or was discarded."""

    id: int
    group: str
    message_id: UUID
    type: str | None
    source: str
    trace: str | None
    is_parked: bool = False


class DeadLetters:
    """The catalog of one schema."""

    def __init__(self, schema: str = DEFAULT_SCHEMA) -> None:
        self._schema = schema
        self._sql = load("operator", schema)

    async def find(
        self,
        connection: Connection,
        criteria: Sequence[object],
        *,
        states: Sequence[str] | None,
        below_id: int | None,
        limit: int,
    ) -> list[Row]:
        """Rows without their payload, newest first. `criteria` are the ten parameters of a filter."""
        sql = self._sql["list_dead_letters"]
        return [dict(row) for row in await connection.fetch(sql, *criteria, states, below_id, limit)]

    async def summarise(self, connection: Connection, criteria: Sequence[object], *, limit: int) -> list[Row]:
        """Causes of the open ones with counts, the most frequent first."""
        sql = self._sql["summarise_dead_letters"]
        return [dict(row) for row in await connection.fetch(sql, *criteria, limit)]

    async def show(
        self, connection: Connection, *, letter_id: int | None = None, message_id: UUID | None = None
    ) -> list[Row]:
        """Everything about one dead letter, payload included; a message may have died in several groups."""
        rows = await connection.fetch(self._sql["show_dead_letter"], letter_id, message_id)
        return [dict(row) for row in rows]

    async def scan(
        self, connection: Connection, criteria: Sequence[object], *, until: datetime
    ) -> AsyncIterator[Row]:
        """The open ones that died before `until`, in the order of their release; memory is bounded."""
        async with connection.transaction(isolation="repeatable_read", readonly=True):
            sql = self._sql["plan_dead_letters"]
            async for row in connection.cursor(sql, *criteria, until, prefetch=_SCAN_CHUNK):
                yield row

    async def replay_tasks(
        self,
        connection: Connection,
        group: str,
        ids: Sequence[int],
        *,
        max_replays: int | None,
        actor: str,
        reason: str,
    ) -> list[Released]:
        """Move open dead letters of one group back to work, in the caller's transaction.

        `ids` come in the order of their release. The head of a lane waits and is due now; whatever
        else waits in the lane keeps its place, and the rest parks behind it. What meanwhile is no
        longer open, no longer dead or over the cap is left out of the answer.
        """
        sql = self._sql
        lanes = await connection.fetch(sql["lanes_of_dead_letters"], group, ids)
        revival = Revival(self._schema, group)
        gates = await revival.lock_gates(connection, lanes)
        dead = await connection.fetch(sql["lock_dead_tasks"], group, [row["id"] for row in lanes])
        letters = await connection.fetch(sql["lock_open_dead_letters"], ids, group, max_replays)
        movable = {row["id"] for row in dead} & {row["message_id"] for row in letters}
        heads = await revival.settle_heads(connection, lanes, gates, movable)
        moved = await connection.fetch(sql["revive_tasks"], group, sorted(movable), sorted(heads))
        states = {row["id"]: row["state"] for row in moved}
        await revival.record(connection, "task.replayed", moved, actor=actor, reason=reason)
        return await self._close(connection, letters, states, "replayed")

    async def replay_unpublished(
        self, connection: Connection, ids: Sequence[int], *, max_replays: int | None
    ) -> list[Released]:
        """Send refused messages again, in the caller's transaction.

        Through the outbox, at its end; but one that others wait for goes before them.
        """
        await connection.execute(self._sql["raise_synchronous_commit"])
        letters = await connection.fetch(self._sql["lock_open_dead_letters"], ids, "", max_replays)
        await connection.execute(self._sql["republish"], [row["id"] for row in letters])
        states = {row["message_id"]: "PENDING" for row in letters}
        return await self._close(connection, letters, states, "replayed")

    async def discard(self, connection: Connection, group: str, ids: Sequence[int]) -> list[Released]:
        """Close open dead letters without running them, in the caller's transaction.

        Tasks stay DEAD; what waits for a refused message goes on without it.
        """
        letters = await connection.fetch(self._sql["lock_open_dead_letters"], ids, group, None)
        await connection.execute(self._sql["open_publish_gates"], [row["id"] for row in letters])
        states = {row["message_id"]: "DEAD" for row in letters}
        return await self._close(connection, letters, states, "discarded")

    async def raise_synchronous_commit(self, connection: Connection) -> None:
        """Make the caller's transaction durable: what it writes into the outbox is published."""
        await connection.execute(self._sql["raise_synchronous_commit"])

    async def _close(
        self, connection: Connection, letters: Sequence[Row], states: Mapping[UUID, str], state: Closed
    ) -> list[Released]:
        chosen = [row for row in letters if row["message_id"] in states]
        closed = await connection.fetch(self._sql["close_dead_letters"], [row["id"] for row in chosen], state)
        if len(closed) != len(chosen):
            raise RuntimeError("locked dead letters changed under their lock")
        return [
            Released(
                row["id"],
                row["consumer_group"],
                row["message_id"],
                row["type"],
                row["source"],
                row["trace"],
                states[row["message_id"]] == "PARKED",
            )
            for row in chosen
        ]
