"""Publish gates, and the messages parked behind them until a person decides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import asyncpg

from towpath.errors import StoreUnavailable
from towpath.store.outbox import (
    CONTENT_TYPE,
    CREATED_AT,
    DESTINATION,
    HEADERS,
    ID,
    KEY,
    KIND,
    MESSAGE_ID,
    PAYLOAD,
    SHARD,
    TYPE,
    OnPoison,
    Row,
    Server,
)
from towpath.store.statements import DEFAULT_SCHEMA, load

GATE: Final = 12
"""Position of the gate in the rows of `behind`."""


@dataclass(frozen=True, slots=True)
class Gated:
    """What gates a shard has."""

    has_gates: bool = False
    is_blocked: bool = False


@dataclass(frozen=True, slots=True)
class Gate:
    """A closed or opening gate."""

    id: int | None
    """None: a paused destination's, to be made with the first row behind it."""
    sequence: int | None
    """Outbox id of the message it waits for; None: of a paused destination's."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A gate that is being emptied."""

    shard: int
    is_pause: bool
    """Its destination was paused: any key may be behind it."""


class Parking:
    """The statements of one schema; those that write belong into the caller's fenced transaction."""

    def __init__(self, schema: str = DEFAULT_SCHEMA) -> None:
        self._sql = load("parking", schema)

    async def state(
        self, connection: asyncpg.Connection[Any], shards: Sequence[int], server: Server
    ) -> dict[int, Gated]:
        """What gates the shards have; nothing where the connection leads to another server."""
        rows = await connection.fetch(self._sql["state"], shards, server.started_at)
        return {row["shard"]: Gated(row["has_gates"], row["is_blocked"]) for row in rows}

    async def gates_of(
        self, connection: asyncpg.Connection[Any], rows: Sequence[Row], server: Server
    ) -> dict[tuple[int, str, str | None], Gate]:
        """The gates that rows wait behind, by shard, destination and key; no key: the destination is paused.

        Raises StoreUnavailable where the connection leads to another server.
        """
        wanted = {(row[SHARD], row[DESTINATION], row[KEY]) for row in rows}
        if not wanted:
            return {}
        shards, destinations, keys = map(list, zip(*wanted, strict=True))
        found = await connection.fetch(self._sql["gates_of"], shards, destinations, keys, server.started_at)
        if any(row["gate"] is None for row in found):
            raise StoreUnavailable("the gates are on another server than the one read from")
        return {
            (row["shard"], row["destination"], row["key"]): Gate(row["gate"], row["sequence"])
            for row in found
        }

    async def close(self, connection: asyncpg.Connection[Any], row: Row, policy: OnPoison) -> None:
        """Make what follows a refused row wait."""
        await connection.execute(
            self._sql["close"], row[SHARD], row[DESTINATION], row[KEY], policy, row[MESSAGE_ID], row[ID]
        )

    async def close_again(self, connection: asyncpg.Connection[Any], row: Row, policy: OnPoison) -> None:
        """A parked row was refused as well: its gate waits for a decision about that one."""
        await connection.execute(self._sql["close_again"], row[GATE], policy, row[MESSAGE_ID], row[ID])

    async def park(self, connection: asyncpg.Connection[Any], gates: Mapping[Gate, Sequence[Row]]) -> None:
        """Keep rows of the outbox behind their gates; those that are there already stay."""
        made: dict[tuple[int, str], int] = {}
        rows: list[tuple[int, Row]] = []
        for gate, parked in gates.items():
            for row in parked:
                place = (row[SHARD], row[DESTINATION])
                if gate.id is None and place not in made:
                    made[place] = await connection.fetchval(self._sql["pause"], *place)
                rows.append((made[place] if gate.id is None else gate.id, row))
        columns = (ID, MESSAGE_ID, KIND, TYPE, KEY, CONTENT_TYPE, HEADERS, PAYLOAD, CREATED_AT)
        await connection.execute(
            self._sql["park"],
            [gate for gate, _ in rows],
            *([row[column] for _, row in rows] for column in columns),
        )

    async def released(
        self, connection: asyncpg.Connection[Any], shards: Sequence[int], server: Server, *, limit: int
    ) -> dict[int, Opened]:
        """Gates that a person has opened, the oldest first."""
        rows = await connection.fetch(self._sql["released"], shards, limit, server.started_at)
        return {row["gate"]: Opened(row["shard"], row["is_pause"]) for row in rows}

    async def behind(
        self, connection: asyncpg.Connection[Any], gates: Sequence[int], *, row_limit: int, byte_limit: int
    ) -> Sequence[Row]:
        """The first messages behind each gate, in equal shares; at least one where there is any."""
        share = max(1, row_limit // max(1, len(gates)))
        rows: Sequence[Row] = await connection.fetch(self._sql["behind"], gates, share, byte_limit)
        return rows

    async def unpark(self, connection: asyncpg.Connection[Any], rows: Sequence[Row]) -> None:
        """Forget messages that are sent or given up."""
        gates, ids = [row[GATE] for row in rows], [row[ID] for row in rows]
        await connection.execute(self._sql["unpark"], gates, ids)

    async def remove(self, connection: asyncpg.Connection[Any], gates: Sequence[int]) -> list[int]:
        """Remove gates that are open and have nothing behind them; returns which."""
        return [row["id"] for row in await connection.fetch(self._sql["remove"], gates)]

    async def count(self, connection: asyncpg.Connection[Any], shards: Sequence[int]) -> int:
        """How many gates the shards have."""
        count: int = await connection.fetchval(self._sql["count"], shards)
        return count
