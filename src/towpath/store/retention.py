"""Clearing the outbox ring: which slots there are, whether one may go, and letting it go.

The methods take a connection of the relay's own, in autocommit; each is one transaction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias, cast

import asyncpg

from towpath.store.statements import DEFAULT_SCHEMA, load

Reason: TypeAlias = Literal["current", "young", "unsent", "isolation", "locked", "slow", "denied"]
"""Why a slot was left: it is written to, now or next; too young; not wholly sent; checked by a snapshot
that may be too old; in use by somebody; took too long; forbidden to this role."""

START: Final = (0, 0)
"""The cursor before every row."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One leaf of the outbox."""

    number: int
    is_empty: bool
    """Never written to since it was cleared last."""
    size: int
    """Bytes on disk, with indexes and TOAST."""


@dataclass(frozen=True, slots=True)
class Ring:
    """All slots, and how long each is written to."""

    slots: Sequence[Slot]
    rotate_seconds: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a slot may be cleared."""

    reason: Reason | None
    """Why not; None when it may."""
    unsent: Sequence[int]
    """Shards with rows in it that are not known to be sent."""


@dataclass(frozen=True, slots=True)
class Deleted:
    """One batch of single rows."""

    count: int
    found: int
    """Rows looked at; fewer than the limit: there are no more."""
    cursor: tuple[int, int]
    """The last row's xid and id, from which to go on."""


class Retention:
    """The retention statements of one schema."""

    def __init__(self, schema: str = DEFAULT_SCHEMA) -> None:
        self._sql = load("retention", schema)
        self._slots: dict[int, Mapping[str, str]] = {}

    def statements(self, slot: int) -> Mapping[str, str]:
        """The statements for one slot."""
        if slot not in self._slots:
            texts = {**self._sql, "clear": self._sql["clear"].replace(":verdict", self._sql["verdict"])}
            self._slots[slot] = {
                name: text.replace("outbox_0", f"outbox_{slot:d}") for name, text in texts.items()
            }
        return self._slots[slot]

    async def survey(self, connection: asyncpg.Connection[Any]) -> Ring:
        """The slots in the order of their numbers."""
        rows = await connection.fetch(self._sql["survey"])
        slots = [Slot(row["slot"], row["is_empty"], row["bytes"]) for row in rows]
        return Ring(slots, rows[0]["rotate_seconds"])

    async def verdict(
        self, connection: asyncpg.Connection[Any], slot: int, retention_seconds: float
    ) -> Verdict:
        """Whether it is worth asking for the lock. Without the lock the answer holds for the past only."""
        await connection.execute(self._sql["arm"], str(retention_seconds), "0")
        row = await connection.fetchrow(self.statements(slot)["verdict"])
        if row is None:
            raise RuntimeError("the verdict statement returned no row")
        return Verdict(row["reason"], row["unsent"])

    async def clear(
        self, connection: asyncpg.Connection[Any], slot: int, retention_seconds: float, *, hold_seconds: float
    ) -> Reason | None:
        """Truncate the slot if nobody uses it and it may go, or return why not.

        Polls wait while it is at it, at most `hold_seconds` and the flush of its commit; whoever
        holds a lock on the slot makes it give up at once. Must not be called inside a transaction.
        """
        if connection.is_in_transaction():
            raise RuntimeError("a slot is cleared in a transaction of its own")
        await connection.execute(self._sql["arm"], str(retention_seconds), str(round(hold_seconds * 1000)))
        error: asyncpg.PostgresError | None = None
        try:
            await connection.execute(self.statements(slot)["clear"])
        except asyncpg.PostgresError as raised:
            error = raised
        outcome = await connection.fetchval(self._sql["outcome"])  # and no limit of time from here on
        if isinstance(error, asyncpg.QueryCanceledError):
            return "slow"
        if error is not None:
            raise error
        return None if outcome == "cleared" else cast("Reason", outcome)

    async def holders(self, connection: asyncpg.Connection[Any], slot: int) -> list[str]:
        """Who keeps the slot from being locked: pids, and `prepared` for a prepared transaction."""
        return [row["holder"] for row in await connection.fetch(self.statements(slot)["holders"])]

    async def oldest_age(self, connection: asyncpg.Connection[Any], slot: int) -> float | None:
        """Age of the oldest row in seconds; None when there is no row."""
        age: float | None = await connection.fetchval(self.statements(slot)["oldest_age"])
        return age

    async def shards(self, connection: asyncpg.Connection[Any]) -> list[int]:
        """The shards anything was ever sent of."""
        return [row["shard"] for row in await connection.fetch(self._sql["shards"])]

    async def delete_sent(
        self,
        connection: asyncpg.Connection[Any],
        slot: int,
        shard: int,
        retention_seconds: float,
        *,
        limit: int,
        after: tuple[int, int] = START,
    ) -> Deleted:
        """Delete sent rows of one shard one by one, in the order of their transactions."""
        row = await connection.fetchrow(
            self.statements(slot)["delete_sent"], shard, limit, retention_seconds, str(after[0]), after[1]
        )
        if row is None:
            raise RuntimeError("the delete statement returned no row")
        cursor = after if row["xid"] is None else (int(row["xid"]), row["id"])
        return Deleted(row["deleted"], row["found"], cursor)
