"""Tasks go back to work by an operator's word: under the gates of their lanes, so that keys keep their order.

Lock order: key gates, then task rows. Every method belongs into the caller's transaction.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeAlias
from uuid import UUID

import asyncpg

from towpath.store.statements import load

Connection: TypeAlias = "asyncpg.Connection[Any]"
Row: TypeAlias = Mapping[str, Any]
Gates: TypeAlias = Mapping[tuple[str, str], Row]


class Revival:
    """Gates and history of one consumer group.

    `lanes` are rows with `id`, `source` and `lane`, in the order of their release.
    """

    def __init__(self, schema: str, group: str) -> None:
        self._sql = load("operator", schema)
        self._group = group

    async def lock_gates(self, connection: Connection, lanes: Sequence[Row]) -> Gates:
        """Lock the gate of every lane, new where there was none; by (source, lane)."""
        first: dict[tuple[str, str], UUID] = {}
        for row in lanes:
            if row["lane"] is not None:
                first.setdefault((row["source"], row["lane"]), row["id"])
        if not first:
            return {}
        sources, names = zip(*first, strict=True)
        gates = await connection.fetch(
            self._sql["lock_replay_gates"], self._group, sources, names, list(first.values())
        )
        return {(gate["source"], gate["lane"]): gate for gate in gates}

    async def settle_heads(
        self, connection: Connection, lanes: Sequence[Row], gates: Gates, movable: Collection[UUID]
    ) -> set[UUID]:
        """Who of the movable waits at once: those without a lane, and the first of each new gate."""
        heads: set[UUID] = set()
        firsts: dict[tuple[str, str], UUID] = {}
        for row in lanes:
            if row["id"] in movable and row["lane"] is None:
                heads.add(row["id"])
            elif row["id"] in movable:
                firsts.setdefault((row["source"], row["lane"]), row["id"])
        for (source, lane), gate in gates.items():
            first = firsts.get((source, lane))
            if not gate["is_new"]:
                heads |= {gate["head"]} & set(movable)
            elif first is None:
                await connection.execute(self._sql["drop_replay_gate"], self._group, source, lane)
            else:
                heads.add(first)
                if first != gate["head"]:
                    await connection.execute(self._sql["move_replay_gate"], self._group, source, lane, first)
        return heads

    async def record(
        self, connection: Connection, event: str, moved: Sequence[Row], *, actor: str, reason: str
    ) -> None:
        """One line of history for each task moved: `id`, `from_state` and what the row says now."""
        names = ("id", "from_state", "state", "version", "attempt", "run_no", "due_at")
        columns = ([row[name] for row in moved] for name in names)
        await connection.execute(
            self._sql["record_moves"], self._group, event, *columns, reason or None, actor
        )
