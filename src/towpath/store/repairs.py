"""Tasks that an operator puts back to work: every method takes the connection to run on."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, TypeAlias
from uuid import UUID

import asyncpg

from towpath.errors import DecodeError
from towpath.messages import load_headers
from towpath.store.revival import Revival
from towpath.store.statements import DEFAULT_SCHEMA, load
from towpath.telemetry.context import traceparent_of

Connection: TypeAlias = "asyncpg.Connection[Any]"
Row: TypeAlias = Mapping[str, Any]

_SCAN_CHUNK: Final = 2000
_RING_SECONDS: Final = 3600.0


@dataclass(frozen=True, slots=True)
class Restarted:
    """One task that is to run."""

    id: UUID
    type: str
    source: str
    trace: str | None
    is_parked: bool = False


class Repairs:
    """The statements of one schema."""

    def __init__(self, schema: str = DEFAULT_SCHEMA) -> None:
        self._schema = schema
        self._sql = load("repairs", schema)

    async def waiting(self, connection: Connection, criteria: Sequence[object]) -> AsyncIterator[Row]:
        """What waits for a later time; `criteria` are the nine parameters of the statement."""
        async for row in self._scan(connection, "plan_retry", criteria):
            yield row

    async def finished(
        self, connection: Connection, criteria: Sequence[object], states: Sequence[str]
    ) -> AsyncIterator[Row]:
        """What ended in `states`, in the order of its release."""
        async for row in self._scan(connection, "plan_rerun", (*criteria, states)):
            yield row

    async def retained(self, connection: Connection, ids: Sequence[UUID]) -> set[UUID]:
        """Which of them the outbox still holds."""
        rows = await self._in_ring(connection, "retained", ids) if ids else []
        return {row["message_id"] for row in rows}

    async def states_of(
        self, connection: Connection, ids: Sequence[UUID], groups: Sequence[str] | None
    ) -> list[Row]:
        """What became of messages."""
        return [dict(row) for row in await connection.fetch(self._sql["states_of"], ids, groups)]

    async def stuck(
        self, connection: Connection, groups: Sequence[str] | None, *, older_than_seconds: float, limit: int
    ) -> list[Row]:
        """What has not moved for that long, and why; the longest first."""
        rows = await connection.fetch(self._sql["stuck"], groups, older_than_seconds, limit)
        return [dict(row) for row in rows]

    async def retry(
        self,
        connection: Connection,
        group: str,
        ids: Sequence[UUID],
        *,
        until: datetime,
        actor: str,
        reason: str,
    ) -> list[Restarted]:
        """Make waiting tasks due now, in the caller's transaction; attempts and order stay as they are."""
        moved = await connection.fetch(self._sql["retry_tasks"], group, ids, until)
        await Revival(self._schema, group).record(
            connection, "task.retried", moved, actor=actor, reason=reason
        )
        return [Restarted(row["id"], "", "", None) for row in moved]

    async def rerun(
        self,
        connection: Connection,
        group: str,
        ids: Sequence[UUID],
        *,
        until: datetime,
        states: Sequence[str],
        actor: str,
        reason: str,
    ) -> list[Restarted]:
        """Finished tasks begin a new run, in the caller's transaction.

        `ids` come in the order of their release. The head of a lane is due now; whatever else waits in
        the lane keeps its place, and the rest parks behind it. What is no longer finished, or whose body
        is nowhere any more, is left out of the answer.
        """
        lanes = await connection.fetch(self._sql["lanes_of_finished"], group, ids, until, states)
        bodies = await self._bodies(connection, group, [row["id"] for row in lanes if row["lacks_body"]])
        lanes = [row for row in lanes if not row["lacks_body"] or row["id"] in bodies]
        revival = Revival(self._schema, group)
        gates = await revival.lock_gates(connection, lanes)
        wanted = [row["id"] for row in lanes]
        locked = await connection.fetch(self._sql["lock_finished"], group, wanted, until, states)
        movable = {row["id"] for row in locked}
        heads = await revival.settle_heads(connection, lanes, gates, movable)
        columns = [*map(list, zip(*bodies.values(), strict=True))] if bodies else [[], [], [], []]
        rows = await connection.fetch(
            self._sql["rerun_tasks"], group, sorted(movable), sorted(heads), list(bodies), *columns
        )
        known = {row["id"]: row for row in lanes}
        moved = [{**row, "from_state": known[row["id"]]["from_state"]} for row in rows]
        await revival.record(connection, "task.rerun", moved, actor=actor, reason=reason)
        return [
            Restarted(
                row["id"],
                known[row["id"]]["type"],
                known[row["id"]]["source"],
                row["trace"],
                row["state"] == "PARKED",
            )
            for row in moved
        ]

    async def _bodies(
        self, connection: Connection, group: str, ids: Sequence[UUID]
    ) -> dict[UUID, tuple[bytes | None, str | None, str, str | None]]:
        """Payload, content type, headers and traceparent by message."""
        if not ids:
            return {}
        rows = await self._in_ring(connection, "bodies", group, ids)
        return {
            row["id"]: (row["payload"], row["content_type"], row["headers"], _trace(row["headers"]))
            for row in rows
        }

    async def _in_ring(self, connection: Connection, statement: str, *arguments: object) -> list[Any]:
        """Read the whole ring: it has no index on message ids, producers would pay for it."""
        settings = connection.transaction()  # rolled back, and what it allows with it
        await settings.start()
        try:
            await connection.execute(
                "set local enable_seqscan = on; set local enable_hashjoin = on; "
                "set local plan_cache_mode = force_custom_plan"
            )
            rows: list[Any] = await connection.fetch(self._sql[statement], *arguments, timeout=_RING_SECONDS)
        finally:
            await settings.rollback()
        return rows

    async def _scan(
        self, connection: Connection, statement: str, criteria: Sequence[object]
    ) -> AsyncIterator[Row]:
        async with connection.transaction(isolation="repeatable_read", readonly=True):
            async for row in connection.cursor(self._sql[statement], *criteria, prefetch=_SCAN_CHUNK):
                yield row


def _trace(headers: str) -> str | None:
    try:
        return traceparent_of(load_headers(headers))
    except DecodeError:
        return None
