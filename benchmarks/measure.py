"""What one subject did in a round, and the statistics of its rounds."""

import statistics
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil


def tree(pid: int) -> list[psutil.Process]:
    """A process and its living descendants."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def tree_cpu_seconds(pid: int) -> float:
    """User and system time of a process, its living descendants and what those have reaped."""
    while True:
        try:
            times = [process.cpu_times() for process in tree(pid)]
        except psutil.NoSuchProcess:
            continue  # one ended meanwhile, and its time is now its parent's
        return sum(each.user + each.system + each.children_user + each.children_system for each in times)


def tree_rss_mb(pid: int) -> float:
    """Resident memory of a process and its living descendants; shared pages count in each."""
    total = 0.0
    for process in tree(pid):
        try:
            total += process.memory_info().rss / 2**20
        except psutil.NoSuchProcess:
            continue
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
    """One subject in one round. None: it does not apply there."""

    messages_per_s: float | None
    cpu_s_per_million: dict[str, float]
    rss_mb: float | None
    first_message_s: float | None
    is_void: bool
    note: str = ""
    p50_ms: float | None = None
    p99_ms: float | None = None
    wal_bytes_per_message: float | None = None
    idle_rss_mb: float | None = None
    """Of the same program with nothing to do."""
    idle: Mapping[str, float] | None = None
    """Percent of a core by process, and `statements` a second, of what has nothing to do."""


def difference(produced: Collection[object], processed: Sequence[object]) -> str:
    """What a run did that it should not have done; empty when every message was processed exactly once."""
    counts = Counter(processed)
    wanted = set(produced)
    faults = {
        "missing": len(wanted - counts.keys()),
        "never produced": len(counts.keys() - wanted),
        "more than once": sum(count > 1 for count in counts.values()),
    }
    return ", ".join(f"{count} {fault}" for fault, count in faults.items() if count)


def percentile(values: Iterable[float], share: float) -> float:
    """The least value that `share` of the values do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * round(share * 1000) // 1000) - 1)]


def rate_ratio(mine: Sample, other: Sample) -> float:
    """How many times the other's rate."""
    return (mine.messages_per_s or 0.0) / (other.messages_per_s or float("inf"))


def cpu_ratio(mine: Sample, other: Sample) -> float:
    """The same by CPU: how many messages for what one costs the other."""
    return sum(other.cpu_s_per_million.values()) / (sum(mine.cpu_s_per_million.values()) or float("inf"))


def p50_ratio(mine: Sample, other: Sample) -> float:
    """How many times the other's median latency."""
    return (mine.p50_ms or float("inf")) / (other.p50_ms or float("inf"))


def p99_ratio(mine: Sample, other: Sample) -> float:
    """The same of the 99th percentile."""
    return (mine.p99_ms or float("inf")) / (other.p99_ms or float("inf"))


def first_message(mine: Sample, _: Sample) -> float:
    """Seconds until the first message."""
    return float("inf") if mine.first_message_s is None else mine.first_message_s


def more_mb(mine: Sample, other: Sample) -> float:
    """Megabytes above the other's highest RSS."""
    return (mine.rss_mb or 0.0) - (other.rss_mb or 0.0)


@dataclass(frozen=True)
class Target:
    """What a cell has to reach in the median of the rounds."""

    text: str
    limit: float
    value: Callable[[Sample, Sample], float] = rate_ratio
    is_ceiling: bool = False

    def facts(self, pairs: Iterable[tuple[Sample, Sample]]) -> dict[str, object]:
        """The value, its range and whether it is met."""
        values = [self.value(mine, other) for mine, other in pairs]
        median = statistics.median(values)
        return {
            "target": self.text,
            "value": round(median, 2),
            "range": [round(min(values), 2), round(max(values), 2)],
            "is_met": median <= self.limit if self.is_ceiling else median >= self.limit,
        }


@dataclass
class Cell:
    """The rounds of one subject."""

    cell: str
    subject: str
    samples: list[Sample] = field(default_factory=list)
    targets: Sequence[Target] = ()

    @property
    def is_void(self) -> bool:
        return any(sample.is_void for sample in self.samples)

    @property
    def rate(self) -> float:
        return statistics.median(sample.messages_per_s or 0.0 for sample in self.samples)

    def facts(self, floor: "Cell | None") -> dict[str, Any]:
        """The line that is printed. Ratios are taken round by round."""
        pairs = [] if floor is None else list(zip(self.samples, floor.samples, strict=True))
        has_rates = all(mine.messages_per_s and other.messages_per_s for mine, other in pairs)
        ratios = [rate_ratio(mine, other) for mine, other in pairs] if has_rates else []
        has_cpu = all(mine.cpu_s_per_million and other.cpu_s_per_million for mine, other in pairs)
        cpu_ratios = [cpu_ratio(mine, other) for mine, other in pairs] if has_cpu else []
        cpu = {
            name: round(statistics.median(sample.cpu_s_per_million[name] for sample in self.samples), 1)
            for name in self.samples[0].cpu_s_per_million
        }
        return {
            "cell": self.cell,
            "subject": self.subject,
            "rounds": len(self.samples),
            "messages_per_s": self._median("messages_per_s"),
            "messages_per_s_range": self._range("messages_per_s"),
            "cpu_s_per_million": {**cpu, "total": round(sum(cpu.values()), 1)} if cpu else None,
            "rss_mb": self._median("rss_mb"),
            "p50_ms": self._median("p50_ms", 1),
            "p50_ms_range": self._range("p50_ms", 1),
            "p99_ms": self._median("p99_ms", 1),
            "p99_ms_range": self._range("p99_ms", 1),
            "wal_bytes_per_message": self._median("wal_bytes_per_message"),
            "first_message_s": self._median("first_message_s", 2),
            "ratio_to_floor": round(statistics.median(ratios), 2) if ratios else None,
            "ratio_range": [round(min(ratios), 2), round(max(ratios), 2)] if ratios else None,
            "cpu_ratio_to_floor": round(statistics.median(cpu_ratios), 2) if cpu_ratios else None,
            "targets": [target.facts(pairs) for target in self.targets if pairs],
            "void": [sample.note for sample in self.samples if sample.is_void],
        }

    def _values(self, name: str) -> list[float]:
        values = [getattr(sample, name) for sample in self.samples]
        return [] if None in values else values

    def _median(self, name: str, digits: int | None = None) -> float | None:
        values = self._values(name)
        return round(statistics.median(values), digits) if values else None

    def _range(self, name: str, digits: int | None = None) -> list[float] | None:
        values = self._values(name)
        return [round(min(values), digits), round(max(values), digits)] if values else None
