"""Asking producers to NOTIFY while a relay sleeps, and listening."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import asyncpg

from towpath.store.statements import DEFAULT_SCHEMA, load

_BUSY_ROWS: Final = 50
"""Rows between two calls, about a second apart, from which on notifications cost more than they save."""


@dataclass(frozen=True, slots=True)
class Asleep:
    """What came of asking to be notified."""

    last_id: int
    """The newest outbox id drawn."""
    seconds_left: float | None
    """How long every INSERT notifies; None when it was not asked for, since rows come fast."""


class WakeupStore:
    """The statements of one schema. Each method takes the connection to run on."""

    def __init__(self, schema: str = DEFAULT_SCHEMA) -> None:
        self.channel = schema
        """Where the trigger notifies, with an empty payload; relays' probes have one."""
        self._sql = load("wakeup", schema)

    async def may_prepare(self, connection: asyncpg.Connection[Any]) -> bool:
        """Whether the server allows PREPARE TRANSACTION, which fails after NOTIFY."""
        value: bool = await connection.fetchval(self._sql["may_prepare"])
        return value

    async def notify(self, connection: asyncpg.Connection[Any], token: str) -> None:
        """Send a probe."""
        await connection.execute(self._sql["notify"], self.channel, token)

    async def stay_asleep(self, connection: asyncpg.Connection[Any], last_id: int | None) -> Asleep:
        """Ask to be notified for one to two seconds, unless rows come fast since `last_id` was drawn."""
        row = await connection.fetchrow(self._sql["stay_asleep"], last_id, _BUSY_ROWS)
        if row is None:
            raise RuntimeError("the wake-up statement returned no row")
        return Asleep(row["last_id"], row["seconds_left"])

    async def be_awake(self, connection: asyncpg.Connection[Any]) -> None:
        """Take back the request, whoever made it."""
        await connection.execute(self._sql["be_awake"])
