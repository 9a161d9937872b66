"""What all members of a consumer group must agree on: noted once, compared by everyone who joins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import asyncpg

from towpath.errors import GroupMismatch, UsageError
from towpath.store.provenance import ProvenanceStore
from towpath.store.statements import load

Connection: TypeAlias = "asyncpg.Connection[Any] | asyncpg.pool.PoolConnectionProxy[Any] | asyncpg.Pool[Any]"

_COUNTED: Final = 1000


@dataclass(frozen=True, slots=True)
class Terms:
    """How one member, or a command for it, describes its group."""

    ordering: str
    queues: int | None
    """Queues per address, at a broker that has them."""
    types: tuple[str, ...] = ()
    """Message types it handles, sorted. Members may differ in them while a deployment rolls."""


class GroupStore:
    """The statements of one group. Each method runs in the caller's transaction."""

    def __init__(self, group: str, schema: str) -> None:
        self._group = group
        self._provenance = ProvenanceStore(schema)
        self._sql = load("groups", schema)

    async def note(self, connection: Connection, terms: Terms) -> str:
        """Note the terms where none are known; the group's row stays locked. Returns the ordering known.

        Raises GroupMismatch where it has other queues.
        """
        known = await connection.fetchrow(self._sql["note_terms"], self._group, terms.ordering, terms.queues)
        if problem := self._queues_problem(known["queues"], terms.queues):
            raise GroupMismatch(problem)
        ordering: str = known["ordering"]
        return ordering

    async def agree(self, connection: Connection, terms: Terms) -> str | None:
        """Note the terms or compare with those noted.

        An ordering is replaced where nothing of the group lives or stands in the old one; the old one
        is returned. Raises GroupMismatch.
        """
        before = await self.note(connection, terms)
        if before == terms.ordering:
            return None
        found = await connection.fetchrow(self._sql["under_way"], self._group, _COUNTED)
        told = f"the group {self._group} is ordered by {before!r} and this app says {terms.ordering!r}"
        if found["members"]:
            raise GroupMismatch(
                f"{told}, while {found['members']} members of it are alive: stop them first, or give this "
                "app another name"
            )
        if found["tasks"]:
            raise GroupMismatch(
                f"{told}, while {_some(found['tasks'])} of its tasks stand in that order: let members with "
                f"ordering={before!r} finish them first (towpath tasks list --group {self._group})"
            )
        await connection.execute(self._sql["change_ordering"], self._group, terms.ordering)
        return before

    async def others(self, connection: Connection, types: tuple[str, ...]) -> Sequence[tuple[str, list[str]]]:
        """Living members that handle other types than these: host, and its types."""
        rows = await connection.fetch(self._sql["other_members"], self._group, list(types))
        return [(row["host"], row["types"]) for row in rows]

    async def queues_problem(self, connection: Connection, queues: int | None) -> str | None:
        """How the group's queues differ from those given, in one line. Locks nothing."""
        known = await connection.fetchval(self._sql["known_queues"], self._group)
        return self._queues_problem(known, queues)

    async def begin_rollover(self, connection: asyncpg.Connection[Any]) -> tuple[int | None, int]:
        """The queues noted, and tasks that stand in an order. Nobody joins before the transaction ends.

        Raises UsageError while a relay or a member lives.
        """
        await self._provenance.ensure_no_relay(connection)
        before: int | None = await connection.fetchval(self._sql["lock_queues"], self._group)
        found = await connection.fetchrow(self._sql["under_way"], self._group, _COUNTED)
        if found["members"]:
            raise UsageError(f"{found['members']} members of {self._group} are alive: stop them first")
        return before, found["tasks"]

    async def finish_rollover(
        self, connection: asyncpg.Connection[Any], before: int, queues: int, *, actor: str, reason: str
    ) -> None:
        """Note the new queues, and who changed them."""
        await connection.execute(self._sql["change_queues"], self._group, queues)
        what = {"group": self._group, "before": before, "queues": queues}
        await self._provenance.record(connection, actor, "broker.rollover", reason, what)

    def _queues_problem(self, known: int | None, wanted: int | None) -> str | None:
        if known is None or wanted is None or known == wanted:
            return None
        return (
            f"the group {self._group} has {known} queues per address and queues_per_group says {wanted}: "
            f"set it to {known}, or change the queues while nothing runs (towpath broker rollover --app)"
        )


def _some(count: int) -> str:
    return f"{count}" if count < _COUNTED else f"{_COUNTED} or more"
