"""The tables of `docs/telemetry.md`, made from `names.py` and `events.py`.

`python -m towpath.telemetry.reference docs/telemetry.md` rewrites them between their markers.
"""

import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, TypeAlias

from towpath.telemetry.events import EVENTS
from towpath.telemetry.names import ATTRIBUTES, METRICS, SPANS

Tables: TypeAlias = Mapping[str, Callable[[], str]]
_SECTION: Final = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def spans() -> str:
    """Every span."""
    return table(
        ("span", "kind", "when", "attributes"),
        ((f"`{spec.name}`", spec.kind, spec.description, _keys(spec.attributes)) for spec in SPANS),
    )


def metrics() -> str:
    """Every metric."""
    return table(
        ("metric", "kind", "unit", "meaning", "attributes"),
        (
            (
                f"`{metric.name}`",
                metric.kind,
                f"`{metric.unit}`",
                metric.description,
                _keys(metric.attributes),
            )
            for metric in METRICS
        ),
    )


def events() -> str:
    """Every log event."""
    rows = sorted(EVENTS.values(), key=lambda event: event.name)
    return table(
        ("event", "fact", "fields"),
        ((f"`{event.name}`", event.description, _names(event.fields)) for event in rows),
    )


TABLES: Final[Tables] = {"spans": spans, "metrics": metrics, "events": events}


def with_tables(text: str, tables: Tables = TABLES) -> str:
    """The text with every table between `<!-- table: x -->` and `<!-- end -->` made anew."""
    return _SECTION.sub(lambda match: match[1] + tables[match[2]]() + match[3], text)


def main(arguments: Sequence[str], tables: Tables = TABLES) -> None:
    """Rewrite the files named."""
    for argument in arguments:
        path = Path(argument)
        path.write_text(with_tables(path.read_text(encoding="utf-8"), tables), encoding="utf-8")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _keys(names: Iterable[str]) -> str:
    return _names(ATTRIBUTES[name] for name in names)


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    main(sys.argv[1:])
