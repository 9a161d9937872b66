"""What people have stopped for now: publishing to destinations, and consumer groups' starting of work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import asyncpg

from towpath.store.database import Database, store_errors
from towpath.store.statements import DEFAULT_SCHEMA, load

Connection: TypeAlias = "asyncpg.Connection[Any]"
Kind: TypeAlias = Literal["publish", "start"]

EVERYTHING: Final = "*"
"""Instead of a destination: every one."""
EVERY_TYPE: Final = ""


@dataclass(frozen=True, slots=True)
class Target:
    """What one pause is about."""

    kind: Kind
    name: str
    """A destination or EVERYTHING; or a consumer group."""
    type: str = EVERY_TYPE
    """Of a consumer group: a message type or EVERY_TYPE."""


class PauseStore:
    """The statements of one schema; those that write belong into the caller's transaction."""

    def __init__(self, schema: str = DEFAULT_SCHEMA) -> None:
        self._sql = load("pauses", schema)

    async def open(self, connection: Connection, kind: Kind) -> Sequence[Mapping[str, Any]]:
        """Those in force, the oldest first."""
        return [dict(row) for row in await connection.fetch(self._sql["open"], kind)]

    async def pause(self, connection: Connection, target: Target, *, actor: str, reason: str) -> bool:
        """Begin one; False: it is in force already."""
        begun = await connection.fetchval(
            self._sql["pause"], target.kind, target.name, target.type, actor, reason
        )
        return begun is not None

    async def resume(self, connection: Connection, target: Target) -> bool:
        """End one; False: there is none."""
        ended = await connection.fetchval(self._sql["resume"], target.kind, target.name, target.type)
        return ended is not None


class GroupPauses:
    """Reads the pauses of one consumer group."""

    def __init__(self, database: Database, group: str) -> None:
        self._database = database
        self._statement = load("pauses", database.schema)["of_group"]
        self._group = group

    async def read(self) -> frozenset[str]:
        """Types of which nothing starts for now; EVERY_TYPE: nothing at all. Raises StoreUnavailable."""
        with store_errors():
            rows = await self._database.pool.fetch(self._statement, self._group)
        return frozenset(row["type"] for row in rows)
