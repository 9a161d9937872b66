"""Carrying out a plan: batch by batch, each one transaction with its own line of bookkeeping.

Interrupted anywhere, the batches that committed are done and recorded, and the rest is still open:
the same command finishes it and repeats nothing.
"""

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Final, Literal, TypeAlias

import asyncpg

from towpath.crashpoints import CrashPoint, crash_point
from towpath.deadletters.plan import Plan
from towpath.store.database import store_errors
from towpath.store.deadletters import Connection, DeadLetters, Released
from towpath.store.statements import DEFAULT_SCHEMA
from towpath.telemetry.logging import event_logger
from towpath.telemetry.tracing import replay_span

log = event_logger(__name__)

Action: TypeAlias = Literal["replay", "discard"]
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
    """No longer open, no longer dead, or taken by somebody else meanwhile."""
    capped: int = 0
    beyond_limit: int = 0
    is_complete: bool = False


async def carry_out(
    connection: Connection,
    plan: Plan,
    action: Action = "replay",
    *,
    actor: str,
    reason: str = "",
    schema: str = DEFAULT_SCHEMA,
    rate: float | None = None,
    batch_size: int = BATCH_LIMIT,
    on_progress: Callable[[Counts], None] | None = None,
) -> tuple[int, Counts]:
    """Do what the plan says; returns the id of its audit row and the final counts.

    `rate` is dead letters per second. The connection must be outside any transaction. Raises
    StoreUnavailable when the database goes away: run the same plan's filter again.
    """
    store = DeadLetters(schema)
    counts = Counts(plan.count, capped=plan.capped_count, beyond_limit=plan.beyond_limit_count)
    size = max(1, min(batch_size, BATCH_LIMIT, int(rate) if rate else BATCH_LIMIT))
    started = time.monotonic()
    with store_errors():
        audit_id = await store.begin_audit(
            connection,
            actor=actor,
            action=f"dlq.{action}",
            reason=reason,
            criteria=json.dumps(plan.criteria.as_json()),
            counts=json.dumps(asdict(counts)),
        )
        for group, is_unpublished, ids in plan.batches(size):
            await _pace(started, counts.done + counts.skipped, rate)
            batch = _Batch(store, connection, plan, action, group, is_unpublished, ids, actor, reason)
            released = await _run(batch, audit_id, counts)
            _tell(released, group, actor, action)
            if on_progress is not None:
                on_progress(counts)
        counts.is_complete = True
        await store.update_audit(connection, audit_id, json.dumps(asdict(counts)))
    if action == "replay":
        groups = ",".join(plan.criteria.groups)
        log.info("dlq.replayed", group=groups, count=counts.done, actor=actor, audit_id=audit_id)
    return audit_id, counts


@dataclass(frozen=True, slots=True)
class _Batch:
    store: DeadLetters
    connection: Connection
    plan: Plan
    action: Action
    group: str
    is_unpublished: bool
    ids: Sequence[int]
    actor: str
    reason: str

    async def move(self) -> list[Released]:
        """In the transaction that is open."""
        cap = self.plan.max_replays
        if self.action == "discard":
            return await self.store.discard(self.connection, self.group, self.ids)
        if self.is_unpublished:
            return await self.store.replay_unpublished(self.connection, self.ids, max_replays=cap)
        return await self.store.replay_tasks(
            self.connection, self.group, self.ids, max_replays=cap, actor=self.actor, reason=self.reason
        )


async def _run(batch: _Batch, audit_id: int, counts: Counts) -> list[Released]:
    """One transaction; a deadlock with a consumer's own rows is tried again."""
    for tries_left in reversed(range(_DEADLOCK_TRIES)):
        try:
            async with batch.connection.transaction():
                released = await batch.move()
                now = Counts(**asdict(counts))
                now.done += len(released)
                now.parked += sum(letter.is_parked for letter in released)
                now.skipped += len(batch.ids) - len(released)
                await batch.store.update_audit(batch.connection, audit_id, json.dumps(asdict(now)))
                crash_point(CrashPoint.REPLAYED_BATCH)
        except (asyncpg.DeadlockDetectedError, asyncpg.SerializationError):
            if not tries_left:
                raise
        else:
            crash_point(CrashPoint.REPLAYED_BATCH)
            counts.done, counts.parked, counts.skipped = now.done, now.parked, now.skipped
            return released
    raise AssertionError("unreachable")


def _tell(released: Sequence[Released], group: str, actor: str, action: Action) -> None:
    """A span for each replayed message, below the one that created it."""
    if action != "replay":
        return
    for letter in released:
        headers = (("traceparent", letter.trace.encode()),) if letter.trace else ()
        with replay_span(
            headers,
            destination=letter.source,
            group=group,
            message_id=letter.message_id,
            type_=letter.type,
            actor=actor,
        ):
            pass


async def _pace(started: float, done: int, rate: float | None) -> None:
    if rate:
        await asyncio.sleep(max(0.0, started + done / rate - time.monotonic()))
