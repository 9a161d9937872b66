"""Carrying out a plan: dead letters go back to work, or are closed, in the batches of a bulk action."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from towpath import bulk
from towpath.bulk import BATCH_LIMIT, Counts
from towpath.deadletters.plan import Action, Plan
from towpath.store.deadletters import Connection, DeadLetters, Released
from towpath.store.statements import DEFAULT_SCHEMA
from towpath.telemetry.logging import event_logger
from towpath.telemetry.tracing import replay_span

log = event_logger(__name__)


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
    StoreUnavailable when the database goes away: make and carry out the same plan again.
    """
    counts = Counts(
        plan.count,
        capped=plan.capped_count,
        beyond_limit=plan.beyond_limit_count,
        until=plan.made_at.isoformat(),
    )

    def batches() -> Iterator[_Batch]:
        store = DeadLetters(schema)
        for group, is_unpublished, ids in plan.batches(bulk.batch_size(rate, batch_size)):
            yield _Batch(
                store, connection, plan.max_replays, action, group, is_unpublished, ids, actor, reason
            )

    audit_id = await bulk.carry_out(
        connection,
        batches(),
        bulk.Request(f"dlq.{action}", actor, reason, plan.criteria.as_json()),
        counts,
        schema=schema,
        rate=rate,
        on_moved=partial(_tell, actor) if action == "replay" else None,
        on_progress=on_progress,
    )
    if action == "replay":
        groups = ",".join(plan.criteria.groups)
        log.info("dlq.replayed", group=groups, count=counts.done, actor=actor, audit_id=audit_id)
    return audit_id, counts


@dataclass(frozen=True, slots=True)
class _Batch:
    store: DeadLetters
    connection: Connection
    max_replays: int | None
    action: Action
    group: str
    is_unpublished: bool
    ids: Sequence[int]
    actor: str
    reason: str

    @property
    def size(self) -> int:
        return len(self.ids)

    async def move(self) -> list[Released]:
        cap = self.max_replays
        if self.action == "discard":
            return await self.store.discard(self.connection, self.group, self.ids)
        if self.is_unpublished:
            return await self.store.replay_unpublished(self.connection, self.ids, max_replays=cap)
        return await self.store.replay_tasks(
            self.connection, self.group, self.ids, max_replays=cap, actor=self.actor, reason=self.reason
        )


def _tell(actor: str, released: Sequence[Released]) -> None:
    """A span for each replayed message, below the one that created it."""
    for letter in released:
        headers = (("traceparent", letter.trace.encode()),) if letter.trace else ()
        with replay_span(
            headers,
            destination=letter.source,
            group=letter.group,
            message_id=letter.message_id,
            type_=letter.type,
            actor=actor,
        ):
            pass
