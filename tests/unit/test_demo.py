"""The demo's story ends in the same way, however its messages come behind each other."""

import pytest

from examples.demo.script import write_script
from examples.demo.tracing import _is_whole
from tests.unit.test_trace_tree import TRACE, span
from towpath.consumer.breakers import KEYS_TO_OPEN
from towpath.telemetry.tree import build_tree


@pytest.mark.parametrize("seed", [1, 2])
def test_what_has_to_die_opens_no_breaker(seed: int) -> None:
    """D1: while one is open no attempt is spent, so nothing would ever be given up."""
    acts = [act for transaction in write_script(seed) for act in transaction.acts]
    assert 0 < len({act.key for act in acts if act.scene == "exhausted"}) < KEYS_TO_OPEN


@pytest.mark.parametrize("first", ["broker", "promoted"])
def test_a_trace_is_whole_also_where_the_message_waited_for_another_of_its_key(first: str) -> None:
    """O4: and not before all of it is there."""
    spans = [
        span("1", None, "create tasks.agents", 1, 2),
        span("2", "1", "send tasks.agents", 2, 3),
        span("3", "1", "process tasks.agents", 3, 4, trigger=first),
        span("4", "1", "process tasks.agents", 4, 5, trigger="retry"),
        span("5", "1", "replay tasks.agents", 5, 6),
        span("6", "1", "process tasks.agents", 6, 7, trigger="replay"),
    ]
    assert _is_whole(build_tree(TRACE, spans))
    assert not any(_is_whole(build_tree(TRACE, [*spans[:n], *spans[n + 1 :]])) for n in range(len(spans)))
