"""Tables for people and JSON for programs. Nothing from a row reaches a terminal unescaped."""

import base64
import json
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any, Final, TypeVar
from uuid import UUID

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

T = TypeVar("T")

_UNPRINTABLE: Final = ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")


def clean(value: str) -> str:
    """Text with control, bidirectional and surrogate characters shown as escapes."""
    if value.isascii() and value.isprintable():
        return value
    return "".join(_shown(character) for character in value)


def cell(value: object) -> str:
    """One value as text for a table."""
    if value is None:
        return "-"
    if isinstance(value, datetime):
        return value.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%SZ")
    if isinstance(value, timedelta):
        return age(value.total_seconds())
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.1f}"
    if isinstance(value, bytes | memoryview):
        return clean(bytes(value).decode("utf-8", "backslashreplace"))
    return clean(str(value))


def age(seconds: float | None) -> str:
    """A span of time in its two largest units."""
    if seconds is None:
        return "-"
    left, parts = max(0, round(seconds)), []
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        if left >= size:
            parts.append(f"{left // size}{unit}")
            left %= size
    return "".join(parts[:2]) or "0s"


def table(rows: Iterable[Mapping[str, object]], columns: Sequence[str], *, empty: str) -> None:
    """Rows as a table; the terminal's width decides where text wraps. `empty` when there are none."""
    rows = list(rows)
    if not rows:
        print(clean(empty))
        return
    grid = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        is_number = all(isinstance(row[name], int | float) for row in rows)
        grid.add_column(name.replace("_", " "), justify="right" if is_number else "left", overflow="fold")
    for row in rows:
        grid.add_row(*(Text(cell(row[name])) for name in columns))
    console().print(grid)


def details(row: Mapping[str, object], *, skip: Iterable[str] = ()) -> None:
    """One row, a field a line, without the fields that are empty."""
    shown = {name: value for name, value in row.items() if value is not None and name not in set(skip)}
    width = max((len(name) for name in shown), default=0)
    for name, value in shown.items():
        print(f"{name.replace('_', ' '):<{width}}  {cell(value)}")


def as_json(value: object) -> None:
    """One JSON document on stdout, ASCII only; bytes become base64."""
    sys.stdout.write(json.dumps(value, default=_plain, indent=1, allow_nan=False) + "\n")


def console(*, stderr: bool = False) -> Console:
    """A terminal that interprets nothing inside values; unlimited width where there is no terminal."""
    is_terminal = (sys.stderr if stderr else sys.stdout).isatty()
    return Console(
        stderr=stderr, markup=False, highlight=False, emoji=False, width=None if is_terminal else 250
    )


@contextmanager
def progress(total: int, done: Callable[[T], int]) -> Iterator[Callable[[T], None] | None]:
    """A bar with time left, told of each state whose `done` says how far it is; None where nobody watches."""
    if not sys.stderr.isatty():
        yield None
        return
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda state: bar.update(task, completed=done(state))


def _shown(character: str) -> str:
    if unicodedata.category(character) not in _UNPRINTABLE:
        return character
    return character.encode("unicode_escape", "surrogatepass").decode()


def _plain(value: Any) -> object:
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat().replace("+00:00", "Z")
    if isinstance(value, bytes | memoryview):
        return base64.b64encode(bytes(value)).decode()
    if isinstance(value, UUID):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")
