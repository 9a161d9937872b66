"""Which broker a database is published to, from where, and by which partition counts keys are placed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import asyncpg

from towpath.errors import UsageError
from towpath.store.audit import AuditStore
from towpath.store.statements import DEFAULT_SCHEMA, load


@dataclass(frozen=True, slots=True)
class Known:
    """What is written down of one broker; None until a relay published to it."""

    cluster: str | None
    home: str | None


class ProvenanceStore:
    """The statements of one schema. Each method takes the connection to run on."""

    def __init__(self, schema: str = DEFAULT_SCHEMA) -> None:
        self._schema = schema
        self._sql = load("provenance", schema)

    async def recognise(
        self, connection: asyncpg.Connection[Any], broker: int, cluster: str | None, home: str
    ) -> Known | None:
        """What stands there, written down now where nothing did; None for a broker without a row."""
        row = await connection.fetchrow(self._sql["recognise"], broker, cluster, home)
        return None if row is None else Known(row["cluster"], row["home"])

    async def confirm(
        self, connection: asyncpg.Connection[Any], *, actor: str, reason: str
    ) -> list[dict[str, object]]:
        """Forget what was written down; the next relay writes down its own. Returns what it was."""
        async with connection.transaction():
            rows = [dict(row) for row in await connection.fetch(self._sql["forget"])]
            await self.record(connection, actor, "outbox.confirm", reason, {"forgotten": rows})
        return rows

    async def keep_partitions(
        self, connection: asyncpg.Connection[Any], broker: int, counts: Mapping[str, int]
    ) -> dict[str, int]:
        """The first count of each address that was ever kept; those given where there was none."""
        rows = await connection.fetch(
            self._sql["keep_partitions"], broker, list(counts), list(counts.values())
        )
        return {row["address"]: row["partitions"] for row in rows}

    async def kept_partitions(
        self, connection: asyncpg.Connection[Any], broker: int, addresses: list[str]
    ) -> dict[str, int]:
        """The counts that were kept, of these addresses at that broker."""
        rows = await connection.fetch(self._sql["kept_partitions"], broker, addresses)
        return {row["address"]: row["partitions"] for row in rows}

    async def roll_over(
        self,
        connection: asyncpg.Connection[Any],
        broker: int,
        address: str,
        partitions: int,
        *,
        actor: str,
        reason: str,
    ) -> int | None:
        """Place keys of an address by another count from now on; returns the old one, None for none.

        Raises UsageError while a relay holds leases: it has the old count in memory.
        """
        async with connection.transaction():
            await self.ensure_no_relay(connection)
            before: int | None = await connection.fetchval(
                self._sql["roll_over"], broker, address, partitions
            )
            await self.record(
                connection,
                actor,
                "broker.rollover",
                reason,
                {"broker": broker, "address": address, "before": before, "partitions": partitions},
            )
        return before

    async def ensure_no_relay(self, connection: asyncpg.Connection[Any]) -> None:
        """Lock the leases until the transaction ends. Raises UsageError while one is held."""
        if await connection.fetchval(self._sql["live_leases"]):
            raise UsageError(
                "a relay holds leases: stop the relays, let every group read to the end, then roll over"
            )

    async def record(
        self, connection: asyncpg.Connection[Any], actor: str, action: str, reason: str, what: object
    ) -> None:
        """Into the audit table."""
        await AuditStore(self._schema).begin(
            connection,
            actor=actor,
            action=action,
            reason=reason,
            criteria=json.dumps(what),
            counts=json.dumps({"done": 1}),
        )
