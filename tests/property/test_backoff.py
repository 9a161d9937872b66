"""Delays stay within their bounds whatever the policy."""

import random
from datetime import timedelta

from hypothesis import given
from hypothesis import strategies as st

from towpath.backoff import RetryPolicy, parse_duration

DURATIONS = st.timedeltas(timedelta(microseconds=1), timedelta(days=3650))
POLICIES = st.tuples(DURATIONS, DURATIONS).map(lambda pair: RetryPolicy(base=min(pair), cap=max(pair)))


@given(policy=POLICIES, spent=st.integers(-5, 10**9), seed=st.integers(0, 1000))
def test_a_delay_lies_between_base_and_cap(policy: RetryPolicy, spent: int, seed: int) -> None:
    """C12"""
    delay = policy.delay(spent, rng=random.Random(seed))
    assert policy.base_delay <= delay <= policy.cap_delay


@given(policy=POLICIES, spent=st.integers(0, 100), floor=DURATIONS, seed=st.integers(0, 1000))
def test_a_retry_after_is_a_floor_and_never_far_exceeded(
    policy: RetryPolicy, spent: int, floor: timedelta, seed: int
) -> None:
    """C4, C12"""
    delay = policy.delay(spent, retry_after=floor, rng=random.Random(seed))
    assert max(floor, policy.base_delay) <= delay
    assert delay <= max(floor * 1.25, policy.cap_delay) + timedelta(microseconds=1)


@given(milliseconds=st.integers(0, 10**12))
def test_text_and_timedelta_agree(milliseconds: int) -> None:
    assert parse_duration(f"{milliseconds}ms") == timedelta(milliseconds=milliseconds)


@given(text=st.text(max_size=30))
def test_any_text_is_a_duration_or_a_value_error(text: str) -> None:
    try:
        duration = parse_duration(text)
    except ValueError as error:
        message = str(error)
    else:
        assert duration >= timedelta(0)
        return
    assert repr(text) in message
