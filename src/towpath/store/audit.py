"""The audit table: what operators did, one row per action."""

from __future__ import annotations

from datetime import datetime
from typing import Any, TypeAlias

import asyncpg

from towpath.store.statements import DEFAULT_SCHEMA, load

Connection: TypeAlias = "asyncpg.Connection[Any]"


class AuditStore:
    """The statements of one schema."""

    def __init__(self, schema: str = DEFAULT_SCHEMA) -> None:
        self._sql = load("audit", schema)

    async def clock(self, connection: Connection) -> datetime:
        """Now, by the database."""
        now: datetime = await connection.fetchval(self._sql["clock"])
        return now

    async def begin(
        self, connection: Connection, *, actor: str, action: str, reason: str, criteria: str, counts: str
    ) -> int:
        """Record an action and return its id; `criteria` and `counts` are JSON text."""
        audit_id: int = await connection.fetchval(self._sql["begin"], actor, action, reason, criteria, counts)
        return audit_id

    async def update(self, connection: Connection, audit_id: int, counts: str) -> None:
        """Bring the counts of an action up to date, in the transaction that did the work."""
        await connection.execute(self._sql["update"], audit_id, counts)

    async def newest(self, connection: Connection, action: str, criteria: str) -> str | None:
        """The counts, as JSON, of the same request's newest run within the last day."""
        counts: str | None = await connection.fetchval(self._sql["newest"], action, criteria)
        return counts
