"""Key gates: while a message of a lane waits, its followers are parked behind it.

A gate is deleted or moved only under its row lock. Lock order everywhere: gate, then task rows.
"""

from collections.abc import Collection, Mapping
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
    connection: Executor, sql: Mapping[str, str], group: str, lanes: Collection[tuple[str, str]]
) -> int:
    """The heads of these lanes, (source, lane), are done: promote the least followers, or open the gates.

    The caller holds the gates' locks and has moved the heads on. Returns how many followers became due.
    """
    by_source: dict[str, list[str]] = {}
    for source, lane in sorted(lanes):
        by_source.setdefault(source, []).append(lane)
    promoted: list[UUID] = []
    for source, names in by_source.items():
        rows = await connection.fetch(sql["next_of_lanes"], group, source, names)
        next_of = {row["lane"]: row["id"] for row in rows}
        if idle := [name for name in names if name not in next_of]:
            await connection.execute(sql["open_gates"], group, source, idle)
        if next_of:
            await connection.execute(sql["move_gates"], group, source, [*next_of], [*next_of.values()])
            promoted += next_of.values()
    if promoted:
        await connection.execute(sql["promote"], group, sorted(promoted))
    return len(promoted)


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
