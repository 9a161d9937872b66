"""A relay that sleeps: how soon it wakes, what it costs idle, and what it costs producers."""

import asyncio
from collections.abc import Callable, Sequence

from benchmarks.cells import producers, wakeup
from benchmarks.measure import Cell, Sample, Target
from benchmarks.report import show
from towpath.settings import WakeupMode
from towpath.store import migrate
from towpath.testing.services import PostgresServer

SETTINGS = {"shared_buffers": "512MB", "max_wal_size": "4GB"}


def _idle(name: str) -> Callable[[Sample, Sample], float]:
    return lambda mine, _: float("inf") if mine.idle is None else mine.idle[name]


def _p50(mine: Sample, _: Sample) -> float:
    return float("inf") if mine.p50_ms is None else mine.p50_ms


_CHEAP = (
    Target("relay ≤ 0.5 % of a core", 0.5, _idle("relay"), is_ceiling=True),
    Target("Postgres ≤ 1 % of a core", 1.0, _idle("postgres"), is_ceiling=True),
    Target("≤ 5 statements/s", 5.0, _idle("statements"), is_ceiling=True),
)
_TAX = Target("≥ 0.85 of the bare INSERT", 0.85)


async def wakeups(*, quick: bool, as_json: bool, rounds: int) -> bool:
    """The first row after a pause, and what a relay costs that has nothing to do."""
    modes: Sequence[WakeupMode] = ("poll", "auto")
    first = {mode: Cell("first after idle", mode) for mode in modes}
    first["auto"].targets = (Target("p50 ≤ 5 ms", 5.0, _p50, is_ceiling=True),)
    nothing = {mode: Cell("idle", mode) for mode in modes}
    nothing["auto"].targets = nothing["poll"].targets = _CHEAP
    with PostgresServer(fsync=True) as server:
        url = await _database(server, "bench_wakeup")
        for _ in range(rounds):
            for mode in modes:
                first[mode].samples.append(await wakeup.first_after_idle(url, mode, 5 if quick else 30))
                nothing[mode].samples.append(await wakeup.idle(server, url, mode, 10 if quick else 30))
    for mode in modes:
        show([first[mode]], first["poll"], as_json=as_json)
        show([nothing[mode]], nothing["poll"], as_json=as_json)
    return not any(cell.is_void for cell in [*first.values(), *nothing.values()])


async def taxes(*, quick: bool, as_json: bool, rounds: int) -> bool:
    """What the outbox costs its writers."""
    every = {
        connections: {name: Cell(f"producers {connections}", name) for name in producers.WRITINGS}
        for connections in producers.CONNECTIONS
    }
    for cells in every.values():
        for name in ("relay awake", "relay asleep"):
            cells[name].targets = (_TAX,)
    with PostgresServer(fsync=True, settings=SETTINGS) as server:
        url = await _database(server, "bench_producers")
        for _ in range(rounds):
            for connections, cells in every.items():
                for name, writing in producers.WRITINGS.items():
                    seconds = 3 if quick else 10
                    cells[name].samples.append(
                        await producers.write(server, url, writing, connections, seconds)
                    )
    for cells in every.values():
        show(cells.values(), cells["bare"], as_json=as_json)
    return not any(cell.is_void for cells in every.values() for cell in cells.values())


async def _database(server: PostgresServer, name: str) -> str:
    url = server.create_database(name)
    await asyncio.to_thread(migrate.upgrade, url)
    return url
