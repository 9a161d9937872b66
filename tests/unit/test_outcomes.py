"""What handlers return and raise."""

import copy
import pickle
from datetime import timedelta

import pytest

from towpath.outcomes import Dead, Outcome, Reject, Retry, Snooze


@pytest.mark.parametrize("reason", ["", "x" * 65, "naïve", "a\nb", "a\0", "refused: Bearer c4n4ry"])
def test_a_reason_is_a_short_code_and_no_text(reason: str) -> None:
    """X3: it becomes a label of metrics; what is not one is not repeated in the error either."""
    for make in (Reject, Retry, Dead, lambda text: Snooze("1s", reason=text)):
        with pytest.raises(ValueError, match="reason") as refused:
            make(reason)
        assert "c4n4ry" not in str(refused.value)


def test_the_message_is_the_detail_or_the_reason() -> None:
    assert str(Dead("gone", "closed on Friday")) == "closed on Friday"
    assert str(Retry()) == "retry"


def test_durations_are_read_when_it_is_made() -> None:
    assert Retry(after="90s").after == timedelta(seconds=90)
    assert Snooze("5m").delay == timedelta(minutes=5)
    with pytest.raises(ValueError, match="cannot read"):
        Snooze("later")


def test_they_are_not_errors_to_a_handler_that_catches_a_class_of_its_own() -> None:
    assert not issubclass(Outcome, RuntimeError | ValueError | OSError)


@pytest.mark.parametrize(
    "outcome",
    [
        Retry("busy", after="5s", detail="a detail with spaces and ünïcode"),
        Snooze("5m", reason="later", detail="x" * 500),
        Dead("gone", "closed"),
    ],
)
def test_they_come_whole_out_of_a_worker_process(outcome: Outcome) -> None:
    for twin in (pickle.loads(pickle.dumps(outcome)), copy.copy(outcome)):
        assert type(twin) is type(outcome)
        assert (str(twin), vars(twin)) == (str(outcome), vars(outcome))


def test_a_rejection_is_a_value() -> None:
    assert Reject("bad_amount") == Reject("bad_amount")
    assert pickle.loads(pickle.dumps(Reject("a", "b"))) == Reject("a", "b")
