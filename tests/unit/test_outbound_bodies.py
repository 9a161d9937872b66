"""What the relay says about the body of a task's message."""

from uuid import UUID

import pytest

from towpath.messages import read_envelope
from towpath.relay.outbound import Outbound


@pytest.mark.parametrize(
    ("kind", "payload", "body"),
    [("task", None, "row"), ("task", b"{}", "inline"), ("event", b"{}", "inline"), ("event", None, "inline")],
)
def test_only_a_submitted_task_has_its_body_in_the_row(kind: str, payload: bytes | None, body: str) -> None:
    row = (1, 0, UUID(int=1), kind, "d", "t", None, "c", "[]", payload, 850_000_000_000_000, 0, True)
    outbound = Outbound("i", {})
    outbound.messages([(*row[:3], "task", *row[4:9], b"" if payload is None else None, *row[10:])])

    (message,), refused = outbound.messages([row])

    assert read_envelope(message.headers).body == body
    assert refused == {}
