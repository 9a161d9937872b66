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

import msgspec
from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

T = TypeVar("T")

_CUT_LEAST: Final = 20
"""Columns of the terminal that are worth a cut text."""
_UNPRINTABLE: Final = ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")


_encode: Final = msgspec.json.Encoder().encode


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


def table(
    rows: Iterable[Mapping[str, object]],
    columns: Sequence[str],
    *,
    empty: str,
    droppable: Sequence[str] = (),
    cut: str | None = None,
) -> None:
    """Rows as a table, or `empty`. Where the terminal is too narrow, `droppable` columns go, the first first.

    The column `cut` ends in an ellipsis where it does not fit; others wrap.
    """
    rows = list(rows)
    if not rows:
        print(clean(empty))
        return
    terminal = console()
    shown = {name: [cell(row[name]) for row in rows] for name in columns}
    least = _fitting(shown, terminal.width, droppable, cut)
    grid = Table(box=None, pad_edge=False, header_style="bold")
    for name in least:
        is_number = all(isinstance(row[name], int | float) for row in rows)
        grid.add_column(
            _heading(name),
            justify="right" if is_number else "left",
            overflow="ellipsis" if name == cut else "fold",
            no_wrap=name == cut,
            min_width=least[name] if droppable else None,
        )
    for position in range(len(rows)):
        grid.add_row(*(Text(shown[name][position]) for name in least))
    terminal.print(grid)
    if left_out := [_heading(name) for name in columns if name not in least]:
        print(f"(too narrow for {', '.join(left_out)}: --json has them)", file=sys.stderr)


def _heading(name: str) -> str:
    return name.replace("_", " ")


def _fitting(
    shown: Mapping[str, Sequence[str]], width: int, droppable: Sequence[str], cut: str | None
) -> dict[str, int]:
    """The columns that fit beside a little of the one that is cut, with the least width of each."""
    least = {
        name: max(*map(cell_len, _heading(name).split()), *map(cell_len, values))
        for name, values in shown.items()
    }
    if cut is not None:
        least[cut] = min(least[cut], _CUT_LEAST)
    for name in droppable:
        if sum(least.values()) + 2 * (len(least) - 1) <= width:
            break
        del least[name]
    return least


def details(row: Mapping[str, object], *, skip: Iterable[str] = ()) -> None:
    """One row, a field a line, without the fields that are empty."""
    shown = {name: value for name, value in row.items() if value is not None and name not in set(skip)}
    width = max((len(name) for name in shown), default=0)
    for name, value in shown.items():
        print(f"{name.replace('_', ' '):<{width}}  {cell(value)}")


def as_json(value: object) -> None:
    """One JSON document on stdout, ASCII only; bytes become base64. A list has an element a line."""
    if isinstance(value, list):
        with json_list() as write:
            write(value)
    else:
        sys.stdout.write(json.dumps(value, default=_plain, indent=1, allow_nan=False) + "\n")


@contextmanager
def json_list() -> Iterator[Callable[[Iterable[object]], None]]:
    """The same for a list that comes in parts: call it with each."""
    before = "[\n "

    def write(items: Iterable[object]) -> None:
        nonlocal before
        for item in items:
            sys.stdout.write(before + _line(item))
            before = ",\n "

    yield write
    sys.stdout.write("[]\n" if before[0] == "[" else "\n]\n")


def _line(item: object) -> str:
    """JSON in one line; the quick encoder knows times, ids and bytes, and leaves what is not ASCII."""
    encoded = _encode(item)
    if encoded.isascii():
        return encoded.decode()
    return json.dumps(item, default=_plain, allow_nan=False)


def console(*, stderr: bool = False) -> Console:
    """A terminal that interprets nothing inside values; unlimited width where there is no terminal."""
    is_terminal = (sys.stderr if stderr else sys.stdout).isatty()
    return Console(
        stderr=stderr, markup=False, highlight=False, emoji=False, width=None if is_terminal else 250
    )


class _RateColumn(ProgressColumn):
    def render(self, task: Task) -> Text:
        rate = task.finished_speed or task.speed
        return Text("" if rate is None else f"{rate:,.0f}/s")


@contextmanager
def progress(total: int, done: Callable[[T], int]) -> Iterator[Callable[[T], None] | None]:
    """A bar with rate and time left, told of each state; `done`: how far it is. None where nobody watches."""
    if not sys.stderr.isatty():
        yield None
        return
    columns = (BarColumn(), MofNCompleteColumn(), _RateColumn(), TimeRemainingColumn())
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
