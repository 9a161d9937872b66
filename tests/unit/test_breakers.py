"""Breakers: when they open, who may probe, when they close."""

from typing import Any

import pytest

from towpath.app import App
from towpath.consumer.breakers import KEYS_TO_OPEN, STORM_WINDOW, Breakers
from towpath.context import Call
from towpath.failures import Failure
from towpath.messages import event

AWAY = Failure("retry", "connection")
OUTAGE = Failure("retry", "store_unavailable", "infrastructure")
BUG = Failure("retry", "type_error", max_attempts=2)


@event("crate.lifted", destination="crates")
class Lifted(bytes):
    pass


@event("crate.dropped", destination="crates")
class Dropped(bytes):
    pass


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breakers(clock: Clock) -> Breakers:
    app = App("docks")

    @app.idempotent(dependency="crane")
    async def lift(crate: Lifted, call: Call) -> None: ...

    @app.idempotent()
    async def drop(crate: Dropped, call: Call) -> None: ...

    return Breakers(app.handlers, clock)


def fail(breakers: Breakers, type_: str, keys: Any, failure: Failure) -> bool:
    opened = [breakers.note_failure(type_, object(), key, failure) for key in keys]
    return any(opened)


def test_it_opens_over_failures_of_several_keys(breakers: Breakers) -> None:
    """C14: a dependency that fails for everyone."""
    assert not fail(breakers, "crate.lifted", range(KEYS_TO_OPEN - 1), AWAY)
    assert breakers.admits("crate.lifted")
    assert fail(breakers, "crate.lifted", ["another"], AWAY)
    assert not breakers.admits("crate.lifted")
    assert breakers.admits("crate.dropped")


def test_one_key_alone_never_opens_it(breakers: Breakers) -> None:
    assert not fail(breakers, "crate.lifted", ["same"] * 50, AWAY)
    assert breakers.admits("crate.lifted")


def test_a_success_between_failures_starts_the_count_anew(breakers: Breakers) -> None:
    for key in range(50):
        assert not fail(breakers, "crate.lifted", [key], AWAY)
        assert breakers.note_success("crate.lifted") is None


def test_programming_errors_and_failures_of_one_message_do_not_count(breakers: Breakers) -> None:
    assert not fail(breakers, "crate.lifted", range(50), BUG)
    assert not fail(breakers, "crate.dropped", range(50), AWAY)
    assert fail(breakers, "crate.dropped", range(KEYS_TO_OPEN), OUTAGE)


def test_while_it_is_open_one_probe_at_a_time_starts(breakers: Breakers, clock: Clock) -> None:
    """C14: the next probe comes later and later."""
    fail(breakers, "crate.lifted", range(KEYS_TO_OPEN), AWAY)
    waits = []
    for _ in range(4):
        rest = breakers.seconds_until_probe("crate.lifted")
        waits.append(rest)
        clock.now += rest
        assert breakers.admits("crate.lifted")
        breakers.started("crate.lifted", "probe")
        assert not breakers.admits("crate.lifted")
        breakers.note_failure("crate.lifted", "probe", "probe", AWAY)
    assert waits[0] <= 1.0
    assert waits[-1] > waits[0]
    clock.now += 120
    breakers.started("crate.lifted", "probe")
    assert breakers.note_success("crate.lifted") is not None
    assert breakers.admits("crate.lifted")


def test_one_good_probe_lets_everything_start(breakers: Breakers, clock: Clock) -> None:
    """C14, D8: after many bad ones too, and after a storm: nobody waits for a second one."""
    for _ in range(STORM_WINDOW):
        breakers.note_death("crate.dropped", object(), "bad_crate")
    for _ in range(8):
        clock.now += breakers.seconds_until_probe("crate.dropped")
        breakers.started("crate.dropped", "probe")
        breakers.note_death("crate.dropped", "probe", "bad_crate")
        breakers.over("probe")
    clock.now += breakers.seconds_until_probe("crate.dropped")
    breakers.started("crate.dropped", "good")
    assert not breakers.admits("crate.dropped")
    assert breakers.note_success("crate.dropped") is not None
    assert breakers.admits("crate.dropped")
    assert not breakers.outlasted_a_probe("crate.dropped")
    assert breakers.closed_types() == []


def test_only_the_probe_tells_that_it_goes_on(breakers: Breakers, clock: Clock) -> None:
    """C14: what was under way when it opened neither frees the place of the probe nor counts as one."""
    fail(breakers, "crate.lifted", range(KEYS_TO_OPEN), AWAY)
    clock.now += 10
    breakers.started("crate.lifted", "probe")
    fail(breakers, "crate.lifted", ["late"], AWAY)
    clock.now += 10
    assert not breakers.admits("crate.lifted")
    assert not breakers.outlasted_a_probe("crate.lifted")
    breakers.note_failure("crate.lifted", "probe", "probe", AWAY)
    assert breakers.outlasted_a_probe("crate.lifted")
    clock.now += 10
    assert breakers.admits("crate.lifted")


def test_a_lost_probe_is_given_up(breakers: Breakers, clock: Clock) -> None:
    fail(breakers, "crate.lifted", range(KEYS_TO_OPEN), AWAY)
    clock.now += 10
    breakers.started("crate.lifted", "probe")
    assert not breakers.admits("crate.lifted")
    clock.now += 400
    assert breakers.admits("crate.lifted")


def test_failures_are_free_only_while_it_is_open(breakers: Breakers) -> None:
    assert breakers.waits("crate.lifted", AWAY) is None
    fail(breakers, "crate.lifted", range(KEYS_TO_OPEN), AWAY)
    assert breakers.waits("crate.lifted", AWAY) is not None
    assert breakers.waits("crate.lifted", BUG) is None


def test_a_storm_of_one_reason_opens_the_handler(breakers: Breakers) -> None:
    """D8: most of the last ends died of one reason."""
    opened = [breakers.note_death("crate.dropped", object(), "bad_crate") for _ in range(STORM_WINDOW)]
    assert opened[:-1] == [None] * (STORM_WINDOW - 1)
    assert opened[-1] is not None
    assert opened[-1].reason == "storm:bad_crate"
    assert breakers.admits("crate.lifted")


def test_a_minority_of_deaths_is_no_storm(breakers: Breakers) -> None:
    for number in range(3 * STORM_WINDOW):
        if number % 3 == 0:
            assert breakers.note_death("crate.dropped", object(), "bad_crate") is None
        else:
            breakers.note_success("crate.dropped")


def test_a_probe_that_ends_without_a_word_on_its_dependency_lets_the_next_one_start(
    breakers: Breakers, clock: Clock
) -> None:
    """C14: it was snoozed, cancelled or handed back; nobody waits for a handler's timeout."""
    fail(breakers, "crate.lifted", range(KEYS_TO_OPEN), AWAY)
    clock.now += 60
    breakers.started("crate.lifted", "first")
    assert not breakers.admits("crate.lifted")
    breakers.over("somebody else")
    assert not breakers.admits("crate.lifted")
    breakers.over("first")
    assert breakers.admits("crate.lifted")
    breakers.started("crate.lifted", "second")
    breakers.over("first")
    assert not breakers.admits("crate.lifted")
