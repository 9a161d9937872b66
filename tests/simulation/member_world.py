"""What is around members in a history: their database and broker, the handler, and the verdict."""

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final
from uuid import UUID

from tests.simulation.kafka import SimKafka
from tests.simulation.links import Server
from tests.simulation.loop import PROCESS, Process, SimLoop
from tests.simulation.member_plan import FOR_EVER, WIDE, Arrive, Fault, Step
from tests.simulation.postgres import Table, Transaction
from tests.simulation.rows import Task
from tests.simulation.settling import TaskSchema
from tests.simulation.tasks import FINAL
from towpath.app import App
from towpath.backoff import RetryPolicy
from towpath.context import Call
from towpath.messages import Envelope, wire_headers

PARTITIONS: Final = 3
BACKOFF: Final = RetryPolicy(attempts=4, base="500ms", cap="3s")
_ROUNDING: Final = 1e-6


class Trouble(Exception):
    """What a handler raises."""


@dataclass
class Account:
    """What came of a history."""

    trace: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    effects: list[int] = field(default_factory=list)
    """Messages in the order in which their handlers succeeded."""
    handled: Counter[int] = field(default_factory=Counter)
    """How often the handler was called for each."""
    ended_at: float = 0.0

    @property
    def summary(self) -> str:
        calls = self.handled.total()
        return f"{len(self.handled)} messages handled {calls} times, the last at {self.ended_at:.6f} s"


@dataclass(eq=False)
class Visit:
    """A handler at work."""

    process: Process
    worker: UUID
    number: int


class JudgedSchema(TaskSchema):
    """Tells of moves that nobody may make."""

    def __init__(self, clock: Any, rnd: random.Random, wrong: list[str]) -> None:
        super().__init__(clock, rnd)
        self.wrong = wrong
        self.dues: Table = {}
        """When a retry was due, by message and version."""

    def write(self, x: Transaction, task: Task) -> Task:
        before = self.tasks.get(task.id)
        if before is not None and before.state in FINAL:
            self.wrong.append(f"ended twice: {number_of(task.id)}")
        if before is not None and before.state == "RUNNING":
            is_other = self.asker is not None and before.worker not in self.asker.owners
            if is_other and (task.state in FINAL or self.lives(before.worker, x)):
                self.wrong.append(f"settled by another: {number_of(task.id)} by {self.asker.name}")
            if task.due_at is not None and task.attempt > before.attempt:
                self._judge_delay(task, task.due_at - self.clock())
                x.put(self.dues, (task.id, task.version), task.due_at)
        return super().write(x, task)

    def _judge_delay(self, task: Task, delay: float) -> None:
        base, cap = BACKOFF.base_delay.total_seconds(), BACKOFF.cap_delay.total_seconds()
        if not base - _ROUNDING <= delay <= min(cap, base * 2**task.attempt) + _ROUNDING:
            self.wrong.append(f"no back-off: {number_of(task.id)} waits {delay:.3f} s")

    def is_early(self, id_: UUID) -> bool:
        """Whether a retry of this message is not due yet."""
        return any(due > self.clock() + _ROUNDING for (each, _), due in self.dues.items() if each == id_)

    def is_safe(self, id_: UUID) -> bool:
        """Whether the broker may forget this message."""
        task = self.seen(Transaction(), self.tasks).get(id_)
        return task is not None and (task.state in FINAL or task.held_by == "database")


class World:
    """Of one run of a plan."""

    def __init__(self, loop: SimLoop, seed: int, steps: Sequence[Step]) -> None:
        self._loop = loop
        self._rnd = random.Random(f"run of members {seed}")
        self._steps = steps
        self.account = Account()
        self._schema = JudgedSchema(loop.time, self._rnd, self.account.wrong)
        self._server = Server(loop, self._schema, self._rnd)
        self._broker = SimKafka(loop, self._rnd, PARTITIONS, self._committed)
        self._is_calm = not any(isinstance(step, Fault) for step in steps)
        self._keys: dict[int, str] = {}
        """Of the messages that arrived."""
        self._seconds: dict[int, float] = {}
        self._failures: dict[int, int] = {}
        self._visits: dict[str, list[Visit]] = {}
        self.moved_at = 0.0
        """When something came forward last."""
        self._app = App("simulated", retry=BACKOFF)
        self._app.idempotent(type="t", destination="orders")(self._handle)

    def _note(self, text: str) -> None:
        self.account.trace.append(f"{self._loop.time():7.3f}  {text}")

    def _arrive(self, step: Arrive) -> None:
        self.moved_at = self._loop.time()
        for number in range(step.number, step.number + step.count):
            self._keys[number], self._seconds[number] = step.key, step.seconds
        if step.failures:
            self._failures[step.number] = step.failures
        for _ in range(1 + step.is_repeated):
            for number in range(step.number, step.number + step.count):
                headers = wire_headers(_envelope(number))
                spread_by = number if step.key == WIDE else int(step.key)
                self._broker.append(spread_by % PARTITIONS, step.key, b"%d" % number, headers)

    async def _handle(self, payload: bytes, call: Call) -> None:
        number = int(payload)
        self.moved_at = self._loop.time()
        self.account.handled[number] += 1
        visits = self._visits.setdefault(self._keys[number], [])
        visit = self._enter(visits, number)
        try:
            if self._seconds[number]:
                await asyncio.sleep(self._seconds[number])
            left = self._failures.get(number, 0)
            if left:
                self._failures[number] = left if left == FOR_EVER else left - 1
                raise Trouble
            self.account.effects.append(number)
            self.account.ended_at = self._loop.time()
        finally:
            visits.remove(visit)

    def _enter(self, visits: list[Visit], number: int) -> Visit:
        process = PROCESS.get()
        if process is None or process.owner is None:
            raise RuntimeError("a handler outside a member")
        visit = Visit(process, process.owner, number)
        wrong, schema, id_ = self.account.wrong, self._schema, id_of(number)
        for other in visits:
            if not other.process.is_dead and self._lives(other) and self._lives(visit):
                wrong.append(
                    f"two at once: {other.number} at {other.process.name}, {number} at {process.name}"
                )
        task = schema.tasks.get(id_)
        if task is not None and task.worker == visit.worker and schema.is_early(id_):
            wrong.append(f"before its time: {number} at {self._loop.time():.3f} s")
        visits.append(visit)
        return visit

    def _lives(self, visit: Visit) -> bool:
        return self._schema.lives(visit.worker, Transaction())

    def _committed(self, partition: int, before: int, offset: int) -> None:
        self.moved_at = self._loop.time()
        passed = {int(record.value) for record in self._broker.logs[partition][before:offset]}
        if early := sorted(number for number in passed if not self._schema.is_safe(id_of(number))):
            self.account.wrong.append(f"committed too early: {early}")

    def _states(self) -> dict[int, str]:
        tasks = self._schema.tasks
        return {
            number: tasks[id_of(number)].state if id_of(number) in tasks else "MISSING"
            for number in self._keys
        }

    def _is_complete(self) -> bool:
        is_read = all(
            self._broker.committed.get(partition, 0) == len(log)
            for partition, log in enumerate(self._broker.logs)
        )
        is_ended = all(state in FINAL for state in self._states().values())
        return is_read and is_ended and not (self._schema.gates or self._schema.running)

    def _judge(self) -> None:
        states, wrong = self._states(), self.account.wrong
        if left := {number: state for number, state in states.items() if state not in FINAL}:
            wrong.append(f"not ended: {left}")
        elif not self._is_complete():
            wrong.append(f"gates or offsets are left: {self._schema.gates} {self._broker.committed}")
        hopeless = {number for number, failures in self._failures.items() if failures == FOR_EVER}
        expected = {number: "DEAD" if number in hopeless else "SUCCEEDED" for number in states}
        if other := {n: state for n, state in states.items() if state in FINAL and state != expected[n]}:
            wrong.append(f"ended wrongly: {other}")
        if lost := sorted(states.keys() - hopeless - set(self.account.effects) - left.keys()):
            wrong.append(f"no effect: {lost}")
        if inverted := self._inverted(hopeless):
            wrong.append(f"out of order: {inverted}")
        if self._is_calm and (
            often := {n for n, count in Counter(self.account.effects).items() if count > 1}
        ):
            wrong.append(f"twice without a reason: {sorted(often)}")

    def _inverted(self, hopeless: set[int]) -> list[tuple[int, int]]:
        """Pairs of one key whose first effects are not in the order of their arrival."""
        last: dict[str, int] = {}
        inverted = []
        for number in dict.fromkeys(self.account.effects):
            if number not in hopeless and self._keys[number] != WIDE:
                before = last.setdefault(self._keys[number], number)
                if number < before:
                    inverted.append((before, number))
                last[self._keys[number]] = max(before, number)
        return inverted


def id_of(number: int) -> UUID:
    """The id of a message."""
    return UUID(int=1_000_000 + number)


def number_of(id_: UUID) -> int:
    """The message of an id."""
    return id_.int - 1_000_000


def _envelope(number: int) -> Envelope:
    return Envelope(
        message_id=id_of(number),
        type="t",
        source="/simulation",
        occurred_at=datetime.fromtimestamp(0, UTC),
        content_type="application/json",
        sequence=number + 1,
        installation="installation",
    )
