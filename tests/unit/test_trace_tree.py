"""Spans in files, and one trace of them as a tree."""

import io
import json
from pathlib import Path
from uuid import uuid4

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.trace import StatusCode
from rich.console import Console

from towpath.telemetry.files import LineWriter, SpanRecord, path_for, read_spans
from towpath.telemetry.names import attributes
from towpath.telemetry.setup import file_exporter
from towpath.telemetry.tree import build_tree, load_trace, render_trace

TRACE = "0af7651916cd43dd8448eb211c80319c"
CANARY = "c4n4ry-s3cr3t"
MS = 1_000_000


def span(
    span_id: str,
    parent_id: str | None,
    name: str,
    start_ms: int,
    end_ms: int,
    *,
    status: str = "unset",
    trace_id: str = TRACE,
    links: tuple[tuple[str, str], ...] = (),
    **labels: str | int,
) -> SpanRecord:
    return SpanRecord(
        trace_id,
        span_id,
        parent_id,
        name,
        "internal",
        "svc",
        start_ms * MS,
        end_ms * MS,
        status,
        attributes=attributes(**labels),
        links=links,
    )


def write(path: Path, *records: SpanRecord) -> None:
    lines = []
    for record in records:
        values = {name: getattr(record, name) for name in SpanRecord.__slots__}
        lines.append(json.dumps(values | {"attributes": dict(record.attributes)}))
    assert LineWriter(path).write(lines)


def printed(paths: list[Path]) -> str:
    out = io.StringIO()
    Console(file=out, width=200).print(render_trace(paths, TRACE))
    return out.getvalue()


STORY = (
    span("a", None, "checkout", 0, 5),
    span("b", "a", "create orders", 1, 1, type="order.placed"),
    span("c", "b", "send orders", 10, 14),
    span("d", "b", "process orders", 20, 30, status="error", trigger="broker", attempt=1, outcome="retry"),
    span("e", "b", "process orders", 1020, 1030, trigger="retry", attempt=2, outcome="dead"),
    span("f", "b", "replay orders", 90_000, 90_001, actor="ann"),
    span("g", "b", "process orders", 90_100, 90_200, trigger="replay", attempt=3, outcome="succeeded"),
)


def test_a_trace_is_a_tree_in_order_of_time(tmp_path: Path) -> None:
    """O4"""
    write(tmp_path / "relay-1.jsonl", *STORY[2:3])
    write(tmp_path / "worker-2.jsonl", *reversed(STORY[3:]))
    write(tmp_path / "producer.jsonl", *STORY[:2], span("z", None, "other", 0, 1))
    trace = load_trace([tmp_path], TRACE.upper())
    assert [root.span.name for root in trace.roots] == ["checkout", "other"]
    steps = [(node.step, depth) for node, depth in trace.walk()]
    assert steps == [
        ("checkout", 0),
        ("emit", 1),
        ("relay", 2),
        ("process", 2),
        ("retry", 2),
        ("replay", 2),
        ("replay", 2),
        ("other", 0),
    ]


def test_it_is_connected_when_one_span_is_above_all_others() -> None:
    assert build_tree(TRACE, STORY).is_connected
    assert (
        not build_tree(TRACE, STORY[1:]).is_connected
        or build_tree(TRACE, STORY[1:]).roots[0].span.span_id == "b"
    )
    assert not build_tree(TRACE, STORY[2:]).is_connected
    assert not build_tree(TRACE, []).is_connected


def test_a_window_of_another_trace_stands_below_every_creation_it_links_to() -> None:
    """O4"""
    other = span("w", "x", "send", 10, 14, trace_id="1" * 32, links=((TRACE, "b"), (TRACE, "h")))
    second = span("h", "a", "create orders", 2, 2)
    trace = build_tree(TRACE, [*STORY[:2], second, other, span("x", None, "create", 0, 0, trace_id="1" * 32)])
    assert trace.is_connected
    assert [(node.step, node.span.span_id) for node, _ in trace.walk()] == [
        ("checkout", "a"),
        ("emit", "b"),
        ("relay", "w"),
        ("emit", "h"),
        ("relay", "w"),
    ]


def test_a_window_is_shown_once_below_the_creation_that_is_its_parent() -> None:
    own = span("c", "b", "send orders", 10, 14, links=((TRACE, "b"),))
    trace = build_tree(TRACE, [*STORY[:2], own])
    assert [node.span.span_id for node, _ in trace.walk()] == ["a", "b", "c"]


def test_spans_that_were_written_twice_count_once() -> None:
    assert len(build_tree(TRACE, [*STORY, *STORY]).spans) == len(STORY)


def test_what_is_printed_tells_steps_durations_and_outcomes(tmp_path: Path) -> None:
    path = tmp_path / "spans.jsonl"
    write(path, *STORY)
    text = printed([path])
    lines = [line.strip() for line in text.splitlines()]
    assert lines[0] == f"trace {TRACE}"
    assert "emit     create orders  svc  +1.0 ms  0.0 ms  type=order.placed" in text
    assert "retry    process orders  svc  +1.02 s  10.0 ms  attempt=2  outcome=dead" in text
    assert "replay   process orders  svc  +1.5 min  0.10 s  attempt=3  outcome=succeeded" in text


def test_an_unknown_trace_says_so(tmp_path: Path) -> None:
    text = printed([tmp_path])
    assert "no span of this trace" in text


def test_names_in_spans_are_text_not_markup(tmp_path: Path) -> None:
    """X2"""
    path = tmp_path / "spans.jsonl"
    write(path, span("a", None, "[red]process[/] [link=x]", 0, 1))
    text = printed([path])
    assert "[red]process[/] [link=x]" in text


def test_broken_lines_are_skipped(tmp_path: Path) -> None:
    """X6"""
    path = tmp_path / "spans.jsonl"
    write(path, STORY[0])
    with path.open("ab") as file:
        file.write(b'{"trace_id": "cut of\n\xff\xfe\n[]\n17\n{"unknown": 1}\n')
    write(path, STORY[1])
    assert [record.span_id for record in read_spans([path])] == ["a", "b"]


def test_the_exporter_writes_what_is_read_back(tmp_path: Path) -> None:
    """X3"""
    path = tmp_path / "spans.jsonl"
    provider = TracerProvider(resource=Resource.create({"service.name": "billing"}), shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(file_exporter(path)))
    tracer = provider.get_tracer("test")
    with tracer.start_as_current_span("parent"), tracer.start_as_current_span("child") as child:
        child.set_attribute("count", 2)
        child.set_attribute("url", f"amqp://app:{CANARY}@rabbit")
        child.set_status(StatusCode.ERROR, f"password={CANARY}")
    provider.shutdown()
    records = {record.name: record for record in read_spans([path])}
    assert records["child"].parent_id == records["parent"].span_id
    assert records["child"].service == "billing"
    assert records["child"].attributes["count"] == 2
    assert records["child"].status == "error"
    assert records["child"].duration_seconds >= 0
    assert CANARY not in path.read_text()


def test_each_process_has_its_own_file_in_a_directory(tmp_path: Path) -> None:
    assert path_for(tmp_path, "relay").name.startswith("relay-")
    assert path_for(tmp_path / "spans.jsonl", "relay") == tmp_path / "spans.jsonl"


def test_a_disk_that_fails_loses_spans_and_nothing_else(tmp_path: Path) -> None:
    writer = LineWriter(tmp_path / "missing" / str(uuid4()) / "spans.jsonl")
    assert not writer.write(["{}"])
    assert not writer.write(["{}"])
