"""From a failure to what happens next."""

import random
from datetime import timedelta

import pytest

from towpath.backoff import RetryPolicy
from towpath.consumer.policy import UNKNOWN_TYPE, Decision, End, Wait, decide
from towpath.failures import Failure
from towpath.states import TaskState, WaitingFor

POLICY = RetryPolicy(attempts=4, max_age="1h", base="1s", cap="1m")


def decision(
    failure: Failure, *, before: int = 0, tries: int = 1, age: timedelta = timedelta(0), version: int = 1
) -> Decision:
    return decide(
        failure,
        POLICY,
        attempts_before=before,
        version=version,
        tries=tries,
        age=age,
        rng=random.Random(1),
    )


def test_a_failure_waits_while_attempts_are_left() -> None:
    """C12."""
    waits = decision(Failure("retry", "boom"), before=2)
    assert isinstance(waits, Wait)
    assert (waits.waiting_for, waits.spent, waits.counts_towards_age) == (WaitingFor.RETRY, 1, True)
    assert timedelta(seconds=1) <= waits.delay <= timedelta(seconds=8)


@pytest.mark.parametrize(("before", "tries"), [(3, 1), (1, 3), (0, 9), (7, 1)])
def test_the_last_attempt_is_the_end(before: int, tries: int) -> None:
    """C12: tries in place count."""
    assert decision(Failure("retry", "boom"), before=before, tries=tries) == End(TaskState.DEAD, tries)


def test_age_ends_it_whatever_attempts_are_left() -> None:
    """C12."""
    assert decision(Failure("retry", "boom"), age=timedelta(hours=1)) == End(TaskState.DEAD, 1)


def test_a_failure_that_hardly_ever_gets_better_has_fewer_attempts() -> None:
    failure = Failure("retry", "type_error", max_attempts=2)
    assert isinstance(decision(failure), Wait)
    assert decision(failure, before=1) == End(TaskState.DEAD, 1)


def test_its_own_bound_never_raises_that_of_the_policy() -> None:
    assert decision(Failure("retry", "boom", max_attempts=99), before=3) == End(TaskState.DEAD, 1)


def test_a_rejection_is_final() -> None:
    """A4."""
    assert decision(Failure("reject", "too_heavy")) == End(TaskState.FAILED, 1)


def test_hopeless_is_dead_at_once() -> None:
    assert decision(Failure("dead", "not_json"), tries=0) == End(TaskState.DEAD, 0)


def test_a_deadline_that_passed_expires_it() -> None:
    """C12: it beats attempts and age."""
    assert decision(Failure("dead", "deadline_passed")) == End(TaskState.EXPIRED, 1)


def test_a_snooze_waits_as_long_as_it_asked_and_spends_nothing() -> None:
    failure = Failure("snooze", "busy", retry_after=timedelta(days=3), is_free=True)
    expected = Wait(timedelta(days=3), WaitingFor.SNOOZE, 0, counts_towards_age=False)
    assert decision(failure, before=99, age=timedelta(days=9)) == expected


def test_a_snooze_of_no_time_at_all_is_one() -> None:
    failure = Failure("snooze", "busy", retry_after=timedelta(0), is_free=True)
    waits = decision(failure)
    assert isinstance(waits, Wait)
    assert waits.delay == timedelta(0)


@pytest.mark.parametrize("scope", ["infrastructure", "configuration"])
def test_what_is_not_the_messages_fault_spends_neither_attempts_nor_age(scope: str) -> None:
    """C13, C22."""
    failure = Failure("retry", "away", scope=scope)  # type: ignore[arg-type]
    waits = decision(failure, before=99, age=timedelta(days=9))
    assert isinstance(waits, Wait)
    assert (waits.spent, waits.counts_towards_age) == (0, False)


def test_the_wait_for_a_dependency_grows_with_its_moves() -> None:
    """C4: no hot loop during an outage."""
    failure = Failure("retry", "away", scope="infrastructure")
    longest = [
        max(
            decide(
                failure, POLICY, attempts_before=0, version=version, tries=1, age=timedelta(0), rng=rng
            ).delay  # type: ignore[union-attr]
            for rng in map(random.Random, range(50))
        )
        for version in (1, 5, 9, 1000)
    ]
    assert longest == sorted(longest)
    assert longest[0] <= timedelta(seconds=1)
    assert timedelta(seconds=30) < longest[-1] <= timedelta(minutes=1)


def test_an_unknown_type_is_held_but_grows_old() -> None:
    """A rolling deploy may still bring its handler; its age is what ends the hope."""
    waits = decision(Failure("retry", UNKNOWN_TYPE, scope="configuration"), before=99)
    assert isinstance(waits, Wait)
    assert (waits.spent, waits.counts_towards_age) == (0, True)


def test_the_loser_of_a_race_spends_nothing_but_age_bounds_it() -> None:
    """C17."""
    failure = Failure("retry", "sqlstate_40001", in_place=True, is_free=True)
    waits = decision(failure, before=3, tries=0)
    assert isinstance(waits, Wait)
    assert waits.spent == 0
    assert decision(failure, age=timedelta(hours=2)) == End(TaskState.DEAD, 0)


def test_a_retry_after_is_a_floor() -> None:
    """C12."""
    waits = decision(Failure("retry", "http_429", retry_after=timedelta(minutes=5)))
    assert isinstance(waits, Wait)
    assert waits.delay >= timedelta(minutes=5)
