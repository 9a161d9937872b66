"""Suspects: how many messages whose worker died may run together."""

from towpath.consumer.suspects import Suspects


def test_fewer_run_together_the_more_often_their_worker_died() -> None:
    """C19: 64 handlers, then 16, 4 and 1 at a time."""
    suspects = Suspects(concurrency=64, max_deliveries=5)
    assert [64, 16, 4, 1] == [suspects.limit(start) for start in (1, 2, 3, 4)]


def test_at_the_limit_the_next_one_waits_until_one_ended() -> None:
    suspects = Suspects(concurrency=8, max_deliveries=5)
    assert suspects.may_start(2, others_count=30)
    suspects.started(2)
    assert suspects.may_start(2, others_count=31)
    suspects.started(2)
    assert not suspects.may_start(2, others_count=32)
    assert suspects.may_start(3, others_count=32)
    suspects.ended(2)
    assert suspects.may_start(2, others_count=31)
    assert not suspects.wants_quiet


def test_the_last_permitted_start_runs_alone() -> None:
    """C19: it asks for quiet, starts when nothing else runs, and keeps the quiet until it ended."""
    suspects = Suspects(concurrency=64, max_deliveries=5)
    assert not suspects.may_start(5, others_count=3)
    assert suspects.wants_quiet
    assert suspects.may_start(5, others_count=0)
    suspects.started(5)
    assert suspects.wants_quiet
    assert not suspects.may_start(5, others_count=0)
    suspects.ended(5)
    assert not suspects.wants_quiet


def test_beyond_the_last_start_it_only_has_to_be_buried() -> None:
    suspects = Suspects(concurrency=64, max_deliveries=5)
    assert suspects.may_start(6, others_count=64)
    assert not suspects.wants_quiet
