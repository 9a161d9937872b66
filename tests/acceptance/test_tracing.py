"""One trace leads from the producer's span to the replayed processing, through every process (A9)."""

import json
import sys
from collections import Counter
from uuid import UUID

from tests.acceptance.apps.policy import ATTEMPTS
from tests.acceptance.world import World
from towpath.telemetry.files import SpanRecord, read_spans


async def test_one_trace_connects_producer_relay_retries_and_replay(world: World) -> None:
    """A9, O4, R17: one trace id, every parent is there, and the operators' tools show it."""
    traces = world.directory / "traces"
    traces.mkdir()
    telemetry = {"OTEL_TRACES_EXPORTER": "file", "TOWPATH_TELEMETRY__TRACES_FILE": str(traces)}
    await world.db.execute("insert into cause values ('standing')")
    world.relay(**telemetry)
    world.consumer(**telemetry)
    printed = await world.run("producer", sys.executable, "-m", "tests.acceptance.apps.traced", **telemetry)
    ids = {kind: UUID(id_) for kind, id_ in json.loads(printed.splitlines()[-1]).items()}

    await world.until_state("DEAD", 2)
    await world.until_sent()
    shown = await world.cli("dlq", "list", "--group", world.group, "--json")
    await world.db.execute("delete from cause")
    await world.cli("dlq", "replay", "--group", world.group, "--yes", "--reason", "mended", **telemetry)
    await world.until_state("SUCCEEDED", 2)
    assert (world.stop("consumer"), world.stop("relay")) == (0, 0)  # they flush their last spans

    spans = list(read_spans([traces]))
    (root,) = [span for span in spans if span.name == "place order"]
    assert root.parent_id is None
    for kind, address in (("step", world.steps), ("work", world.tasks)):
        check_trace(spans, root, ids[kind], address, f"{world.group}.{address}.dlq")
        assert root.trace_id in shown
        task = await world.cli("tasks", "show", str(ids[kind]), "--json")
        assert root.trace_id in task


def check_trace(
    spans: list[SpanRecord], root: SpanRecord, message_id: UUID, address: str, dead_address: str
) -> None:
    """Every span of the message is in the producer's trace, below a span that is there."""
    own = [span for span in spans if span.attributes.get("messaging.message.id") == str(message_id)]
    assert {root.trace_id} == {span.trace_id for span in own}
    known = {span.span_id for span in spans if span.trace_id == root.trace_id}
    assert [span.name for span in own if span.parent_id not in known] == []
    expected = {f"create {address}": 1, f"process {address}": ATTEMPTS + 1, f"replay {address}": 1}
    assert expected == Counter(span.name for span in own)
    (create,) = [span for span in own if span.name.startswith("create")]
    assert root.span_id == create.parent_id
    windows = [span for span in spans if (create.trace_id, create.span_id) in span.links]
    assert len(windows) == 2, "the message, and its dead letter's copy"
    assert {span.name for span in windows} <= {"send", f"send {address}", f"send {dead_address}"}
    tried = sorted((span for span in own if span.name.startswith("process")), key=lambda span: span.start_ns)
    assert [span.attributes["towpath.trigger"] for span in tried] == [
        "broker",
        "retry",
        "retry",
        "retry",
        "replay",
    ]
    assert [span.attributes["towpath.outcome"] for span in tried] == [
        "retry",
        "retry",
        "retry",
        "dead",
        "succeeded",
    ]
    processes = {span.service for span in [*own, *windows]}
    assert len(processes) == 4, f"producer, relay, consumer and command line, not {processes}"
