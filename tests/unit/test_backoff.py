"""Durations and delays; no clock is involved."""

import random
from datetime import timedelta

import pytest

from towpath.backoff import RetryPolicy, parse_duration


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("250ms", 0.25),
        ("90s", 90),
        ("5m", 300),
        ("24h", 86400),
        ("7d", 604800),
        ("1h30m", 5400),
        ("1.5s", 1.5),
        (" 10s ", 10),
        ("0s", 0),
    ],
)
def test_durations_are_read_from_text(text: str, seconds: float) -> None:
    assert parse_duration(text) == timedelta(seconds=seconds)


def test_a_timedelta_is_taken_as_it_is() -> None:
    assert parse_duration(timedelta(minutes=2)) == timedelta(minutes=2)


@pytest.mark.parametrize("text", ["", " ", "5", "m", "5 m", "-5s", "5x", "5s!", "1e3s", "soon", "5m garbage"])
def test_malformed_text_is_refused_and_shown(text: str) -> None:
    with pytest.raises(ValueError, match="cannot read") as caught:
        parse_duration(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("value", [5, 5.0, None, b"5s"])
def test_a_bare_number_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="timedelta or text"):
        parse_duration(value)  # type: ignore[arg-type]


def test_a_negative_duration_is_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        parse_duration(timedelta(seconds=-1))


@pytest.mark.parametrize("value", ["9" * 400 + "d", "40000d", timedelta.max])
def test_a_duration_that_would_leave_the_range_of_a_timestamp_is_refused(value: str | timedelta) -> None:
    with pytest.raises(ValueError, match="too long"):
        parse_duration(value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"attempts": 0}, "attempts"),
        ({"in_place": -1}, "in_place"),
        ({"base": "2s", "cap": "1s"}, "longer than cap"),
        ({"base": "0s"}, "run hot"),
        ({"cap": "often"}, "cannot read"),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RetryPolicy(**values)  # type: ignore[arg-type]


def test_the_first_delay_is_the_base_and_later_ones_double_up_to_the_cap() -> None:
    class Highest(random.Random):
        def uniform(self, a: float, b: float) -> float:
            return b

    policy = RetryPolicy(base="1s", cap="10s")
    delays = [policy.delay(spent, rng=Highest()).total_seconds() for spent in range(6)]
    assert delays == [1, 2, 4, 8, 10, 10]


def test_a_short_retry_after_does_not_shorten_the_backoff() -> None:
    """C12"""
    policy = RetryPolicy(base="10s", cap="10m")
    assert policy.delay(0, retry_after=timedelta(0)) >= timedelta(seconds=10)
    assert policy.delay(5, retry_after=timedelta(seconds=1), rng=random.Random(1)) >= timedelta(seconds=10)


def test_a_retry_after_may_exceed_the_cap() -> None:
    policy = RetryPolicy(base="1s", cap="10s")
    assert policy.delay(3, retry_after=timedelta(hours=1)) >= timedelta(hours=1)


def test_messages_told_the_same_time_do_not_return_in_one_instant() -> None:
    policy = RetryPolicy(base="1s", cap="10s")
    delays = {policy.delay(3, retry_after=timedelta(minutes=1)) for _ in range(20)}
    assert len(delays) > 10


def test_attempts_and_age_both_end_it() -> None:
    """C12"""
    policy = RetryPolicy(attempts=3, max_age="1h")
    assert not policy.is_exhausted(2, timedelta(minutes=59))
    assert policy.is_exhausted(3, timedelta(0))
    assert policy.is_exhausted(1, timedelta(hours=1))
