"""Dead letters corrected, exported and imported: every method takes the connection to run on."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

from towpath.store.deadletters import Connection, Row
from towpath.store.statements import DEFAULT_SCHEMA, load

_SCAN_CHUNK: Final = 200
"""Rows with their bodies."""


class Revisions:
    """The statements of one schema."""

    def __init__(self, schema: str = DEFAULT_SCHEMA) -> None:
        self._sql = load("revisions", schema)

    async def lock(self, connection: Connection, letter_id: int) -> Row | None:
        """A dead letter as a replay would send it now, locked in the caller's transaction."""
        row = await connection.fetchrow(self._sql["lock_for_edit"], letter_id)
        return None if row is None else dict(row)

    async def add(
        self,
        connection: Connection,
        letter: Row,
        *,
        payload: bytes | None,
        headers: str,
        is_validated: bool,
        actor: str,
        reason: str,
    ) -> int:
        """Record a correction of a locked dead letter; returns its number."""
        revision: int = letter["revision"] + 1
        content_type = letter["content_type"]
        await connection.execute(
            self._sql["add_revision"],
            *(letter["id"], revision, actor, reason, payload, content_type, headers, is_validated),
        )
        return revision

    async def of(self, connection: Connection, letter_ids: Sequence[int], *, with_bodies: bool) -> list[Row]:
        """The corrections of dead letters, in order."""
        rows = await connection.fetch(self._sql["revisions"], letter_ids, with_bodies)
        return [dict(row) for row in rows]

    async def installation(self, connection: Connection) -> tuple[str, str]:
        """Id of the installation and version of its schema."""
        row = await connection.fetchrow(self._sql["installation"])
        return (row["installation"], row["schema_version"]) if row is not None else ("", "")

    async def export(
        self, connection: Connection, criteria: Sequence[object], states: Sequence[str] | None
    ) -> AsyncIterator[tuple[Row, list[Row]]]:
        """Dead letters whole with their corrections, the oldest first; memory is bounded."""
        async with connection.transaction(isolation="repeatable_read", readonly=True):
            cursor = await connection.cursor(self._sql["export"], *criteria, states)
            while rows := await cursor.fetch(_SCAN_CHUNK):
                corrections = await self.of(connection, [row["id"] for row in rows], with_bodies=True)
                for row in rows:
                    yield dict(row), [one for one in corrections if one["dead_letter"] == row["id"]]

    async def missing(self, connection: Connection, letters: str) -> set[int]:
        """Which of the dead letters of a JSON array are not there: their lines."""
        return {row["line"] for row in await connection.fetch(self._sql["missing"], letters)}

    async def bring(self, connection: Connection, letters: str) -> list[Any]:
        """Add the dead letters of a JSON array that are not there, in the caller's transaction."""
        return list(await connection.fetch(self._sql["import"], letters))

    async def bring_revisions(self, connection: Connection, letter_id: int, revisions: str) -> None:
        """Add the corrections, a JSON array, of a dead letter that was brought."""
        await connection.execute(self._sql["import_revisions"], letter_id, revisions)
