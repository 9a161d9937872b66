"""From a failure and what was spent so far to what happens next. Pure arithmetic."""

import random
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, TypeAlias

from towpath.backoff import RetryPolicy
from towpath.failures import Failure
from towpath.states import TaskState, WaitingFor


@dataclass(frozen=True, slots=True)
class Wait:
    """Try again after `delay`."""

    delay: timedelta
    waiting_for: WaitingFor
    spent: int
    counts_towards_age: bool = True
    """False: it did not fail, or is not at fault: neither a snooze nor an outage uses up its age."""


@dataclass(frozen=True, slots=True)
class End:
    """No further try: DEAD, FAILED or EXPIRED."""

    state: TaskState
    spent: int


Decision: TypeAlias = Wait | End

UNKNOWN_TYPE: Final = "unknown_type"
"""Nobody handles it yet: held like an outage, but its age is what ends the hope for a deploy."""


def decide(
    failure: Failure,
    policy: RetryPolicy,
    *,
    attempts_before: int,
    version: int,
    tries: int,
    age: timedelta,
    rng: random.Random | None = None,
) -> Decision:
    """What follows a failure of an attempt that took `tries` tries (in-place ones included)."""
    if failure.kind == "reject":
        return End(TaskState.FAILED, tries)
    if failure.kind == "dead":
        return End(TaskState.EXPIRED if failure.reason_code == "deadline_passed" else TaskState.DEAD, tries)
    if failure.kind == "snooze":
        delay = policy.base_delay if failure.retry_after is None else failure.retry_after
        return Wait(delay, WaitingFor.SNOOZE, spent=0, counts_towards_age=False)
    if failure.scope != "message":
        # Nothing is spent while a dependency is away; its moves so far make the delay grow.
        delay = policy.delay(version // 2, retry_after=failure.retry_after, rng=rng)
        is_held = failure.reason_code == UNKNOWN_TYPE
        return Wait(delay, WaitingFor.RETRY, spent=0, counts_towards_age=is_held)
    spent = 0 if failure.is_free else tries
    total = attempts_before + spent
    bound = policy.attempts if failure.max_attempts is None else min(policy.attempts, failure.max_attempts)
    if total >= bound or age >= policy.age_limit:
        return End(TaskState.DEAD, spent)
    return Wait(policy.delay(total, retry_after=failure.retry_after, rng=rng), WaitingFor.RETRY, spent)
