"""Batches go on without a message that is taken back, however bad the moment."""

import asyncio
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, cast
from uuid import uuid4

from towpath.consumer.batches import Batches
from towpath.consumer.effects.executions import Committed
from towpath.consumer.roster import Roster
from towpath.consumer.runs import Phase, Run
from towpath.handlers import BatchLimits
from towpath.states import TaskState
from towpath.store.work import Work
from towpath.telemetry.tracing import process_span


class Office:
    """Stands for everything around the batches, and owns the runs."""

    type = "parcel.posted"

    def __init__(self) -> None:
        self.ended_runs: list[Run] = []
        self.committed_first = asyncio.Event()
        self.may_go_on = asyncio.Event()
        self.committed_runs: list[Run] = []

    def begin(self, run: Run) -> None:
        run.phase, run.began_at = Phase.HANDLING, 1.0
        run.span = process_span(
            (), destination="parcels", group="g", message_id=run.work.id, type_="t", attempt=1, run_no=0
        )

    def member(self, work: Work) -> Work:
        return work

    async def execute_batch(
        self, _: object, members: Sequence[Work], became: Callable[[Sequence[Work], object], None]
    ) -> None:
        """One by one, as after a failure, with a pause behind the first."""
        for member in members:
            became([member], Committed(TaskState.SUCCEEDED, 0))
            self.committed_first.set()
            await self.may_go_on.wait()

    def committed(self, runs: Sequence[Run], _: int) -> None:
        self.committed_runs += runs

    def ended(self, runs: Sequence[Run]) -> None:
        self.ended_runs += runs


def office_with_batches(count: int) -> tuple[Office, Roster, list[Run]]:
    """A batch that is full and about to start."""
    office, roster = Office(), Roster("g", cast("Any", None), cast("Any", None))
    batches = Batches(cast("Any", office), cast("Any", office), roster)
    works = [Work(uuid4(), "t", "event", "parcels", None, None, n, b"", "", (), None) for n in range(count)]
    runs = [Run(work, cast("Any", office), None, 0.0) for work in works]
    for run in runs:
        batches.add(cast("Any", office), BatchLimits(count, timedelta(minutes=1)), run)
    return office, roster, runs


async def test_a_message_that_is_handed_back_as_its_batch_starts_ends_no_worker() -> None:
    """S1: a partition leaves in the turn of the loop in which the batch became full."""
    office, roster, runs = office_with_batches(2)
    office.may_go_on.set()
    assert runs[0].hand_back()
    await roster.finish(10)
    assert not roster.broke.done()
    assert [runs[1]] == office.committed_runs
    assert {*runs} == {*office.ended_runs}


async def test_a_member_that_is_committed_is_not_cancelled_with_those_still_to_be_tried() -> None:
    """C17: nor can a late request to cancel or hand it back stop the others of its batch."""
    office, roster, runs = office_with_batches(3)
    await office.committed_first.wait()
    roster.cancel(runs[0].work.id)
    assert not runs[0].hand_back()
    office.may_go_on.set()
    await roster.finish(10)
    assert runs == office.committed_runs
