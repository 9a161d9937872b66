"""The statements that claim, for the broker and from the database, as rules over the model of Postgres."""

import math
from typing import Any
from uuid import UUID

from tests.simulation.postgres import Transaction
from tests.simulation.rows import Record, Task
from tests.simulation.tasks import WorkSchema

NOBODY: dict[str, Any] = {"worker": None, "token": None}


class ClaimSchema(WorkSchema):
    """With what starts work."""

    # From the broker

    def claim_events(
        self,
        x: Transaction,
        group: str,
        ids: list[UUID],
        types: list[str],
        kinds: list[str],
        sources: list[str],
        keys: list[str | None],
        lanes: list[str | None],
        positions: list[int | None],
        worker: UUID,
        token: UUID,
        takes_over: bool,
        gates_are_locked: bool,
    ) -> list[Record]:
        gates = self.seen(x, self.gates)
        if not gates_are_locked and any(source in sources and lane in lanes for source, lane in gates):
            return []
        started = []
        for id_, type_, kind, source, key, lane, position in sorted(
            zip(ids, types, kinds, sources, keys, lanes, positions, strict=True)
        ):
            self.lock(x, ("task", id_))
            task = self.tasks.get(id_)
            if task is None:
                task = Task(
                    id_,
                    type_,
                    source,
                    key,
                    lane,
                    position,
                    state="RUNNING",
                    held_by="broker",
                    kind=kind,
                    deliveries=1,
                    worker=worker,
                    token=token,
                    started_at=self.clock(),
                )
                started.append(self.write(x, task))
            elif self._is_free(x, task, takes_over=takes_over):
                started.append(self.start(x, task, worker, token, lane=lane))
        return [self._started(task) for task in started]

    def _is_free(self, x: Transaction, task: Task, *, takes_over: bool = True) -> bool:
        """Whether whoever the broker gives a message to may begin."""
        is_abandoned = task.state == "RUNNING" and not self.lives(task.worker, x)
        return task.held_by == "broker" and (
            (task.state == "ACCEPTED" and (takes_over or not task.deliveries))
            or (takes_over and is_abandoned)
        )

    def start(self, x: Transaction, task: Task, worker: UUID, token: UUID, **changes: Any) -> Task:
        """One that had a row before begins."""
        waited = 0.0 if task.due_at is None else self.clock() - task.due_at
        started_at = self.clock() if task.started_at is None else task.started_at + waited
        return self.move(
            x,
            task,
            state="RUNNING",
            deliveries=task.deliveries + 1,
            worker=worker,
            token=token,
            started_at=started_at,
            **changes,
        )

    def _started(self, task: Task) -> Record:
        age = self.clock() - (task.started_at or 0.0)
        return {
            **{name: getattr(task, name) for name in ("id", "attempt", "version", "deliveries", "run_no")},
            "deadline_seconds": None,
            "owner": "",
            "cancel_requested": False,
            "age_seconds": age,
        }

    def park_events(
        self,
        x: Transaction,
        group: str,
        ids: list[UUID],
        types: list[str],
        kinds: list[str],
        *columns: list[Any],
    ) -> list[Record]:
        parked = []
        for row in sorted(zip(ids, types, kinds, *columns, strict=True)):
            id_, type_, kind, source, key, lane, position, payload, content_type, headers, trace = row
            self.lock(x, ("task", id_))
            body = {"payload": payload, "content_type": content_type, "headers": headers, "trace": trace}
            task = self.tasks.get(id_)
            if task is None:
                self.write(
                    x, Task(id_, type_, source, key, lane, position, "PARKED", "database", kind=kind, **body)
                )
            elif self._is_free(x, task):
                self.move(
                    x,
                    task,
                    state="PARKED",
                    held_by="database",
                    lane=lane,
                    position=position,
                    **body,
                    **NOBODY,
                )
            else:
                continue
            parked.append({"id": id_})
        return parked

    def states(self, x: Transaction, group: str, ids: list[UUID]) -> list[Record]:
        view = self.seen(x, self.tasks)
        return [
            {
                "id": task.id,
                "state": task.state,
                "held_by": task.held_by,
                "deliveries": task.deliveries,
                "worker_is_alive": self.lives(task.worker, x),
            }
            for task in (view[id_] for id_ in ids if id_ in view)
        ]

    # From the database

    def due(
        self,
        x: Transaction,
        group: str,
        limit: int,
        types: list[str],
        floors: list[float | None],
        back: float,
        margin: float,
    ) -> list[Record]:
        now = self.clock()
        tasks = sorted(
            (task for task in self.seen(x, self.tasks).values() if self._is_due(task)),
            key=lambda task: (task.due_at, task.id),
        )
        places: list[Record] = []
        found: list[Task] = []
        for type_, floor in zip(types, floors, strict=True):
            start = min(-math.inf if floor is None else floor, now - back)
            due = [task for task in tasks if task.type == type_ and (task.due_at or 0.0) >= start]
            free = [task for task in due if not self.is_lane_busy(x, task)]
            firsts = [task.due_at for task in due if task in free or (task.due_at or 0.0) > now - 300]
            places.append({"id": None, "type": type_, "due_at": min([*firsts[:1], now - margin])})
            found += free
        columns = ("id", "type", "source", "key", "lane", "waiting_for", "deliveries", "due_at")
        found.sort(key=lambda task: (task.due_at, task.id))
        return places + [{name: getattr(task, name) for name in columns} for task in found[:limit]]

    def first_waiting(self, x: Transaction, group: str, margin: float) -> list[Record]:
        first: dict[str | None, Any] = {None: self.clock() - margin}
        for task in self.seen(x, self.tasks).values():
            if task.state == "WAITING":
                first[task.type] = min(first.get(task.type, math.inf), task.due_at)
        return [{"type": type_, "due_at": due_at} for type_, due_at in first.items()]

    def _is_due(self, task: Task) -> bool:
        return task.state == "WAITING" and task.due_at is not None and task.due_at <= self.clock()

    def start_due(
        self, x: Transaction, group: str, ids: list[UUID], worker: UUID, token: UUID
    ) -> list[Record]:
        free = [id_ for id_ in ids if not self.is_locked(("task", id_), x)]
        rows = []
        for task in [task for task in self.matching(x, free, self._is_due) if not self.is_lane_busy(x, task)]:
            started = self.start(x, task, worker, token, due_at=None, waiting_for=None)
            columns = (
                "type",
                "kind",
                "source",
                "key",
                "lane",
                "position",
                "payload",
                "content_type",
                "headers",
            )
            rest = {name: getattr(started, name) for name in (*columns, "trace")}
            rows.append(self._started(started) | rest | {"created_at": None})
        return rows
