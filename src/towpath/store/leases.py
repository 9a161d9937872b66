"""Leases of shards: who may publish what, until when by the database's clock, under which epoch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any
from uuid import UUID

import asyncpg

from towpath.errors import ConfigurationError
from towpath.store.installed import ensure_installed, library_version
from towpath.store.outbox import Destinations, OnPoison
from towpath.store.statements import DEFAULT_SCHEMA, load


@dataclass(frozen=True, slots=True)
class Beat:
    """What a relay is told when it says that it lives."""

    living: int
    """Relays of its broker, this one included."""
    place: int
    """Its own among them, from 0."""
    paused: list[str]
    """Destinations to which nothing is published."""
    destinations: Destinations


class Leases:
    """The lease statements of one schema, each one transaction. Times are seconds."""

    def __init__(self, schema: str = DEFAULT_SCHEMA) -> None:
        self._schema = schema
        self._sql = load("relay", schema)

    async def ensure_installed(self, connection: asyncpg.Connection[Any]) -> None:
        """Raise SchemaMismatch unless this library works with the schema."""
        await ensure_installed(connection, self._schema)

    async def beat(
        self,
        connection: asyncpg.Connection[Any],
        relay: UUID,
        host: str,
        lease_seconds: float,
        broker: int = 0,
    ) -> Beat:
        """Say that this relay lives. Raises ConfigurationError for a broker that nobody has added."""
        row = await connection.fetchrow(
            self._sql["beat_relay"], relay, host, lease_seconds, broker, library_version()
        )
        if row is None:
            raise RuntimeError("the heartbeat statement returned no row")
        if not row["is_known"]:
            raise ConfigurationError(
                f"no broker has the number {broker} (TOWPATH_RELAY__BROKER_NUMBER): see towpath broker list, "
                "or add one with towpath broker add NAME"
            )
        found: dict[str, tuple[str, OnPoison]] = json.loads(row["destinations"])
        destinations = Destinations(
            {name: address for name, (address, _) in found.items()},
            {name: policy for name, (_, policy) in found.items()},
        )
        return Beat(row["living"], row["before"], row["paused"], destinations)

    async def renew(
        self,
        connection: asyncpg.Connection[Any],
        relay: UUID,
        lease_seconds: float,
        journaled: Mapping[int, int] = MappingProxyType({}),
    ) -> dict[int, int]:
        """Prolong every lease still held; returns epochs by shard. What is missing is lost for good.

        `journaled` has by shard the number of its newest journal row, where known: loading begins there.
        """
        rows = await connection.fetch(
            self._sql["renew_leases"], relay, lease_seconds, list(journaled), list(journaled.values())
        )
        return {row["shard"]: row["epoch"] for row in rows}

    async def take(
        self,
        connection: asyncpg.Connection[Any],
        relay: UUID,
        *,
        lease_seconds: float,
        margin_seconds: float,
        count: int,
        shards: range,
    ) -> dict[int, int]:
        """Take up to `count` of the shards that nobody holds; returns epochs by shard."""
        rows = await connection.fetch(
            self._sql["take_leases"],
            relay,
            lease_seconds,
            margin_seconds,
            count,
            shards.start,
            shards.stop - 1,
        )
        return {row["shard"]: row["epoch"] for row in rows}

    async def release(
        self, connection: asyncpg.Connection[Any], relay: UUID, epochs: Mapping[int, int]
    ) -> None:
        """Give shards back; another relay may start with them at once."""
        await connection.fetch(self._sql["release_leases"], relay, list(epochs), list(epochs.values()))

    async def leave(self, connection: asyncpg.Connection[Any], relay: UUID) -> None:
        """Stop counting among the living, and give back all that is held."""
        await connection.execute(self._sql["leave_relay"], relay)
