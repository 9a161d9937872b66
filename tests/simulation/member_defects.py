"""Ways for members to break the promise, planted into the engine or into the rules of its statements."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final
from uuid import UUID

from tests.simulation.claiming import ClaimSchema
from tests.simulation.relay_defects import Defect, Patch
from tests.simulation.rows import Record, Task
from tests.simulation.settling import TaskSchema
from tests.simulation.tasks import WorkSchema
from towpath.backoff import RetryPolicy
from towpath.brokers.kafka.assignments import Assignments
from towpath.brokers.watermark import Watermark
from towpath.consumer.lanes import Lanes, Received
from towpath.consumer.membership import Membership
from towpath.consumer.roster import Roster
from towpath.consumer.running import Runner
from towpath.errors import LeaseLost, StoreUnavailable
from towpath.store import settles
from towpath.store.claims import ClaimStore
from towpath.store.work import Work


def a_gap_is_committed(patch: Patch) -> None:
    """The offset goes to the highest message received, not to the first that is not settled."""
    patch.setattr(
        Watermark,
        "position",
        property(lambda self: None if self._highest is None else self._highest + 1),
    )


def what_is_released_is_not_read_again(patch: Patch) -> None:
    release = Assignments.release

    def nowhere(self: Assignments, deliveries: Any) -> dict[Any, int]:
        release(self, deliveries)
        return {}

    patch.setattr(Assignments, "release", nowhere)


def what_somebody_else_runs_is_acknowledged(patch: Patch) -> None:
    patch.setattr(Runner, "may_acknowledge", lambda *_: True)


def parked_messages_are_forgotten(patch: Patch) -> None:
    async def forget(_: ClaimStore, __: object, works: Sequence[Work]) -> set[UUID]:
        return {work.id for work in works}

    patch.setattr(ClaimStore, "_park", forget)


def gates_are_not_looked_for(patch: Patch) -> None:
    patch.setattr(WorkSchema, "lock_gates", lambda *_: [])


def a_failure_closes_no_gate(patch: Patch) -> None:
    async def no_gate(*_: object) -> bool:
        return True

    patch.setattr(settles, "hold", no_gate)


def the_wrong_follower_is_promoted(patch: Patch) -> None:
    parked = WorkSchema.parked
    patch.setattr(WorkSchema, "parked", lambda *arguments: parked(*arguments)[::-1])


def a_key_has_no_lane(patch: Patch) -> None:
    """What came of one key is claimed in any order, whatever its gate says."""
    add = Lanes.add

    def alone(self: Lanes, received: Received) -> None:
        lane, received.work.lane = received.work.lane, None
        add(self, received)
        received.work.lane = lane

    patch.setattr(Lanes, "add", alone)


def a_lane_runs_several(patch: Patch) -> None:
    """As without the unique index."""

    def unchecked(self: WorkSchema, x: Any, task: Task) -> Task:
        self.xid(x)
        x.put(self.tasks, task.id, task)
        return task

    patch.setattr(WorkSchema, "write", unchecked)
    patch.setattr(WorkSchema, "is_lane_busy", lambda *_: False)


def a_settle_needs_no_token(patch: Patch) -> None:
    """And a worker whose lease has lapsed goes on, so that it comes to that."""

    async def go_on(self: Membership) -> None:
        while True:
            await asyncio.sleep(self._beat_seconds)
            with suppress(LeaseLost, StoreUnavailable):
                await self._store.beat()

    patch.setattr(Membership, "run", go_on)
    patch.setattr(
        TaskSchema,
        "_claimed",
        lambda self, x, ids, _: list(self.matching(x, ids, lambda task: task.state == "RUNNING")),
    )


def leases_are_not_looked_at(patch: Patch) -> None:
    """Whoever is given a message takes it over from a worker that lives."""
    states = ClaimSchema.states

    def nobody_lives(self: ClaimSchema, *arguments: Any) -> list[Record]:
        return [row | {"worker_is_alive": False} for row in states(self, *arguments)]

    def free(_: ClaimSchema, __: object, task: Task, *, takes_over: bool = True) -> bool:
        is_running = task.state == "RUNNING"
        return task.held_by == "broker" and (
            (task.state == "ACCEPTED" and (takes_over or not task.deliveries)) or (takes_over and is_running)
        )

    patch.setattr(ClaimSchema, "states", nobody_lives)
    patch.setattr(ClaimSchema, "_is_free", free)


def a_repeat_starts_what_is_done(patch: Patch) -> None:
    is_free = ClaimSchema._is_free
    patch.setattr(
        ClaimSchema,
        "_is_free",
        lambda self, x, task, **how: task.state == "SUCCEEDED" or is_free(self, x, task, **how),
    )


def a_retry_does_not_wait(patch: Patch) -> None:
    patch.setattr(RetryPolicy, "delay", lambda *_, **__: timedelta(0))


def a_retry_waits_longer_than_its_law(patch: Patch) -> None:
    delay = RetryPolicy.delay
    patch.setattr(RetryPolicy, "delay", lambda self, spent, **more: 2 * delay(self, spent, **more))


def due_times_are_not_looked_at(patch: Patch) -> None:
    patch.setattr(ClaimSchema, "_is_due", lambda _, task: task.state == "WAITING")


def nobody_takes_back_what_a_dead_worker_left(patch: Patch) -> None:
    patch.setattr(TaskSchema, "abandoned", lambda *_: [])
    patch.setattr(TaskSchema, "abandoned_anywhere", lambda *_: [])


def claims_without_an_answer_are_left(patch: Patch) -> None:
    async def nothing(_: Roster) -> int:
        return 0

    patch.setattr(Roster, "hand_back_strays", nothing)


DEFECTS: Final = {
    plant.__name__.replace("_", " "): Defect(plant, shows)
    for plant, shows in {
        a_gap_is_committed: ("committed too early",),
        what_is_released_is_not_read_again: ("not ended", "gates or offsets are left"),
        what_somebody_else_runs_is_acknowledged: ("committed too early",),
        parked_messages_are_forgotten: ("committed too early", "not ended"),
        gates_are_not_looked_for: ("out of order",),
        a_failure_closes_no_gate: ("out of order",),
        the_wrong_follower_is_promoted: ("out of order",),
        a_key_has_no_lane: ("out of order",),
        a_lane_runs_several: ("two at once",),
        a_settle_needs_no_token: ("settled by another",),
        leases_are_not_looked_at: ("two at once",),
        a_repeat_starts_what_is_done: ("ended twice",),
        a_retry_does_not_wait: ("no back-off",),
        a_retry_waits_longer_than_its_law: ("no back-off",),
        due_times_are_not_looked_at: ("before its time",),
        nobody_takes_back_what_a_dead_worker_left: ("not ended",),
        claims_without_an_answer_are_left: ("not ended",),
    }.items()
}
