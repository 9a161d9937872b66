"""What coverage-guided fuzzing found worth keeping holds, and goes on holding."""

import pytest

from tests.fuzz.targets import TARGETS, corpus_of


@pytest.mark.parametrize("target", TARGETS)
def test_each_kept_input_is_dealt_with(target: str) -> None:
    """X6: `make fuzz` looks for more."""
    inputs = corpus_of(target)
    assert inputs
    for data in inputs:
        TARGETS[target](data)
