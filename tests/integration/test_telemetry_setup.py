"""The SDK in a process of its own, since it can be set up once per process."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from towpath.telemetry.tree import load_trace

PROGRAM = """
import json, logging, sys, time
from uuid import uuid4
from opentelemetry import trace
from towpath.telemetry.logging import event_logger, setup_logging
from towpath.telemetry.metrics import OpenTelemetry
from towpath.telemetry.names import TASKS_SETTLED
from towpath.telemetry.setup import setup
from towpath.telemetry.tracing import creation_headers, process_span

setup_logging()
handle = setup("billing")
began = time.monotonic()
with trace.get_tracer("app").start_as_current_span("checkout"):
    headers = creation_headers(destination="orders", type_="order.placed", message_id=uuid4())
for attempt in range(1, int(sys.argv[1]) + 1):
    with process_span(headers, destination="orders", group="billing", message_id=uuid4(),
                      type_="order.placed", attempt=attempt):
        event_logger("towpath.test").info("task.snoozed", group="billing")
        OpenTelemetry().add(TASKS_SETTLED, group="billing", type="order.placed", outcome="succeeded")
worked = time.monotonic() - began
if len(sys.argv) > 2:
    print("ready", flush=True)
    time.sleep(600)
handle.shutdown()
print(json.dumps({
    "worked": worked,
    "shutdown": time.monotonic() - began - worked,
    "traces": handle.traces,
    "metrics": handle.metrics,
    "trace": headers[0][1].decode() if headers else None,
}))
"""


def environment(**variables: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OTEL_", "TOWPATH_"))}
    return kept | variables


def run(*arguments: str, **variables: str) -> tuple[dict[str, object], list[dict[str, object]]]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    logs = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]
    return json.loads(done.stdout.splitlines()[-1]), logs


@pytest.fixture
def black_hole() -> Iterator[int]:
    """A port that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        yield server.getsockname()[1]


def test_nothing_is_set_up_unless_it_is_asked_for() -> None:
    result, logs = run("1")
    assert (result["traces"], result["metrics"], result["trace"]) == ([], [], None)
    assert [log["event"] for log in logs] == ["task.snoozed"]


def test_a_traces_file_is_enough_to_get_traces_and_logs_with_their_ids(tmp_path: Path) -> None:
    """O4"""
    path = tmp_path / "spans.jsonl"
    result, logs = run("3", TOWPATH_TELEMETRY__TRACES_FILE=str(path))
    trace_id = str(result["trace"]).split("-")[1]
    trace = load_trace([path], trace_id)
    assert trace.is_connected
    assert [node.step for node, _ in trace.walk()] == ["checkout", "emit", "process", "process", "process"]
    assert {span.service for span in trace.spans} == {"billing"}
    assert {log["trace_id"] for log in logs if log["event"] == "task.snoozed"} == {trace_id}


def test_spans_are_in_the_file_soon_and_stay_there_when_the_process_is_killed(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "1", "stay"],
        env=environment(OTEL_TRACES_EXPORTER="file", TOWPATH_TELEMETRY__TRACES_FILE=str(tmp_path)),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
        deadline = time.monotonic() + 60
        while _lines(tmp_path) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        process.kill()
        process.wait(timeout=60)
        process.stdout.close()
    assert _lines(tmp_path) == 3


def _lines(directory: Path) -> int:
    return sum(file.read_text().count("\n") for file in directory.glob("billing-*.jsonl"))


@pytest.mark.parametrize("is_listening", [True, False])
def test_a_dead_backend_neither_slows_work_nor_holds_up_the_end(is_listening: bool, black_hole: int) -> None:
    """O5"""
    port = black_hole if is_listening else 1
    result, _ = run("2000", OTEL_EXPORTER_OTLP_ENDPOINT=f"http://127.0.0.1:{port}")
    assert result["traces"] == result["metrics"] == ["otlp"]
    # Had each span, or the end, waited for the backend's ten seconds: hours, or a minute.
    assert float(str(result["worked"])) < 60
    assert float(str(result["shutdown"])) < 30


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, "OTEL_TRACES_EXPORTER=zipkin is unknown"),
        ({"OTEL_TRACES_EXPORTER": "file"}, "needs TOWPATH_TELEMETRY__TRACES_FILE"),
        (
            {"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
            "OTEL_EXPORTER_OTLP_PROTOCOL=grpc is not supported",
        ),
    ],
)
def test_a_mistake_in_the_variables_names_the_variable(variables: dict[str, str], message: str) -> None:
    """O2"""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "1"],
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert message in done.stderr


def test_a_disabled_sdk_sets_nothing_up(tmp_path: Path) -> None:
    result, _ = run(
        "1", OTEL_SDK_DISABLED="true", TOWPATH_TELEMETRY__TRACES_FILE=str(tmp_path / "spans.jsonl")
    )
    assert result["traces"] == []
    assert list(tmp_path.iterdir()) == []
