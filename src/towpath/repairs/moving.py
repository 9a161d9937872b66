"""Carrying out a plan: waiting tasks become due now, finished ones begin a new run."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from uuid import UUID

from towpath import bulk
from towpath.bulk import BATCH_LIMIT, Counts
from towpath.repairs.plan import RepairPlan, request_of
from towpath.store.repairs import Connection, Repairs, Restarted
from towpath.store.statements import DEFAULT_SCHEMA
from towpath.telemetry.tracing import replay_span


async def carry_out(
    connection: Connection,
    plan: RepairPlan,
    *,
    actor: str,
    reason: str = "",
    schema: str = DEFAULT_SCHEMA,
    rate: float | None = None,
    batch_size: int = BATCH_LIMIT,
    on_progress: Callable[[Counts], None] | None = None,
) -> tuple[int, Counts]:
    """Do what the plan says; returns the id of its audit row and the final counts.

    `rate` is tasks per second. The connection must be outside any transaction. Raises
    StoreUnavailable when the database goes away: make and carry out the same plan again.
    """
    counts = Counts(plan.count, beyond_limit=plan.beyond_limit_count, until=plan.made_at.isoformat())
    store = Repairs(schema)

    def batches() -> Iterator[_Batch]:
        for group, ids in plan.batches(bulk.batch_size(rate, batch_size)):
            yield _Batch(store, connection, plan, group, ids, actor, reason)

    def tell(restarted: Sequence[Restarted]) -> None:
        """A span for each new run, below the one that created the message."""
        for task in restarted:
            headers = (("traceparent", task.trace.encode()),) if task.trace else ()
            with replay_span(
                headers,
                destination=task.source,
                group=",".join(plan.criteria.groups),
                message_id=task.id,
                type_=task.type,
                actor=actor,
            ):
                pass

    asked = request_of(plan.criteria, plan.states if plan.action == "rerun" else ())
    audit_id = await bulk.carry_out(
        connection,
        batches(),
        bulk.Request(f"tasks.{plan.action}", actor, reason, asked),
        counts,
        schema=schema,
        rate=rate,
        on_moved=tell if plan.action == "rerun" else None,
        on_progress=on_progress,
    )
    return audit_id, counts


@dataclass(frozen=True, slots=True)
class _Batch:
    store: Repairs
    connection: Connection
    plan: RepairPlan
    group: str
    ids: Sequence[UUID]
    actor: str
    reason: str

    @property
    def size(self) -> int:
        return len(self.ids)

    async def move(self) -> list[Restarted]:
        if self.plan.action == "retry":
            return await self.store.retry(
                self.connection,
                self.group,
                self.ids,
                until=self.plan.made_at,
                actor=self.actor,
                reason=self.reason,
            )
        return await self.store.rerun(
            self.connection,
            self.group,
            self.ids,
            until=self.plan.made_at,
            states=self.plan.states,
            actor=self.actor,
            reason=self.reason,
        )
