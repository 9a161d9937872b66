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


@pytest.mark.parametrize(("seconds", "ahead"), [(1.0, 0), (0.1, 4), (0.01, 8), (0.0, 8)])
def test_more_is_claimed_than_runs_where_handlers_are_quick(seconds: float, ahead: int) -> None:
    """As many as begin within a twentieth of a second, and at most as many again as there are slots."""
    board = Board()
    assert board.fill("slots.plain") == 8, "nothing is known yet"
    board = Board()
    board.took("slots.plain", seconds)
    assert board.fill("slots.narrow") == 2, "nothing is known of it"
    assert board.fill("slots.plain") + 2 == 8 + ahead
    assert board.due_room == 2, "nothing is left to lend"


def test_of_a_kind_with_slots_of_its_own_more_is_claimed_by_its_own_time() -> None:
    """A session is used by all that are transactional; a handler that is slow has only what it runs."""
    board = Board(concurrency=20)
    board.took("slots.stored", 0.01)
    board.took("slots.narrow", 3.0)
    assert board.fill("slots.kept") == 3
    assert board.fill("slots.stored") == 4 + 4 - 3
    assert board.fill("slots.narrow") == 2


def test_what_is_claimed_ahead_does_not_take_the_slot_that_is_promised() -> None:
    """C4: the database looks as soon as there is one."""
    board = Board()
    board.took("slots.narrow", 0.01)
    assert board.fill("slots.narrow") == 4
    board.redeem(board.promise())
    board.wakes_due.clear()
    for _ in range(2):
        board.give_back("slots.narrow")
        assert not board.has_due("slots.narrow")
        assert board.obstacle("slots.narrow") is not None
        assert not board.wakes_due.is_set(), "it would look in vain"
    board.give_back("slots.narrow")
    assert board.wakes_due.is_set()
    assert board.fill_due("slots.narrow") == 1


class Begun(list[str]):
    """What has a slot, by name."""

    def __init__(self, board: Board) -> None:
        super().__init__()
        self._board = board
        self.given_up: set[str] = set()

    def enter(self, type_: str, name: str) -> bool:
        """Whether it began at once."""

        def begin() -> bool:
            if name in self.given_up:
                return False
            self.append(name)
            return True

        return self._board.enter(f"slots.{type_}", begin)


def test_what_was_claimed_ahead_begins_when_there_is_a_slot_in_its_order() -> None:
    """One that was given up meanwhile does not take its turn."""
    board = Board(concurrency=2)
    begun = Begun(board)
    assert [begun.enter("plain", name) for name in "abcde"] == [True, True, False, False, False]
    begun.given_up.add("c")
    board.leave("slots.plain")
    assert begun == ["a", "b", "d"]
    board.enter_at_once("slots.plain")  # one that began without asking
    board.leave("slots.plain")
    assert begun == ["a", "b", "d"]
    board.leave("slots.plain")
    assert begun == ["a", "b", "d", "e"]


def test_what_was_claimed_ahead_waits_for_slots_of_its_own_and_holds_up_nobody() -> None:
    """Never more than its concurrency run, nor more transactional ones than there are sessions."""
    board = Board(concurrency=6)
    begun = Begun(board)
    assert [begun.enter("narrow", f"n{number}") for number in range(4)] == [True, True, False, False]
    assert [begun.enter("kept", f"k{number}") for number in range(4)] == [True, True, True, False]
    assert begun.enter("stored", "s")
    assert not begun.enter("plain", "p"), "six run"
    board.leave("slots.kept")
    assert begun[-1] == "k3", "it came before"
    board.leave("slots.narrow")
    assert begun[-1] == "n2"
    board.leave("slots.stored")
    assert begun[-1] == "p", "another narrow one would be the third"
    board.leave("slots.narrow")
    assert begun[-1] == "n3"


def test_what_the_database_runs_counts_among_the_slots_of_a_kind() -> None:
    board = Board()
    begun = Begun(board)
    assert board.fill_due("slots.narrow") == 2
    assert not begun.enter("narrow", "n")
    board.give_back_due("slots.narrow")
    assert begun == ["n"]


def test_what_was_claimed_ahead_waits_for_slots_that_the_database_borrowed() -> None:
    board = Board(concurrency=2)
    begun = Begun(board)
    assert board.fill_due("slots.plain") == 1 + 1
    assert [begun.enter("plain", name) for name in "ab"] == [True, False]
    board.give_back_due("slots.plain")
    assert begun == ["a", "b"]
