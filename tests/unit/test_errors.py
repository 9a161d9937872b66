"""The error tree: drawn, stable and picklable."""

import inspect
import pickle
import re

import pytest

from towpath import errors
from towpath.errors import (
    BrokerUnavailable,
    DecodeError,
    DedupeConflict,
    HandlerTimeout,
    MessageRefused,
    MissingExtra,
    PayloadTooLarge,
    StoreUnavailable,
    TowpathError,
)

CLASSES = [
    cls
    for _, cls in inspect.getmembers(errors, inspect.isclass)
    if issubclass(cls, TowpathError) and cls.__module__ == errors.__name__
]


def test_the_drawing_shows_every_class_under_its_parent() -> None:
    drawn: dict[str, str] = {}
    path: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"^((?:│   |    )*)(?:[├└]── )?([A-Z]\w+)", line)
        if match and (line.startswith(("├", "└", "│")) or match[2] == "TowpathError"):
            depth = 0 if match[2] == "TowpathError" else len(match[1]) // 4 + 1
            path = [*path[:depth], match[2]]
            drawn[match[2]] = path[-2] if depth else "Exception"
    assert drawn == {cls.__name__: cls.__base__.__name__ for cls in CLASSES}  # type: ignore[union-attr]


def test_codes_are_unique_and_stable_in_form() -> None:
    codes = [cls.code for cls in CLASSES]
    assert len(set(codes)) == len(codes)
    assert all(re.fullmatch(r"[a-z_]+(\.[a-z_]+)?", code) for code in codes)


def test_only_what_may_pass_by_itself_is_retryable() -> None:
    assert {cls for cls in CLASSES if cls.retryable} == {StoreUnavailable, BrokerUnavailable, HandlerTimeout}


@pytest.mark.parametrize(
    "error",
    [
        PayloadTooLarge("order.placed", 2_000_000, 1_048_576),
        DedupeConflict("another body", "0190"),
        MissingExtra("kafka", "the Kafka adapter"),
        MessageRefused("too_large", "2 MB"),
        DecodeError("not_json"),
        StoreUnavailable("away"),
    ],
)
def test_they_come_whole_out_of_a_worker_process(error: TowpathError) -> None:
    twin = pickle.loads(pickle.dumps(error))
    assert type(twin) is type(error)
    assert (str(twin), vars(twin)) == (str(error), vars(error))


def test_a_missing_extra_names_the_line_that_installs_it() -> None:
    assert 'pip install "towpath[kafka]"' in str(MissingExtra("kafka", "the Kafka adapter"))


def test_a_payload_too_large_names_its_limit() -> None:
    """P7"""
    assert "1048576" in str(PayloadTooLarge("order.placed", 2_000_000, 1_048_576))


def test_each_error_says_when_it_is_raised_and_what_to_do() -> None:
    parents = {cls.__base__ for cls in CLASSES}
    for cls in set(CLASSES) - parents:
        when, _, what = (cls.__dict__["__doc__"] or "").partition("\n\n")
        assert when.strip().endswith("."), cls
        assert what.strip().startswith("Do: "), cls
