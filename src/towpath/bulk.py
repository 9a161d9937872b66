"""One bulk action of an operator: batch by batch, each one transaction with its own line of bookkeeping.

Interrupted anywhere, the batches that committed are done and recorded. The same request goes on where
it was: it means what was there when the interrupted one began, so that nothing is done twice.
"""

import asyncio
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Final, Protocol, TypeVar

import asyncpg

from towpath.crashpoints import CrashPoint, crash_point
from towpath.store.audit import AuditStore, Connection
from towpath.store.database import store_errors

BATCH_LIMIT: Final = 500
_DEADLOCK_TRIES: Final = 5


@dataclass(slots=True)
class Counts:
    """How far an action is; kept in the audit table by the transaction of each batch."""

    planned: int
    done: int = 0
    parked: int = 0
    """Of those done: behind an earlier message of their key."""
    skipped: int = 0
    """Moved or taken by somebody else meanwhile."""
    capped: int = 0
    beyond_limit: int = 0
    until: str | None = None
    """What came to be later is not part of the plan; an ISO instant of the database clock."""
    is_complete: bool = False


class Moved(Protocol):
    """What a batch did to one row."""

    @property
    def is_parked(self) -> bool:
        """Whether it waits behind an earlier message of its key."""


M_co = TypeVar("M_co", bound=Moved, covariant=True)


class Batch(Protocol[M_co]):
    """Some rows of a plan."""

    @property
    def size(self) -> int:
        """How many rows are meant."""

    async def move(self) -> Sequence[M_co]:
        """Act on them in the transaction that is open; what changed meanwhile is left out."""


@dataclass(frozen=True, slots=True)
class Request:
    """Who wants what, and why."""

    action: str
    """As the audit table calls it, such as `dlq.replay`."""
    actor: str
    reason: str
    criteria: Mapping[str, object]
    """What was asked for, as JSON: the same request goes on where it was interrupted."""


async def begun(connection: Connection, schema: str, action: str, criteria: Mapping[str, object]) -> datetime:
    """From when on rows do not belong to the request: now, or when it was interrupted."""
    store = AuditStore(schema)
    found = await store.newest(connection, action, json.dumps(criteria))
    if found is not None:
        counts = json.loads(found)
        if not counts["is_complete"]:
            return datetime.fromisoformat(counts["until"])
    return await store.clock(connection)


async def carry_out(
    connection: Connection,
    batches: Iterable[Batch[M_co]],
    request: Request,
    counts: Counts,
    *,
    schema: str,
    rate: float | None = None,
    on_moved: Callable[[Sequence[M_co]], None] | None = None,
    on_progress: Callable[[Counts], None] | None = None,
) -> int:
    """Run the batches and bring `counts` up to date; returns the id of the audit row.

    `rate` is rows per second. The connection must be outside any transaction. Raises StoreUnavailable
    when the database goes away: make the same request again.
    """
    store = AuditStore(schema)
    started = time.monotonic()
    with store_errors():
        audit_id = await store.begin(
            connection,
            actor=request.actor,
            action=request.action,
            reason=request.reason,
            criteria=json.dumps(request.criteria),
            counts=json.dumps(asdict(counts)),
        )
        for batch in batches:
            await _pace(started, counts.done + counts.skipped, rate)
            moved = await _run(connection, store, batch, audit_id, counts)
            if on_moved is not None:
                on_moved(moved)
            if on_progress is not None:
                on_progress(counts)
        counts.is_complete = True
        await store.update(connection, audit_id, json.dumps(asdict(counts)))
    return audit_id


def batch_size(rate: float | None, wanted: int = BATCH_LIMIT) -> int:
    """Rows in a transaction: at most a second's worth."""
    return max(1, min(wanted, BATCH_LIMIT, int(rate) if rate else BATCH_LIMIT))


async def _run(
    connection: Connection, store: AuditStore, batch: Batch[M_co], audit_id: int, counts: Counts
) -> Sequence[M_co]:
    """One transaction; a deadlock with a consumer's own rows is tried again."""
    for tries_left in reversed(range(_DEADLOCK_TRIES)):
        try:
            async with connection.transaction():
                moved = await batch.move()
                now = Counts(**asdict(counts))
                now.done += len(moved)
                now.parked += sum(one.is_parked for one in moved)
                now.skipped += batch.size - len(moved)
                await store.update(connection, audit_id, json.dumps(asdict(now)))
                crash_point(CrashPoint.REPLAYED_BATCH)
        except (asyncpg.DeadlockDetectedError, asyncpg.SerializationError):
            if not tries_left:
                raise
        else:
            crash_point(CrashPoint.REPLAYED_BATCH)
            counts.done, counts.parked, counts.skipped = now.done, now.parked, now.skipped
            return moved
    raise AssertionError("unreachable")


async def _pace(started: float, done: int, rate: float | None) -> None:
    if rate:
        await asyncio.sleep(max(0.0, started + done / rate - time.monotonic()))
