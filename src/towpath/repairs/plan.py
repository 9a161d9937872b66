"""What a retry or a rerun would touch, before it touches anything."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final, Literal, TypeAlias
from uuid import UUID

from towpath import bulk
from towpath.repairs.criteria import TaskFilter
from towpath.states import TaskState
from towpath.store.repairs import Connection, Repairs, Row
from towpath.store.statements import DEFAULT_SCHEMA

Action: TypeAlias = Literal["retry", "rerun"]
Cause: TypeAlias = tuple[str, str, str, str]
"""Group, type, what it waits for or how it ended, and reason code."""

RERUNNABLE: Final = (TaskState.SUCCEEDED, TaskState.FAILED)
_UUID_BYTES: Final = 16


@dataclass(slots=True)
class RepairPlan:
    """Tasks in the order of their release: 16 bytes each, however many there are."""

    action: Action
    criteria: TaskFilter
    made_at: datetime
    """By the database clock: of the plan it continues, if any. What changed later is no part of it."""
    limit: int | None
    states: tuple[TaskState, ...] = RERUNNABLE
    """For a rerun: how they may have ended."""
    causes: Counter[Cause] = field(default_factory=Counter)
    with_effects_count: int = 0
    """Left out because an at-most-once effect of theirs may have happened."""
    bodiless_count: int = 0
    """Left out because nothing holds their body any more."""
    beyond_limit_count: int = 0
    """Left out because the limit was reached before them."""
    _ids: dict[str, bytearray] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """How many will be acted on."""
        return sum(map(len, self._ids.values())) // _UUID_BYTES

    def sample(self, size: int = 5) -> list[UUID]:
        """The first ids."""
        return [id_ for _, ids in self.batches(size) for id_ in ids][:size] if self.count else []

    def batches(self, size: int) -> Iterator[tuple[str, list[UUID]]]:
        """Group and up to `size` ids, in order."""
        for group, packed in self._ids.items():
            step = size * _UUID_BYTES
            for start in range(0, len(packed), step):
                chunk = bytes(packed[start : start + step])
                parts = range(0, len(chunk), _UUID_BYTES)
                yield group, [UUID(bytes=chunk[at : at + _UUID_BYTES]) for at in parts]

    def _take(self, row: Row) -> None:
        if self.limit is not None and self.count >= self.limit:
            self.beyond_limit_count += 1
            return
        self._ids.setdefault(row["consumer_group"], bytearray()).extend(row["id"].bytes)
        self.causes[row["consumer_group"], row["type"], row["why"], row["reason_code"] or ""] += 1


async def make_plan(
    connection: Connection,
    action: Action,
    criteria: TaskFilter,
    *,
    schema: str = DEFAULT_SCHEMA,
    limit: int | None = None,
    states: Sequence[TaskState] = RERUNNABLE,
    repeat_effects: bool = False,
) -> RepairPlan:
    """Find what is meant. Changes nothing; the plan of an interrupted request goes on where it was.

    A rerun leaves out tasks whose at-most-once effect may have happened, unless `repeat_effects`, and
    those whose body is neither in their row, nor in a dead letter, nor in the outbox any more.
    """
    store = Repairs(schema)
    asked = request_of(criteria, states if action == "rerun" else ())
    until = await bulk.begun(connection, schema, f"tasks.{action}", asked)
    plan = RepairPlan(action, criteria, until, limit, tuple(states))
    parameters = criteria.parameters(until)
    if action == "retry":
        async for row in store.waiting(connection, parameters):
            plan._take(row)  # noqa: SLF001  its own maker
        return plan
    rows: list[Row] = []
    async for row in store.finished(connection, parameters, states):
        if row["has_effect"] and not repeat_effects:
            plan.with_effects_count += 1
        else:
            rows.append(row)
    retained = await store.retained(connection, [row["id"] for row in rows if not row["has_body"]])
    for row in rows:
        if row["has_body"] or row["id"] in retained:
            plan._take(row)  # noqa: SLF001  its own maker
        else:
            plan.bodiless_count += 1
    return plan


def request_of(criteria: TaskFilter, states: Sequence[TaskState]) -> dict[str, object]:
    """What was asked for, for the audit table."""
    return {**criteria.as_json(), **({"states": sorted(states)} if states else {})}
