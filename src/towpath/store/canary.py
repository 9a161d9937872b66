"""The canaries of one schema: written beside the outbox, confirmed by message id."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import UUID

import asyncpg

from towpath.messages.limits import CANARY
from towpath.store.outbox import DESTINATION, TYPE, Row
from towpath.store.statements import DEFAULT_SCHEMA, load


def is_canary(row: Row) -> bool:
    """Whether an outbox row is one."""
    return bool(row[TYPE] == CANARY and row[DESTINATION] == CANARY)


class CanaryStore:
    """The statements; each method takes the connection to run on, in autocommit."""

    def __init__(self, schema: str = DEFAULT_SCHEMA) -> None:
        self._sql = load("canary", schema)

    async def write(
        self,
        connection: asyncpg.Connection[Any],
        shards: Sequence[int],
        *,
        every_seconds: float,
        give_up_seconds: float,
    ) -> dict[int, UUID]:
        """A new one into each shard where it is time; returns those that never came, by shard."""
        rows = await connection.fetch(self._sql["write"], shards, every_seconds, give_up_seconds)
        return {row["shard"]: row["message_id"] for row in rows}

    async def confirm(self, connection: asyncpg.Connection[Any], message_ids: Sequence[UUID]) -> None:
        """The broker has these."""
        await connection.execute(self._sql["confirm"], message_ids)

    async def age(self, connection: asyncpg.Connection[Any], shards: range) -> float | None:
        """Seconds since the last proof of the worst shard; None where there never was a canary."""
        seconds: float | None = await connection.fetchval(self._sql["age"], shards.start, shards.stop - 1)
        return seconds
