"""`towpath trace show`."""

import json
from pathlib import Path

import pytest

from tests.fixtures.json_documents import check_document
from towpath.cli.root import run
from towpath.telemetry.files import LineWriter

TRACE = "0af7651916cd43dd8448eb211c80319c"


@pytest.fixture
def spans_file(tmp_path: Path) -> Path:
    path = tmp_path / "spans.jsonl"
    common = {"trace_id": TRACE, "kind": "internal", "service": "shop", "end_ns": 2_000_000}
    lines = [
        {"span_id": "a", "parent_id": None, "name": "checkout", "start_ns": 0} | common,
        {"span_id": "b", "parent_id": "a", "name": "create orders\x1b[2J", "start_ns": 1_000_000} | common,
    ]
    assert LineWriter(path).write([json.dumps(line) for line in lines])
    return path


def test_it_prints_the_tree(spans_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """O4, X2"""
    assert run(["trace", "show", TRACE, "--file", str(spans_file)]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0] == f"trace {TRACE}"
    assert "emit     create orders" in out
    assert "\x1b" not in out


def test_the_variable_of_the_exporter_is_the_default(
    spans_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """O1"""
    monkeypatch.setenv("TOWPATH_TELEMETRY__TRACES_FILE", str(spans_file.parent))
    command = ["trace", "show", TRACE, "--json"]
    assert run(command) == 0
    printed = capsys.readouterr().out
    check_document(command, printed)
    shown = json.loads(printed)
    assert [(span["step"], span["depth"], span["service"]) for span in shown] == [
        ("checkout", 0, "shop"),
        ("emit", 1, "shop"),
    ]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["abc"], 2, "is not a trace id"),
        ([TRACE], 2, "TOWPATH_TELEMETRY__TRACES_FILE"),
        ([TRACE, "--file", "/nowhere/at/all"], 2, "does not exist"),
    ],
)
def test_a_mistake_is_one_line(
    arguments: list[str],
    code: int,
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """O2"""
    monkeypatch.delenv("TOWPATH_TELEMETRY__TRACES_FILE", raising=False)
    assert run(["trace", "show", *arguments]) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_an_unknown_trace_exits_with_3(spans_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["trace", "show", "1" * 32, "--file", str(spans_file)]) == 3
    assert "no span of trace" in capsys.readouterr().err
