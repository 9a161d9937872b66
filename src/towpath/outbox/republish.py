"""Sending again what the outbox still holds: "everything since 14:00", for groups that lost their database.

The rows are appended to the outbox once more, under their own message ids and in order, so that whatever
holds for a message holds for them too: order per key, leases, the journal, policies for poison. Consumers
skip what they have finished. What was sent again is marked and never meant by a later run.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime
from typing import TYPE_CHECKING, Final
from uuid import UUID

from towpath.crashpoints import CrashPoint, crash_point
from towpath.errors import UsageError
from towpath.store.audit import AuditStore
from towpath.store.database import store_errors
from towpath.store.republish import Connection, Republishing
from towpath.store.statements import DEFAULT_SCHEMA

if TYPE_CHECKING:
    import asyncpg

BATCH_LIMIT: Final = 500
SAMPLE_SIZE: Final = 5


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which messages are meant: alternatives within a field, all fields together; an empty one means any."""

    since: datetime
    """When they were written, aware."""
    until: datetime | None = None
    """None: when the run begins."""
    destinations: tuple[str, ...] = ()
    types: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    message_ids: tuple[UUID, ...] = ()

    def __post_init__(self) -> None:
        for instant in (self.since, self.until):
            if instant is not None and instant.tzinfo is None:
                raise UsageError(f"{instant.isoformat()} has no time zone: append Z or an offset")
        if self.until is not None and self.until <= self.since:
            raise UsageError("until is not after since: nothing can lie between")

    def asked(self) -> str:
        """The request as text: the same request finishes what was interrupted."""
        given = {each.name: getattr(self, each.name) for each in fields(self)}
        return json.dumps({name: value for name, value in given.items() if value}, default=_plain)


@dataclass(slots=True)
class Progress:
    """How far a request is; kept in the audit table by the transaction of each batch."""

    done: int = 0
    gone: int = 0
    """Cleared from the ring meanwhile."""
    last_id: int = 0
    """The outbox id up to which everything is done."""
    is_complete: bool = False


@dataclass(slots=True)
class Plan:
    """What a run would send, in numbers."""

    wanted: Wanted
    until: datetime
    audit_id: int | None
    """The interrupted run that is continued."""
    before: Progress
    """How far that run was."""
    limit: int | None
    counts: Counter[tuple[str, str]]
    """By destination and type."""
    beyond_limit_count: int = 0
    """Left out because the limit was reached before them."""
    sample_ids: list[UUID] = field(default_factory=list)
    """The first message ids."""
    oldest: datetime | None = None
    newest: datetime | None = None

    @property
    def count(self) -> int:
        """How many will be sent."""
        return self.counts.total()

    def criteria(self) -> tuple[object, ...]:
        """The parameters of the statement."""
        wanted = self.wanted
        lists: list[Sequence[object]] = [wanted.destinations, wanted.types, wanted.keys, wanted.message_ids]
        return (wanted.since, self.until, *(list(values) or None for values in lists))


async def make_plan(
    connection: Connection, wanted: Wanted, *, schema: str = DEFAULT_SCHEMA, limit: int | None = None
) -> Plan:
    """Count what is meant. Changes nothing; the same request goes on where it was interrupted."""
    store = Republishing(schema)
    with store_errors():
        until, audit_id, before = wanted.until or await store.clock(connection), None, Progress()
        run = await store.newest(connection, wanted.asked())
        if run is not None:
            earlier = Progress(**json.loads(run.counts))
            if not earlier.is_complete:
                audit_id, before = run.audit_id, earlier
                until = datetime.fromisoformat(json.loads(run.criteria)["until"])
        plan = Plan(wanted, until, audit_id, before, limit, Counter())
        async for rows in store.candidates(
            connection, plan.criteria(), after_id=before.last_id, limit=limit, chunk=10_000
        ):
            plan.counts.update((row["destination"], row["type"]) for row in rows)
            plan.sample_ids += [row["message_id"] for row in rows[: SAMPLE_SIZE - len(plan.sample_ids)]]
            times = [row["created_at"] for row in rows]
            plan.oldest = min(times) if plan.oldest is None else min(plan.oldest, *times)
            plan.newest = max(times) if plan.newest is None else max(plan.newest, *times)
        if limit is not None and plan.count >= limit:
            meant = await store.count(connection, plan.criteria(), after_id=before.last_id)
            plan.beyond_limit_count = max(0, meant - plan.count)
    return plan


async def carry_out(
    connection: Connection,
    plan: Plan,
    *,
    actor: str,
    reason: str = "",
    schema: str = DEFAULT_SCHEMA,
    rate: float | None = None,
    batch_size: int = BATCH_LIMIT,
    on_progress: Callable[[Progress], None] | None = None,
) -> tuple[int, Progress]:
    """Send again what the plan says; returns the id of its audit row and how far the request is.

    `rate` is messages per second. The connection must be outside any transaction. Raises UsageError while
    another run is at it, StoreUnavailable when the database goes away: make the same plan again.
    """
    store, audit = Republishing(schema), AuditStore(schema)
    size = max(1, min(batch_size, BATCH_LIMIT, int(rate) if rate else BATCH_LIMIT))
    started, sent, progress = time.monotonic(), 0, plan.before
    with store_errors():
        if not await store.lock(connection):
            raise UsageError("messages are being sent again by another run: wait for its end")
        audit_id = plan.audit_id
        if audit_id is None:
            audit_id = await audit.begin(
                connection,
                actor=actor,
                action="outbox.republish",
                reason=reason,
                criteria=json.dumps({"asked": plan.wanted.asked(), "until": plan.until.isoformat()}),
                counts=json.dumps(asdict(progress)),
            )
        async for rows in store.candidates(
            connection, plan.criteria(), after_id=progress.last_id, limit=plan.limit, chunk=size
        ):
            if rate:
                await asyncio.sleep(max(0.0, started + sent / rate - time.monotonic()))
            progress = await _send(store, audit, connection, rows, audit_id, progress)
            sent += len(rows)
            if on_progress is not None:
                on_progress(progress)
        if plan.limit is None or sent < plan.limit:
            progress.is_complete = True
            await audit.update(connection, audit_id, json.dumps(asdict(progress)))
    return audit_id, progress


async def _send(
    store: Republishing,
    audit: AuditStore,
    connection: Connection,
    rows: Sequence[asyncpg.Record],
    audit_id: int,
    progress: Progress,
) -> Progress:
    """One transaction: rows and bookkeeping."""
    async with connection.transaction():
        await store.raise_synchronous_commit(connection)
        done = await store.send_again(connection, rows, audit_id)
        now = Progress(progress.done + done, progress.gone + len(rows) - done, rows[-1]["id"])
        await audit.update(connection, audit_id, json.dumps(asdict(now)))
        crash_point(CrashPoint.REPUBLISHED_BATCH)
    crash_point(CrashPoint.REPUBLISHED_BATCH)
    return now


def _plain(value: object) -> str:
    return value.isoformat() if isinstance(value, datetime) else str(value)
