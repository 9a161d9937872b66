"""CPU of processes with everything below them, and cells of a table of results."""

import json
import statistics
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import psutil


def tree_cpu_seconds(pid: int) -> float:
    """User and system time of a process, its living descendants and what those have reaped."""
    try:
        root = psutil.Process(pid)
        processes = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0.0
    total = 0.0
    for process in processes:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


@dataclass
class CpuMeter:
    """CPU-seconds of named processes between two moments."""

    pids: Mapping[str, int]
    _before: dict[str, float] = field(default_factory=dict)

    def start(self) -> None:
        """The first moment."""
        self._before = {name: tree_cpu_seconds(pid) for name, pid in self.pids.items()}

    def stop(self) -> dict[str, float]:
        """Seconds used since, by name."""
        return {name: tree_cpu_seconds(pid) - self._before[name] for name, pid in self.pids.items()}


@dataclass
class Sample:
    """One subject in one round."""

    messages_per_s: float
    cpu_s_per_million: dict[str, float]
    rss_mb: float
    first_message_s: float
    is_void: bool
    note: str = ""


@dataclass
class Cell:
    """The rounds of one subject."""

    cell: str
    subject: str
    samples: list[Sample] = field(default_factory=list)

    @property
    def is_void(self) -> bool:
        return any(sample.is_void for sample in self.samples)

    @property
    def rate(self) -> float:
        return statistics.median(sample.messages_per_s for sample in self.samples)

    def facts(self, floor: "Cell") -> dict[str, object]:
        """The line that is printed. Ratios are taken round by round."""
        pairs = zip(self.samples, floor.samples, strict=True)
        ratios = [mine.messages_per_s / other.messages_per_s for mine, other in pairs]
        names = self.samples[0].cpu_s_per_million
        cpu = {
            name: round(statistics.median(sample.cpu_s_per_million[name] for sample in self.samples), 1)
            for name in names
        }
        return {
            "cell": self.cell,
            "subject": self.subject,
            "rounds": len(self.samples),
            "messages_per_s": round(self.rate),
            "messages_per_s_range": _range(sample.messages_per_s for sample in self.samples),
            "cpu_s_per_million": {**cpu, "total": round(sum(cpu.values()), 1)},
            "rss_mb": round(max(sample.rss_mb for sample in self.samples)),
            "first_message_s": round(statistics.median(s.first_message_s for s in self.samples), 2),
            "ratio_to_floor": round(statistics.median(ratios), 2),
            "ratio_range": [round(min(ratios), 2), round(max(ratios), 2)],
            "void": [sample.note for sample in self.samples if sample.is_void],
        }


def _range(values: Iterable[float]) -> list[int]:
    found = [round(value) for value in values]
    return [min(found), max(found)]


def show(cells: Iterable[Cell], floor: Cell, *, as_json: bool) -> None:
    """Print the cells, as JSON lines or as a table."""
    for cell in cells:
        facts = cell.facts(floor)
        if as_json:
            print(json.dumps(facts), flush=True)
            continue
        cpu = ", ".join(f"{name} {value}" for name, value in facts["cpu_s_per_million"].items())  # type: ignore[attr-defined]
        print(
            f"{cell.cell:<24} {cell.subject:<12} {facts['messages_per_s']:>8}/s "
            f"{facts['messages_per_s_range']}  "
            f"{facts['ratio_to_floor']:.2f}× floor {facts['ratio_range']}  CPU-s/M: {cpu}  "
            f"RSS {facts['rss_mb']} MB  first after {facts['first_message_s']} s"
            + (f"  VOID {facts['void']}" if cell.is_void else ""),
            flush=True,
        )
    if any(cell.is_void for cell in cells):
        print("VOID: what arrived is not what was committed", file=sys.stderr)
