"""Tables fit the terminal: whole words in fewer columns, not folded ones in all."""

import sys
from datetime import UTC, datetime

import pytest
from rich.console import Console

from towpath.cli import dlq, output

LETTER = {
    "id": 123_456,
    "consumer_group": "billing",
    "stage": "handle",
    "type": "order.placed",
    "key": "customer-0815/order-4711",
    "reason_code": "http_503",
    "attempts": 8,
    "death_count": 1,
    "replay_count": 0,
    "last_dead_at": datetime(2026, 1, 31, 9, 0, tzinfo=UTC),
    "error_message": "503 from the warehouse, which is closed on Sundays",
}


def shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], width: int) -> tuple[str, str]:
    monkeypatch.setattr(output, "console", lambda: Console(file=sys.stdout, width=width, markup=False))
    output.table([LETTER], dlq._COLUMNS, empty="", droppable=dlq._DROPPABLE, cut="error_message")
    return capsys.readouterr()


def test_a_dead_letter_is_one_readable_line_at_80_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, err = shown(monkeypatch, capsys, 80)

    *head, line = out.splitlines()
    assert len(line) <= 80
    for whole in ("123456", "billing", "http_503", "customer-0815/order-4711", "503 from"):
        assert whole in line
    assert "attempts" not in " ".join(head)
    assert "too narrow for stage, type, attempts" in err


def test_a_wide_terminal_is_given_every_column(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, err = shown(monkeypatch, capsys, 250)

    assert "2026-01-31 09:00:00Z" in out
    assert "closed on Sundays" in out
    assert err == ""


@pytest.mark.parametrize("value", [[], [{"a": 1}], [{"é": "\u202e"}, {"b": b"\xff"}]])
def test_a_list_is_one_ascii_document_with_an_element_a_line(
    value: list[object], capsys: pytest.CaptureFixture[str]
) -> None:
    """O1, X2"""
    output.as_json(value)

    out = capsys.readouterr().out
    assert out.isascii()
    assert len(out.splitlines()) == (len(value) + 2 if value else 1)
