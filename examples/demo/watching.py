"""How far it is: a table that lives on a terminal, a line now and then elsewhere."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import asyncpg
from rich.console import Console
from rich.live import Live
from rich.table import Table

from towpath.states import TaskState

STALL_SECONDS: Final = 90.0
"""Nothing moved for so long, longer than between two probes of a breaker: what is missing will not come."""
_START_SECONDS: Final = 180.0
"""The same before anything moved at all: processes start slowly on a busy machine."""
_REFRESH_SECONDS: Final = 0.25
_LINE_SECONDS: Final = 2.0
_COLUMNS: Final = (
    TaskState.ACCEPTED,
    TaskState.RUNNING,
    TaskState.WAITING,
    TaskState.PARKED,
    TaskState.SUCCEEDED,
    TaskState.FAILED,
    TaskState.DEAD,
)
_PROGRESS: Final = """
    select
      (select json_object_agg(g.consumer_group, g.states) from (
         select s.consumer_group, json_object_agg(s.state, s.count) as states from (
           select t.consumer_group, t.state, count(*) from towpath.task t group by 1, 2) s
         group by 1) g)::text as groups,
      (select count(*) from towpath.outbox_message o where o.status = 'PENDING') as backlog,
      (select count(*) from towpath.task_event e
        where e.from_state = 'RUNNING' and e.to_state = 'WAITING') as retries,
      (select count(*) from towpath.dead_letter d where d.state = 'open') as open_dead_letters,
      (select count(*) from towpath.dead_letter d where d.state = 'replayed') as replayed
"""


@dataclass(frozen=True, slots=True)
class Progress:
    """Where everything stands, read in one statement."""

    tasks: Mapping[str, Mapping[str, int]]
    """By group and state."""
    backlog: int
    """Committed outbox rows that are not published yet."""
    retries: int
    open_dead_letters: int
    replayed: int

    def count(self, *states: TaskState) -> int:
        """Tasks of all groups in these states."""
        return sum(by_state.get(state, 0) for by_state in self.tasks.values() for state in states)

    @property
    def final_count(self) -> int:
        """Tasks that have ended."""
        return self.count(*(state for state in TaskState if state.is_final))

    @property
    def is_idle(self) -> bool:
        """Whether nothing is on its way: no task before its end, no row before its publishing."""
        return self.backlog == 0 and self.count(*TaskState) == self.final_count


async def read_progress(connection: "asyncpg.Connection[Any]") -> Progress:
    """Ask the database."""
    row = await connection.fetchrow(_PROGRESS)
    assert row is not None
    return Progress(json.loads(row["groups"] or "{}"), *list(row.values())[1:])


async def watch(
    connection: "asyncpg.Connection[Any]",
    console: Console,
    is_done: Callable[[Progress], bool],
    on_progress: Callable[[Progress], Awaitable[None]],
) -> bool:
    """Show progress until it is done; False when nothing moved for `STALL_SECONDS` before that."""
    began = moved_at = shown_at = time.monotonic()
    first: Progress | None = None
    last: Progress | None = None
    with _live(console) as show:
        while True:
            progress = await read_progress(connection)
            now = time.monotonic()
            if progress != last:
                moved_at = now
            is_finished = is_done(progress)
            first = first or progress
            is_stalled = now - moved_at > (STALL_SECONDS if progress != first else _START_SECONDS)
            if console.is_terminal:
                show(_table(progress, now - began))
            elif last is None or is_finished or now - shown_at > _LINE_SECONDS:
                shown_at = now
                console.print(_line(progress, now - began), highlight=False, soft_wrap=True)
            if is_finished or is_stalled:
                return is_finished
            last = progress
            await on_progress(progress)
            await asyncio.sleep(_REFRESH_SECONDS)


@contextmanager
def _live(console: Console) -> Iterator[Callable[[Table], None]]:
    if not console.is_terminal:
        yield lambda _: None
        return
    with Live(console=console, auto_refresh=False) as live:
        yield lambda table: live.update(table, refresh=True)


def _table(progress: Progress, seconds: float) -> Table:
    table = Table(
        caption=f"{seconds:.0f} s   outbox backlog {progress.backlog}   retries {progress.retries}   "
        f"dead letters {progress.open_dead_letters} open, {progress.replayed} replayed"
    )
    table.add_column("tasks")
    for state in _COLUMNS:
        table.add_column(state.lower(), justify="right")
    for group, by_state in sorted(progress.tasks.items()):
        table.add_row(group, *(str(by_state.get(state, 0)) for state in _COLUMNS))
    return table


def _line(progress: Progress, seconds: float) -> str:
    groups = "; ".join(
        f"{group}: "
        + ", ".join(f"{by_state[state]} {state.lower()}" for state in _COLUMNS if state in by_state)
        for group, by_state in sorted(progress.tasks.items())
    )
    return (
        f"         {seconds:4.1f} s  {groups or 'no tasks yet'}; backlog {progress.backlog}, "
        f"retries {progress.retries}, dead letters {progress.open_dead_letters}, replayed {progress.replayed}"
    )
