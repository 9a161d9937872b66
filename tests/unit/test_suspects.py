"""Suspects: how many messages whose worker died may run together, and how the last start is watched."""

import pytest

from towpath.consumer.suspects import Suspects


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def suspects(clock: Clock) -> Suspects:
    return Suspects(concurrency=64, max_deliveries=5, quiet_seconds=30, clock=clock)


def test_fewer_run_together_the_more_often_their_worker_died(suspects: Suspects) -> None:
    """C19: 64 handlers, then 16, 4 and 1 at a time."""
    assert [64, 16, 4, 1] == [suspects.limit(start) for start in (1, 2, 3, 4)]


def test_at_the_limit_the_next_one_waits_until_one_ended(clock: Clock) -> None:
    suspects = Suspects(concurrency=8, max_deliveries=5, quiet_seconds=30, clock=clock)
    assert suspects.may_start(2, 30, "broker")
    began_at = suspects.started(2)
    assert suspects.may_start(2, 31, "broker")
    suspects.started(2)
    assert not suspects.may_start(2, 32, "broker")
    assert suspects.may_start(3, 32, "broker")
    suspects.ended(2, began_at)
    assert suspects.may_start(2, 31, "broker")
    assert not suspects.wants_quiet()


def test_what_is_being_claimed_counts_as_running(clock: Clock) -> None:
    """C19: several may be claimed together, by both who ask, before the first of them runs."""
    suspects = Suspects(concurrency=8, max_deliveries=5, quiet_seconds=30, clock=clock)
    assert suspects.may_start(2, 30, "broker")
    with suspects.claiming(2):
        assert suspects.may_start(2, 30, "database")
        with suspects.claiming(2):
            assert not suspects.may_start(2, 30, "broker")
        assert suspects.may_start(2, 30, "broker")


@pytest.mark.parametrize("start", [1, 2, 4])
def test_the_last_permitted_start_is_claimed_beside_no_other_claim(suspects: Suspects, start: int) -> None:
    """C19, D5: neither after somebody who is being claimed, nor before."""
    with suspects.claiming(start), suspects.look("database"):
        assert not suspects.may_start(5, 0, "database")
    assert suspects.wants_quiet(), "it waits for its turn"
    with suspects.look("database"):
        assert suspects.may_start(5, 0, "database")
        with suspects.claiming(5):
            assert suspects.wants_quiet()
            assert not suspects.may_start(start, 0, "broker")
    assert not suspects.wants_quiet(), "somebody else was quicker"


@pytest.mark.parametrize("start", [1, 2, 4])
def test_nobody_starts_while_a_last_start_waits_or_is_watched(
    suspects: Suspects, clock: Clock, start: int
) -> None:
    """C19, D5: whatever starts beside it may kill it. What has run for long keeps nobody waiting."""
    with suspects.look("database"):
        assert not suspects.may_start(5, 3, "database")
    assert not suspects.may_start(start, 3, "broker")
    with suspects.look("database"):
        assert suspects.may_start(5, 0, "database")
        suspects.started(5)
    clock.now += 29
    assert not suspects.may_start(start, 1, "broker")
    clock.now += 1
    assert suspects.may_start(start, 0, "broker")


def test_the_last_permitted_start_runs_beside_none_that_began_of_late(suspects: Suspects) -> None:
    """C19: it asks for quiet, starts when nothing young runs, and keeps the quiet until it ended."""
    assert not suspects.may_start(5, 3, "broker")
    assert suspects.wants_quiet()
    with suspects.look("broker"):
        assert suspects.may_start(5, 0, "broker")
        began_at = suspects.started(5)
    assert suspects.wants_quiet()
    with suspects.look("broker"):
        assert not suspects.may_start(5, 1, "broker")
    with suspects.look("broker"):
        suspects.ended(5, began_at)
    assert not suspects.wants_quiet()


def test_a_last_start_that_runs_for_long_does_not_keep_the_others_waiting(
    suspects: Suspects, clock: Clock
) -> None:
    """C19: what has run as long as the quiet lasts is taken for harmless."""
    assert suspects.may_start(5, 0, "broker")
    suspects.started(5)
    clock.now += 29
    assert suspects.wants_quiet()
    clock.now += 1
    assert not suspects.wants_quiet()


def test_the_end_of_one_that_is_trusted_does_not_end_the_watch_over_the_next(
    suspects: Suspects, clock: Clock
) -> None:
    first = suspects.started(5)
    clock.now += 40
    second = suspects.started(5)
    suspects.ended(5, first)
    assert suspects.wants_quiet()
    suspects.ended(5, second)
    assert not suspects.wants_quiet()


def test_many_last_starts_take_turns_with_everybody_else(suspects: Suspects, clock: Clock) -> None:
    """C19: they run one after another, and half of the time belongs to the others."""
    quiet = busy = 0
    for _ in range(600):
        with suspects.look("broker"):
            may_start = suspects.may_start(5, 0, "broker")
        if may_start:
            began_at = suspects.started(5)
            clock.now += 1
            assert not suspects.may_start(3, 1, "broker")
            suspects.ended(5, began_at)
            quiet += 1
        else:
            assert suspects.may_start(3, 0, "broker")
            clock.now += 1
            busy += 1
    assert quiet == pytest.approx(busy, abs=35)


def test_a_last_start_that_went_elsewhere_keeps_nobody_waiting(suspects: Suspects) -> None:
    """S1: its partition was revoked, or another member took it."""
    assert not suspects.may_start(5, 3, "broker")
    assert not suspects.may_start(5, 3, "database")
    with suspects.look("broker"):
        pass
    assert suspects.wants_quiet()
    with suspects.look("database"):
        pass
    assert not suspects.wants_quiet()


def test_the_quiet_holds_while_the_one_who_asked_for_it_looks_again(suspects: Suspects, clock: Clock) -> None:
    """C19: a last start in the database gets its turn, however often the broker's side looks meanwhile."""
    with suspects.look("database"):
        assert not suspects.may_start(5, 3, "database")
    clock.now += 10
    with suspects.look("database"):
        assert suspects.wants_quiet()
        assert not suspects.may_start(5, 1, "database")
    clock.now += 10
    with suspects.look("database"):
        assert suspects.wants_quiet()
        assert suspects.may_start(5, 0, "database")


def test_beyond_the_last_start_it_only_has_to_be_buried(suspects: Suspects) -> None:
    assert suspects.may_start(6, 64, "broker")
    assert not suspects.wants_quiet()


def test_where_one_start_is_all_nobody_is_suspected(clock: Clock) -> None:
    suspects = Suspects(concurrency=64, max_deliveries=1, quiet_seconds=30, clock=clock)
    with suspects.claiming(1):
        assert suspects.may_start(1, 1, "database")
    suspects.started(1)
    assert not suspects.wants_quiet()
