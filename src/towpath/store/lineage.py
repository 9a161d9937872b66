"""Where a message came from, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeAlias
from uuid import UUID

import asyncpg

from towpath.errors import DecodeError
from towpath.messages import dump_headers, load_headers
from towpath.messages.headers import CAUSED_BY
from towpath.store.statements import DEFAULT_SCHEMA, load

Connection: TypeAlias = "asyncpg.Connection[Any]"
Row: TypeAlias = Mapping[str, Any]

_LIMIT: Final = 100


class Lineage:
    """The statements of one schema."""

    def __init__(self, schema: str = DEFAULT_SCHEMA) -> None:
        self._sql = load("lineage", schema)

    async def cause(self, connection: Connection, task: Row) -> UUID | None:
        """The message whose handler wrote this one; None: no handler did, or nothing knows any more.

        `task` has `id`, `key`, `position` and `headers` (JSON text, or None).
        """
        headers = task["headers"]
        if headers is None:
            arguments = (task["id"], task["key"], task["position"])
            headers = await connection.fetchval(self._sql["own_headers"], *arguments)
        try:
            found = dict(load_headers(headers)).get(CAUSED_BY)
            return None if found is None else UUID(found.decode())
        except (DecodeError, ValueError):
            return None

    async def effects(self, connection: Connection, task: Row) -> list[Row]:
        """What its handler emitted and submitted, as far as it is still there; at most 100."""
        mark = dump_headers(((CAUSED_BY, str(task["id"]).encode()),))[1:-1]
        rows = await connection.fetch(
            self._sql["came_of"], mark, task["created_at"], task["updated_at"], _LIMIT
        )
        return [dict(row) for row in rows]
