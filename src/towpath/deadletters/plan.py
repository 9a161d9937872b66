"""What an action would touch, before it touches anything."""

from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal, TypeAlias

from towpath import bulk
from towpath.deadletters.criteria import Filter
from towpath.store.deadletters import Connection, DeadLetters
from towpath.store.statements import DEFAULT_SCHEMA

Action: TypeAlias = Literal["replay", "discard"]
Cause: TypeAlias = tuple[str, str, str, str]
"""Group, stage, type and reason code."""


@dataclass(slots=True)
class Plan:
    """Dead letters in the order of their release: 8 bytes each, however many there are."""

    criteria: Filter
    made_at: datetime
    """By the database clock: of the plan it continues, if any. What died later is no part of it."""
    max_replays: int | None
    limit: int | None
    causes: Counter[Cause] = field(default_factory=Counter)
    capped_count: int = 0
    """Left out because they were replayed `max_replays` times already."""
    beyond_limit_count: int = 0
    """Left out because the limit was reached before them."""
    _runs: list[tuple[str, str, "array[int]"]] = field(default_factory=list)

    @property
    def count(self) -> int:
        """How many will be acted on."""
        return sum(len(ids) for _, _, ids in self._runs)

    def sample(self, size: int = 5) -> list[int]:
        """The first ids."""
        return [letter_id for _, _, ids in self._runs for letter_id in ids[:size]][:size]

    def batches(self, size: int) -> Iterator[tuple[str, bool, list[int]]]:
        """Group, whether they were refused by the broker, and up to `size` ids, in order."""
        for group, stage, ids in self._runs:
            for start in range(0, len(ids), size):
                yield group, stage == "publish", list(ids[start : start + size])

    def _take(self, group: str, stage: str, letter_id: int) -> None:
        kind = "publish" if stage == "publish" else "task"
        if not self._runs or self._runs[-1][:2] != (group, kind):
            self._runs.append((group, kind, array("q")))
        self._runs[-1][2].append(letter_id)


async def make_plan(
    connection: Connection,
    criteria: Filter,
    *,
    schema: str = DEFAULT_SCHEMA,
    limit: int | None = None,
    max_replays: int | None = None,
    action: Action = "replay",
) -> Plan:
    """Find what is meant. Changes nothing; memory grows by 8 bytes for each dead letter.

    The plan of a request that was interrupted within a day means what had died by then: what was
    replayed and died again is not replayed twice.

    With a `limit` the lanes with the oldest deaths come first, within a lane the least position.
    """
    store = DeadLetters(schema)
    until = await bulk.begun(connection, schema, f"dlq.{action}", criteria.as_json())
    plan = Plan(criteria, until, max_replays, limit)
    count = 0
    async for row in store.scan(connection, criteria.parameters(), until=until):
        if max_replays is not None and row["replay_count"] >= max_replays:
            plan.capped_count += 1
        elif limit is not None and count >= limit:
            plan.beyond_limit_count += 1
        else:
            count += 1
            plan._take(row["consumer_group"], row["stage"], row["id"])  # noqa: SLF001  its own maker
            plan.causes[row["consumer_group"], row["stage"], row["type"] or "", row["reason_code"]] += 1
    return plan
