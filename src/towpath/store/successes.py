"""Successes, many at once: each row is guarded by the token of its claim."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from towpath.store.gates import Executor, leave
from towpath.store.work import Work


@dataclass(frozen=True, slots=True)
class Settled:
    """What a batch of successes became."""

    ids: frozenset[UUID]
    """Those whose token still held."""
    promoted_count: int
    """Followers that are due now."""


async def settle_with_gates(
    connection: Executor, sql: Mapping[str, str], group: str, batch: Sequence[tuple[Work, bytes | None]]
) -> Settled:
    """Inside a transaction, whoever holds them: a lane's head that succeeds promotes its follower."""
    gates = await _lock_heads(connection, sql, group, [work for work, _ in batch if work.lane is not None])
    rows = await settle(connection, sql, group, batch, is_for_all=True)
    ids = frozenset(row["id"] for row in rows)
    # What was kept while this waited for its row has a gate that was not there to be locked.
    kept = {row["id"] for row in rows if row["is_held"]} - {gate["head"] for gate in gates}
    late = [work for work, _ in batch if work.id in kept and work.lane is not None]
    gates = [*gates, *await _lock_heads(connection, sql, group, late)]
    done = [(gate["source"], gate["lane"]) for gate in gates if gate["head"] in ids]
    return Settled(ids, await leave(connection, sql, group, done))


async def settle(
    executor: Executor,
    sql: Mapping[str, str],
    group: str,
    batch: Sequence[tuple[Work, bytes | None]],
    *,
    is_for_all: bool,
) -> list[Any]:
    """Rows that are SUCCEEDED now: of all, or of those that the broker holds, which head no gate."""
    batch = sorted(batch, key=lambda item: item[0].id.int)
    plain = [work for work, result in batch if result is None]
    with_result = [(work, result) for work, result in batch if result is not None]
    rows: list[Any] = []
    if plain:
        arguments = [work.id for work in plain], sorted({token_of(work) for work in plain})
        rows += await executor.fetch(sql["succeed"], group, *arguments, is_for_all)
    if with_result:
        columns = (
            [work.id for work, _ in with_result],
            [token_of(work) for work, _ in with_result],
            [result for _, result in with_result],
        )
        rows += await executor.fetch(sql["succeed_with_results"], group, *columns, is_for_all)
    return rows


async def _lock_heads(
    connection: Executor, sql: Mapping[str, str], group: str, works: Sequence[Work]
) -> list[Any]:
    if not works:
        return []
    return await connection.fetch(
        sql["lock_heads"],
        group,
        sorted({work.source for work in works}),
        sorted({work.lane for work in works if work.lane is not None}),
        [work.id for work in works],
    )


def token_of(work: Work) -> UUID:
    """The token of its claim."""
    if work.token is None:
        raise ValueError(f"{work.id} was never claimed")
    return work.token
