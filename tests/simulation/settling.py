"""The statements that settle and take back, and the rest that a member asks, as rules over the model."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any
from uuid import UUID

from tests.simulation.claiming import NOBODY, ClaimSchema
from tests.simulation.postgres import Transaction
from tests.simulation.rows import Record, Task
from towpath.store.installed import SCHEMA_VERSION, SHARDS_PER_BROKER


class TaskSchema(ClaimSchema):
    """All that a member asks."""

    # Settling

    def _claimed(self, x: Transaction, ids: Iterable[UUID], tokens: Sequence[UUID | None]) -> list[Task]:
        return list(self.matching(x, ids, lambda task: task.state == "RUNNING" and task.token in tokens))

    def succeed(
        self, x: Transaction, group: str, ids: list[UUID], tokens: list[UUID], is_for_all: bool
    ) -> list[Record]:
        claimed = list(
            self.matching(
                x,
                ids,
                lambda task: (
                    task.state == "RUNNING"
                    and task.token in tokens
                    and (is_for_all or task.held_by == "broker")
                ),
            )
        )
        for task in claimed:
            self.move(x, task, state="SUCCEEDED", attempt=task.attempt + 1, **NOBODY)
        return [{"id": task.id, "is_held": task.held_by == "database"} for task in claimed]

    def keep(
        self,
        x: Transaction,
        group: str,
        id_: UUID,
        token: UUID,
        lane: str | None,
        position: int | None,
        *body: Any,
    ) -> list[Record]:
        return [
            {
                "version": self.write(
                    x, replace(task, held_by="database", **_place(task, lane, position, *body))
                ).version
            }
            for task in self._claimed(x, [id_], [token])
        ]

    def wait(
        self,
        x: Transaction,
        group: str,
        id_: UUID,
        token: UUID,
        delay: float | None,
        waiting_for: str,
        position: int | None,
        lane: str | None,
        *rest: Any,
    ) -> list[Record]:
        *body, spent, _, _, _, _, ageless = rest
        for task in self._claimed(x, [id_], [token]):
            is_head = delay is not None
            waits = self.move(
                x,
                replace(task, **_place(task, lane, position, *body)),
                state="WAITING" if is_head else "PARKED",
                due_at=None if delay is None else self.clock() + delay,
                waiting_for=waiting_for if is_head else None,
                held_by="database",
                attempt=task.attempt + spent,
                deliveries=0,
                started_at=(task.started_at or 0.0) + ageless,
                **NOBODY,
            )
            names = ("state", "version", "attempt", "run_no")
            return [{name: getattr(waits, name) for name in names} | {"due_at": None}]
        return []

    def end(
        self,
        x: Transaction,
        group: str,
        id_: UUID,
        token: UUID,
        state: str,
        spent: int,
        lane: str | None,
        position: int | None,
        *_: str,
    ) -> list[Record]:
        ended = [
            self.move(
                x,
                replace(task, **_place(task, lane, position)),
                state=state,
                held_by="database",
                attempt=task.attempt + spent,
                **NOBODY,
            )
            for task in self._claimed(x, [id_], [token])
        ]
        return [{name: getattr(task, name) for name in ("version", "attempt", "run_no")} for task in ended]

    def bury(self, x: Transaction, group: str, message_id: UUID, *_: Any) -> list[Record]:
        self.xid(x)
        count = self.letters.get(message_id, 0) + 1
        x.put(self.letters, message_id, count)
        return [{"id": message_id.int, "death_count": count}]

    def record_event(self, x: Transaction, *_: Any) -> list[Record]:
        return []

    copy_to_broker = doubt_given_up = set_local = record_event

    # Back to work

    def hand_back(self, x: Transaction, group: str, ids: list[UUID], tokens: list[UUID]) -> list[Record]:
        for task in self._claimed(x, ids, tokens):
            is_held = task.held_by == "database"
            self.move(
                x,
                task,
                state="WAITING" if is_held else "ACCEPTED",
                due_at=self.clock() if is_held else None,
                waiting_for="retry" if is_held else None,
                deliveries=max(task.deliveries - 1, 0),
                **NOBODY,
            )
        return []

    def abandoned(self, x: Transaction, group: str, limit: int, without: list[UUID]) -> list[Record]:
        left = self.abandoned_anywhere(x, group, len(self.tasks))
        rows: list[Record] = []
        for worker, ends in sorted(self.seen(x, self.workers).items()):
            if ends <= self.clock() and worker not in without:
                is_long_dead = {"is_long_dead": ends < self.clock() - 60}
                found = [row for row in left if row["worker"] == worker][:limit]
                rows += [row | is_long_dead for row in found or [{"id": None, "worker": worker}]]
        return rows[:limit]

    def abandoned_anywhere(self, x: Transaction, group: str, limit: int) -> list[Record]:
        return [
            {name: getattr(task, name) for name in ("id", "source", "lane", "token", "worker")}
            | {"effect_state": None}
            for _, task in sorted(self.seen(x, self.tasks).items())
            if task.state == "RUNNING" and task.held_by == "database" and not self.lives(task.worker, x)
        ][:limit]

    def reap(
        self,
        x: Transaction,
        group: str,
        id_: UUID,
        is_head: bool,
        token: UUID,
        worker: UUID,
    ) -> list[Record]:
        return [
            {
                "version": self.move(
                    x,
                    task,
                    state="WAITING" if is_head else "PARKED",
                    due_at=self.clock() if is_head else None,
                    waiting_for="lost" if is_head else None,
                    **NOBODY,
                ).version
            }
            for task in self._claimed(x, [id_], [token])
            if not self.lives(task.worker, x)
        ]

    def expire_finished(self, x: Transaction, group: str, seconds: float, limit: int) -> list[Record]:
        return [{"count": 0}]

    # What else is asked

    def facts(self, x: Transaction) -> list[Record]:
        return [{"version": SCHEMA_VERSION, "compatible_from": SCHEMA_VERSION, "shards": SHARDS_PER_BROKER}]

    def note_terms(self, x: Transaction, group: str, ordering: str, queues: int | None) -> list[Record]:
        return [{"ordering": ordering, "queues": queues}]

    def installation(self, x: Transaction) -> list[Record]:
        return [{"value": "installation"}]

    def addresses(self, x: Transaction, *_: Any) -> list[Record]:
        return []

    other_members = of_group = addresses

    def note_offsets(
        self,
        x: Transaction,
        group: str,
        addresses: list[str],
        numbers: list[int],
        positions: list[int | None],
        refusals: list[str | None],
    ) -> list[Record]:
        self.xid(x)
        for address, number, position in zip(addresses, numbers, positions, strict=True):
            place = (address, number)
            self.lock(x, ("offset", place))
            x.put(self.offsets, place, self.offsets.get(place) if position is None else position)
        return []

    def take_bookmarks(
        self, x: Transaction, group: str, addresses: list[str], numbers: list[int]
    ) -> list[Record]:
        known = self.seen(x, self.offsets)
        return [
            {"address": place[0], "partition": place[1], "position": known[place], "word": None}
            for place in zip(addresses, numbers, strict=True)
            if place in known
        ]


def _place(task: Task, lane: str | None, position: int | None, *body: Any) -> Record:
    """Where it stands now, and its body where it brought one."""
    names = ("payload", "content_type", "headers", "trace")
    given = {name: value for name, value in zip(names, body, strict=False) if value is not None}
    return {"lane": lane, "position": task.position if position is None else position, **given}
