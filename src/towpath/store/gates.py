"""Key gates: while a message of a lane waits, its followers are parked behind it.

A gate is deleted or moved only under its row lock. Lock order everywhere: gate, then task rows.
"""

from collections.abc import Mapping
from typing import Any, Protocol, TypeAlias
from uuid import UUID

import asyncpg

Connection: TypeAlias = "asyncpg.pool.PoolConnectionProxy[Any]"


class Executor(Protocol):
    """What the gates need of a connection inside a transaction."""

    async def fetchval(self, sql: str, /, *arguments: object) -> Any: ...

    async def fetchrow(self, sql: str, /, *arguments: object) -> Any: ...

    async def fetch(self, sql: str, /, *arguments: object) -> list[Any]: ...

    async def execute(self, sql: str, /, *arguments: object) -> Any: ...


async def leave(
    connection: Executor,
    sql: Mapping[str, str],
    group: str,
    source: str,
    lane: str,
) -> bool:
    """The head is done: promote the least parked follower, or open the gate.

    The caller holds the gate's lock and has moved the head on. True when a follower became due.
    """
    follower: UUID | None = await connection.fetchval(sql["next_of_lane"], group, source, lane)
    if follower is None:
        await connection.execute(sql["open_gate"], group, source, lane)
        return False
    await connection.execute(sql["move_gate"], group, source, lane, follower)
    await connection.execute(sql["promote"], group, follower)
    return True


async def hold(
    connection: Executor,
    sql: Mapping[str, str],
    group: str,
    source: str,
    lane: str | None,
    message_id: UUID,
) -> bool:
    """Gate the lane and lock the gate. True when `message_id` is its head and may wait for a time.

    False: another message heads the lane, this one has to park behind it. A message without a lane
    heads itself.
    """
    if lane is None:
        return True
    while True:
        await connection.execute(sql["close_gate"], group, source, lane, message_id)
        head: UUID | None = await connection.fetchval(sql["gate_head"], group, source, lane)
        if head is not None:  # else it was opened between the two statements
            return head == message_id
