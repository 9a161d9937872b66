"""Cells as text, as JSON lines, and as the table of docs/performance.md."""

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from benchmarks.measure import Cell

_COLUMNS: Final = (
    "cell",
    "subject",
    "messages/s (range)",
    "to its reference",
    "by CPU",
    "CPU-s per million: its own / all",
    "RSS MB",
    "p50 / p99 ms",
    "WAL bytes per message",
    "target",
)


def show(cells: Iterable[Cell], floor: Cell | None, *, as_json: bool) -> None:
    """Print the cells, as JSON lines or as text."""
    for cell in cells:
        facts = cell.facts(floor)
        print(json.dumps(facts) if as_json else _line(facts), flush=True)
        if cell.is_void:
            print(f"VOID: {cell.cell}, {cell.subject}: {facts['void']}", file=sys.stderr)


def _line(facts: Mapping[str, Any]) -> str:
    parts = [f"{facts['cell']:<16} {facts['subject']:<22}"]
    if facts["messages_per_s"] is not None:
        parts.append(f"{facts['messages_per_s']}/s {facts['messages_per_s_range']}")
    if facts["ratio_to_floor"] is not None:
        parts.append(f"{facts['ratio_to_floor']}× floor {facts['ratio_range']}")
    if facts["cpu_ratio_to_floor"] is not None:
        parts.append(f"{facts['cpu_ratio_to_floor']}× by CPU")
    if facts["p50_ms"] is not None:
        parts.append(
            f"p50 {facts['p50_ms']} ms {facts['p50_ms_range']}, p99 {facts['p99_ms']} {facts['p99_ms_range']}"
        )
    if facts["cpu_s_per_million"]:
        cpu = ", ".join(f"{name} {value}" for name, value in facts["cpu_s_per_million"].items())
        parts.append(f"CPU-s/M: {cpu}")
    for name, unit in (
        ("rss_mb", "MB"),
        ("wal_bytes_per_message", "B WAL"),
        ("first_message_s", "s to first"),
    ):
        if facts[name] is not None:
            parts.append(f"{facts[name]} {unit}")
    parts += [
        f"{'met' if target['is_met'] else 'MISSED'}: {target['target']}: {target['value']} {target['range']}"
        for target in facts["targets"]
    ]
    if facts["void"]:
        parts.append(f"VOID {facts['void']}")
    return "  ".join(parts)


def markdown(facts: Iterable[Mapping[str, Any]]) -> str:
    """Facts of `--json` as the table of docs/performance.md."""
    lines = [row(_COLUMNS), row("---" for _ in _COLUMNS)]
    for each in facts:
        rate, ratio, p50 = each["messages_per_s"], each["ratio_to_floor"], each["p50_ms"]
        cpu = each["cpu_s_per_million"]
        own = next(iter(cpu.values())) if cpu else None
        columns = [
            each["cell"],
            each["subject"] + (" **VOID**" if each["void"] else ""),
            "" if rate is None else f"{rate:,} ({_span(each['messages_per_s_range'])})",
            "" if ratio is None else f"{ratio} ({_span(each['ratio_range'])})",
            "" if each["cpu_ratio_to_floor"] is None else f"{each['cpu_ratio_to_floor']:g}",
            "" if own is None else f"{own:g} / {cpu['total']:g}",
            "" if each["rss_mb"] is None else f"{each['rss_mb']}",
            "" if p50 is None else f"{p50:g} / {each['p99_ms']:g}",
            "" if each["wal_bytes_per_message"] is None else f"{each['wal_bytes_per_message']:,}",
            "; ".join(
                f"{target['target']}: {target['value']:g} ({_span(target['range'])}), "
                + ("met" if target["is_met"] else "**missed**")
                for target in each["targets"]
            ),
        ]
        lines.append(row(columns))
    return "\n".join(lines)


def _span(bounds: Sequence[float]) -> str:
    return f"{bounds[0]:,}–{bounds[1]:,}"


def row(columns: Iterable[str]) -> str:
    """Of a table."""
    return f"| {' | '.join(columns)} |"
