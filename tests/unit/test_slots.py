"""Slots: what may run at once, and who waits for whom."""

import asyncio
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest

from towpath.app import App
from towpath.consumer.slots import Slots, setting_problems
from towpath.context import Batch, Tx
from towpath.messages import event
from towpath.settings import WorkerSettings


@event("slots.plain", destination="slots")
@dataclass(frozen=True)
class Plain:
    number: int = 0


@event("slots.narrow", destination="slots")
@dataclass(frozen=True)
class Narrow:
    number: int = 0


@event("slots.stored", destination="slots")
@dataclass(frozen=True)
class Stored:
    number: int = 0


@event("slots.kept", destination="slots")
@dataclass(frozen=True)
class Kept:
    number: int = 0


@event("slots.counted", destination="slots")
@dataclass(frozen=True)
class Counted:
    number: int = 0


def group() -> App:
    app = App("slots")

    @app.idempotent()
    async def plain(message: Plain) -> None: ...

    @app.idempotent(concurrency=2)
    async def narrow(message: Narrow) -> None: ...

    @app.transactional()
    async def stored(message: Stored, tx: Tx) -> None: ...

    @app.transactional(concurrency=3)
    async def kept(message: Kept, tx: Tx) -> None: ...

    @app.batch(max_size=4)
    async def counted(batch: Batch[Counted], tx: Tx) -> None: ...

    return app


class Board(Slots):
    """Slots and their two signals."""

    def __init__(self, **changes: Any) -> None:
        self.wakes, self.wakes_due = asyncio.Event(), asyncio.Event()
        settings = WorkerSettings(**({"concurrency": 8, "sessions": 4} | changes))
        super().__init__(group().handlers, settings, wake=self.wakes, wake_due=self.wakes_due)

    def fill(self, type_: str) -> int:
        """As many as there are slots."""
        count = 0
        while self.obstacle(type_) is None:
            self.take(type_)
            count += 1
        return count

    def fill_due(self, type_: str) -> int:
        """The same from the database."""
        count = 0
        while self.has_due(type_):
            self.take_due(type_)
            count += 1
        return count


@pytest.mark.parametrize(
    ("type_", "count"),
    [("plain", 8), ("narrow", 2), ("stored", 4), ("kept", 3), ("counted", 8), ("unheard_of", 8)],
)
def test_each_kind_has_its_bound(type_: str, count: int) -> None:
    """A handler's own; the sessions for transactional ones; two batches; the worker's for all others."""
    assert Board().fill(f"slots.{type_}") == count


def test_what_has_no_slot_takes_none_from_others() -> None:
    board = Board()
    board.fill("slots.narrow")
    board.fill("slots.stored")
    assert board.fill("slots.plain") == 2, "8 at once, of which 2 and 4 are taken"
    assert board.fill("slots.counted") == 8, "batches have room of their own"


def test_transactional_handlers_share_the_sessions() -> None:
    board = Board()
    board.fill("slots.kept")
    assert board.fill("slots.stored") == 1


def test_a_slot_that_is_given_back_is_there_again_and_wakes_who_waits() -> None:
    board = Board()
    board.fill("slots.kept")
    assert not board.wakes.is_set()
    board.give_back("slots.kept")
    assert board.wakes.is_set()
    assert not board.wakes_due.is_set()
    assert board.fill("slots.kept") == 1


def test_work_from_the_database_has_slots_beside_those_of_the_broker() -> None:
    board = Board()
    board.fill("slots.plain")
    assert (board.due_room, board.fill_due("slots.plain"), board.due_room) == (2, 2, 0)
    board.give_back_due("slots.plain")
    assert board.due_room == 1


def test_what_the_broker_leaves_unused_is_lent_to_the_database_up_to_a_half() -> None:
    board = Board()
    assert board.fill_due("slots.plain") == 2 + 4
    assert board.fill("slots.plain") == 4, "and counts against the worker's as long as it is out"
    assert board.due_room == 0
    for _ in range(3):
        board.give_back_due("slots.plain")
    assert board.due_room == 2 + 4 - 3
    assert board.fill("slots.plain") == 3
    assert board.due_room == 0, "the last one borrowed is still out"
    board.give_back_due("slots.plain")
    assert board.fill("slots.plain") == 1


def test_a_bound_of_a_kind_holds_over_both() -> None:
    board = Board()
    board.fill("slots.narrow")
    assert not board.has_due("slots.narrow")
    assert board.full_types() == ["slots.narrow"]


def test_a_backlog_at_the_broker_does_not_keep_the_database_waiting() -> None:
    """The next slot that frees is promised to it, for one look."""
    board = Board()
    board.fill("slots.narrow")
    board.redeem(board.promise())
    board.give_back("slots.narrow")
    assert board.wakes_due.is_set()
    assert board.obstacle("slots.narrow") is not None
    promised = board.promise()
    assert board.obstacle("slots.narrow") is not None, "until it has looked"
    assert board.fill_due("slots.narrow") == 1
    board.redeem(promised)
    board.give_back_due("slots.narrow")
    assert board.fill("slots.narrow") == 1


@pytest.mark.parametrize("is_looked", [True, False])
def test_a_promise_that_is_not_needed_is_given_up(is_looked: bool) -> None:
    board = Board()
    board.fill("slots.narrow")
    board.redeem(board.promise())
    board.give_back("slots.narrow")
    if is_looked:
        board.redeem(board.promise())
    else:
        board.break_promises()
    assert board.obstacle("slots.narrow") is None


def test_more_concurrency_than_sessions_is_a_mistake_that_says_what_to_do() -> None:
    handlers = group().handlers
    assert setting_problems(handlers, WorkerSettings(sessions=3)) == []
    (problem,) = setting_problems(handlers, WorkerSettings(sessions=2))
    assert problem == (
        "kept: concurrency=3 needs as many database sessions, TOWPATH_WORKER__SESSIONS is 2: "
        "raise it, or lower the concurrency"
    )


def test_a_batch_is_not_collected_for_as_long_as_what_runs_is_taken_for_harmless() -> None:
    """D5: a message whose worker may have died by it would begin beside collected ones that seem old."""
    app = App("slots")

    @app.batch(max_wait="30s")
    async def counted(messages: Batch[Counted], tx: Tx) -> None: ...

    assert setting_problems(app.handlers, WorkerSettings(quiet=timedelta(seconds=31))) == []
    (problem,) = setting_problems(app.handlers, WorkerSettings())
    assert problem == (
        "counted: max_wait=30s must be less than TOWPATH_WORKER__QUIET, 30s: lower it, or raise that"
    )


def test_more_is_claimed_than_runs_where_handlers_are_quick() -> None:
    """As many as begin within a twentieth of a second, and at most as many again as there are slots."""
    board = Board()
    assert board.fill("slots.plain") == 8, "nothing is known yet"
    for seconds, ahead in ((1.0, 0), (0.1, 4), (0.01, 8), (0.0, 8)):
        board = Board()
        board.took(seconds)
        assert board.fill("slots.narrow") == 2
        assert board.fill("slots.plain") + 2 == 8 + ahead
        assert board.due_room == 2, "nothing is left to lend"


async def test_what_was_claimed_ahead_begins_when_there_is_a_slot_in_its_order() -> None:
    board, begun = Board(concurrency=2), list[int]()

    async def begin(number: int) -> None:
        await board.enter()
        begun.append(number)

    tasks = [asyncio.create_task(begin(number)) for number in range(6)]
    await asyncio.sleep(0)
    assert begun == [0, 1]
    tasks[2].cancel()
    board.leave()
    tasks[3].cancel()  # it has its turn already, and does not take it
    await asyncio.wait(tasks[2:5])
    assert begun == [0, 1, 4]
    board.enter_at_once()  # one that began without asking
    board.leave()
    await asyncio.sleep(0)
    assert begun == [0, 1, 4]
    board.leave()
    await asyncio.wait(tasks)
    assert begun == [0, 1, 4, 5]


async def test_what_was_claimed_ahead_waits_for_slots_that_the_database_borrowed() -> None:
    board = Board(concurrency=2)
    assert board.fill_due("slots.plain") == 1 + 1
    await board.enter()
    second = asyncio.create_task(board.enter())
    await asyncio.sleep(0)
    assert not second.done()
    board.give_back_due("slots.plain")
    await second
