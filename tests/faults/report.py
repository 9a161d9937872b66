"""What came of runs, and the table fault × broker × verdict."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from tests.faults.checker import Breach
from tests.faults.plan import Plan


@dataclass
class Outcome:
    """What came of a run."""

    plan: Plan
    broker: str
    breaches: list[Breach] = field(default_factory=list)
    trouble: str = ""
    """Why it could not be brought to its end."""
    missed: list[str] = field(default_factory=list)
    """Faults that did not come about."""
    message_count: int = 0
    seconds: float = 0.0

    @property
    def is_kept(self) -> bool:
        """Whether the promise was."""
        return not self.breaches and not self.trouble

    @property
    def faults(self) -> str:
        """What it was struck by."""
        return ", ".join(strike.fault for strike in self.plan.strikes) or "none"


def verdict(outcome: Outcome) -> str:
    """In one word."""
    if not outcome.is_kept:
        return "BROKEN"
    return "missed" if outcome.missed else "kept"


def table(outcomes: Iterable[Outcome]) -> str:
    """Markdown: for each fault and broker how many runs that it struck kept the promise, and did not."""
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    for outcome in outcomes:
        for fault in [strike.fault for strike in outcome.plan.strikes] or ["none"]:
            word = "kept" if outcome.is_kept else "BROKEN"
            found[fault, outcome.broker].append("missed" if fault in outcome.missed else word)
    brokers = sorted({broker for _, broker in found})
    lines = [f"| fault | {' | '.join(brokers)} |", "|---|" + "---|" * len(brokers)]
    for fault in sorted({fault for fault, _ in found}):
        cells = [_cell(found.get((fault, broker), [])) for broker in brokers]
        lines.append(f"| `{fault}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(words: list[str]) -> str:
    return ", ".join(f"{words.count(word)} {word}" for word in ("kept", "BROKEN", "missed") if word in words)
