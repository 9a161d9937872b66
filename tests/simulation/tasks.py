"""The statements of work, as rules over the model of Postgres: claims, gates of keys, settling, back to work.

A method is named after its statement and takes what that takes. Of one group, and of events: what is
asked of at-most-once effects and of submitted tasks has no answer here.
"""

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any
from uuid import UUID

import asyncpg

from tests.simulation.postgres import GONE, Blocked, Postgres, Table, Transaction, set_row
from tests.simulation.rows import Record, Task

FINAL = ("SUCCEEDED", "FAILED", "DEAD", "EXPIRED", "CANCELLED")


class WorkSchema(Postgres):
    """Tasks, key gates and workers, and what the statements share."""

    def __init__(self, clock: Callable[[], float], rnd: random.Random) -> None:
        super().__init__(clock, rnd)
        self.tasks: Table = {}
        self.gates: Table = {}
        """The head of each gated lane, by source and lane."""
        self.workers: Table = {}
        """The ends of leases."""
        self.letters: Table = {}
        self.offsets: Table = {}
        self._waits: dict[Transaction, Transaction] = {}

    def seen(self, x: Transaction, table: Table) -> Table:
        """The table without what other transactions in progress have changed."""
        others = [other for other in self.running.values() if other is not x and other.undo]
        if not others:
            return table
        view = dict(table)
        for other in others:
            for changed, key, before in reversed(other.undo):
                if changed is table:
                    set_row(view, key, before)
        return view

    def lock(self, transaction: Transaction, key: Any) -> None:
        """Raises Blocked, and DeadlockDetectedError where the other waits for this one."""
        try:
            super().lock(transaction, key)
        except Blocked:
            holder = self._waits[transaction] = self.locked[key]
            while holder in self._waits:
                holder = self._waits[holder]
                if holder is transaction:
                    raise asyncpg.DeadlockDetectedError("deadlock detected") from None
            raise
        self._waits.pop(transaction, None)

    def _end(self, transaction: Transaction) -> None:
        super()._end(transaction)
        self._waits.pop(transaction, None)

    def lives(self, worker: UUID | None, x: Transaction) -> bool:
        """Whether a worker has a lease now."""
        return bool(self.seen(x, self.workers).get(worker, 0.0) > self.clock())

    def matching(self, x: Transaction, ids: Iterable[UUID], where: Callable[[Task], bool]) -> Iterator[Task]:
        """Lock the rows that an UPDATE finds, in order, and look again."""
        view = self.seen(x, self.tasks)
        for id_ in sorted(ids):
            if id_ in view and where(view[id_]):
                self.lock(x, ("task", id_))
                if id_ in self.tasks and where(self.tasks[id_]):
                    yield self.tasks[id_]

    def write(self, x: Transaction, task: Task) -> Task:
        """Insert or update a row that is locked. Raises UniqueViolationError where its lane runs another."""
        self.xid(x)
        if task.state == "RUNNING" and task.lane is not None:
            for view in (self.tasks, self.seen(x, self.tasks)):
                for other in view.values():
                    if other.id != task.id and other.state == "RUNNING" and other.place == task.place:
                        if self.is_locked(("task", other.id), x):
                            self.lock(x, ("task", other.id))  # to wait for what becomes of it
                        raise asyncpg.UniqueViolationError("task_running_lane")
        x.put(self.tasks, task.id, task)
        return task

    def move(self, x: Transaction, task: Task, **changes: Any) -> Task:
        """Update a row, with a new version."""
        return self.write(x, replace(task, version=task.version + 1, **changes))

    def is_lane_busy(self, x: Transaction, task: Task) -> bool:
        """Whether something of its lane is seen to run."""
        return task.lane is not None and any(
            other.state == "RUNNING" and other.place == task.place
            for other in self.seen(x, self.tasks).values()
        )

    def parked(self, x: Transaction, source: str, lane: str | None) -> list[Task]:
        """The followers of a lane, in their order."""
        followers = [
            task
            for task in self.seen(x, self.tasks).values()
            if task.state == "PARKED" and task.place == (source, lane)
        ]
        return sorted(followers, key=lambda task: (task.position is not None, task.position or 0, task.id))

    # Gates of keys

    def lock_gates(
        self, x: Transaction, group: str, sources: list[str], lanes: list[str], limit: int
    ) -> list[Record]:
        return [
            {"source": source, "lane": lane, "is_full": len(self.parked(x, source, lane)) >= limit}
            for source, lane in self._lock(x, sources, lanes)
        ]

    def lock_heads(
        self, x: Transaction, group: str, sources: list[str], lanes: list[str], heads: list[UUID]
    ) -> list[Record]:
        return [
            {"source": source, "lane": lane, "head": self.gates[source, lane]}
            for source, lane in self._lock(x, sources, lanes, heads)
        ]

    def _lock(
        self, x: Transaction, sources: list[str], lanes: list[str], heads: list[UUID] | None = None
    ) -> Iterator[tuple[str, str]]:
        for (source, lane), head in sorted(self.seen(x, self.gates).items()):
            if source in sources and lane in lanes and (heads is None or head in heads):
                self.lock(x, ("gate", source, lane))
                now = self.gates.get((source, lane))
                if now is not None and (heads is None or now in heads):
                    yield source, lane

    def gate_head(self, x: Transaction, group: str, source: str, lane: str) -> list[Record]:
        return [{"head": self.gates[place]} for place in self._lock(x, [source], [lane])]

    def close_gate(self, x: Transaction, group: str, source: str, lane: str, head: UUID) -> list[Record]:
        place = (source, lane)
        if place in self.gates and place in self.seen(x, self.gates):
            return []
        self.lock(x, ("gate", source, lane))
        if place not in self.gates:
            self.xid(x)
            x.put(self.gates, place, head)
        return []

    def open_gates(self, x: Transaction, group: str, source: str, lanes: list[str]) -> list[Record]:
        return self._set_gates(x, source, dict.fromkeys(lanes, GONE))

    def move_gates(
        self, x: Transaction, group: str, source: str, lanes: list[str], heads: list[UUID]
    ) -> list[Record]:
        return self._set_gates(x, source, dict(zip(lanes, heads, strict=True)))

    def _set_gates(self, x: Transaction, source: str, heads: dict[str, Any]) -> list[Record]:
        self.xid(x)
        for lane in sorted(heads):
            if (source, lane) in self.gates:
                self.lock(x, ("gate", source, lane))
                x.put(self.gates, (source, lane), heads[lane])
        return []

    def next_of_lanes(self, x: Transaction, group: str, source: str, lanes: list[str]) -> list[Record]:
        waiting = [(lane, self.parked(x, source, lane)) for lane in lanes]
        return [{"lane": lane, "id": followers[0].id} for lane, followers in waiting if followers]

    def promote(self, x: Transaction, group: str, ids: list[UUID]) -> list[Record]:
        for task in self.matching(x, ids, lambda task: task.state == "PARKED"):
            self.move(x, task, state="WAITING", due_at=self.clock(), waiting_for="promoted")
        return []

    def stale_gates(self, x: Transaction, group: str, source: str, lane: str, limit: int) -> list[Record]:
        tasks = self.seen(x, self.tasks)
        gates = sorted(gate for gate in self.seen(x, self.gates).items() if gate[0] > (source, lane))[:limit]
        living = ("WAITING", "RUNNING", "UNKNOWN", "ACCEPTED")
        rows = [
            {
                "source": place[0],
                "lane": place[1],
                "head": head,
                "is_stale": head not in tasks or tasks[head].state not in living,
                "is_last": number == limit,
            }
            for number, (place, head) in enumerate(gates, 1)
        ]
        return [row for row in rows if row["is_stale"] or row["is_last"]]

    # Workers

    def register_worker(
        self,
        x: Transaction,
        worker: UUID,
        group: str,
        host: str,
        lease: float,
        types: list[str],
        version: str,
    ) -> list[Record]:
        self._set_lease(x, worker, self.clock() + lease)
        return []

    def beat(self, x: Transaction, worker: UUID, lease: float) -> list[Record]:
        if not self.lives(worker, x):
            return []
        self._set_lease(x, worker, self.clock() + lease)
        return [{"renewed": 1}]

    def leave(self, x: Transaction, worker: UUID) -> list[Record]:
        self._set_lease(x, worker, GONE)
        return []

    def _set_lease(self, x: Transaction, worker: UUID, until: Any) -> None:
        self.lock(x, ("worker", worker))
        self.xid(x)
        x.put(self.workers, worker, until)

    def cancellations(self, x: Transaction, group: str, ids: list[UUID], worker: UUID) -> list[Record]:
        return []

    def claims_of_worker(self, x: Transaction, worker: UUID) -> list[Record]:
        return [
            {"id": task.id, "token": task.token}
            for task in self.seen(x, self.tasks).values()
            if task.state == "RUNNING" and task.worker == worker
        ]

    def forget_workers(self, x: Transaction, group: str) -> list[Record]:
        return []
