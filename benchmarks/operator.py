"""What an operator waits for: 100,000 dead letters listed, summed up, exported, released.

Each subject is the command line in a process of its own, start-up included, against a database filled
anew; its memory is the most that the process had. The reference of `release` is one SQL transaction that
moves the same rows without gates, batches or a record of who did it.
"""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import asyncpg

from benchmarks.measure import Cell, CpuMeter, Sample, Target
from benchmarks.report import show
from towpath.store import migrate
from towpath.testing.services import PostgresServer

CELLS = ("start", "page", "list", "summary", "export", "release")

_KEYS = 1000
_LOOK_SECONDS = 0.01
_FILL = """
insert into towpath.task (consumer_group, id, type, kind, source, key, lane, position, state, held_by,
                          attempt, version, reason_code, fingerprint, finished_at, payload, content_type,
                          headers)
select 'billing', md5(n::text)::uuid, 'order.placed', 'event', 'orders', k.key, k.key, n, 'DEAD', 'database',
       8, 9, 'http_503', 'f', towpath.clock(), decode(repeat('ab', 300), 'hex'), 'application/json', '[]'
  from generate_series(1, $1::integer) n cross join lateral (select 'k' || n % $2::integer as key) k
"""
_BURY = """
insert into towpath.dead_letter (consumer_group, message_id, stage, type, kind, source, key, position,
                                 payload, content_type, reason_code, error_class, error_message, fingerprint,
                                 attempts, trace)
select t.consumer_group, t.id, 'handle', t.type, t.kind, t.source, t.key, t.position, t.payload,
       t.content_type, 'http_' || 500 + t.position % 20, 'HTTPStatusError', '503 from the warehouse',
       'f' || t.position % 20, 8, '00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01'
  from towpath.task t order by t.position
"""
_FLOOR = """
with moved as (
  update towpath.task
     set state = 'WAITING', due_at = towpath.clock(), waiting_for = 'replay', finished_at = null, attempt = 0,
         version = version + 1, updated_at = towpath.clock()
   where state = 'DEAD' returning consumer_group, id, version
), closed as (
  update towpath.dead_letter set state = 'replayed', closed_at = towpath.clock() where state = 'open'
)
insert into towpath.task_event (consumer_group, task_id, event, from_state, to_state, version)
select consumer_group, id, 'task.replayed', 'DEAD', 'WAITING', version from moved
"""
_RELEASED = """
select (select count(*) from towpath.dead_letter where state = 'replayed') as letters,
       (select count(*) from towpath.task where state in ('WAITING', 'PARKED')) as tasks,
       (select count(*) from towpath.task_event) as lines
"""

Subject = Callable[[str, int], Awaitable[Sample]]


def _seconds(mine: Sample, _: Sample) -> float:
    return mine.first_message_s or float("inf")


async def main(*, quick: bool, as_json: bool, rounds: int, cells: Sequence[str] = CELLS) -> bool:
    """Run and print; False when a release did not release exactly what was there."""
    count = 10_000 if quick else 100_000
    results = {name: Cell(name, "towpath", targets=_TARGETS.get(name, ())) for name in cells}
    floor = Cell("release", "one transaction")
    with PostgresServer() as postgres:
        for number in range(rounds):
            url = await asyncio.to_thread(postgres.create_database, f"operator_{number}")
            await asyncio.to_thread(migrate.upgrade, url)
            for name in cells:
                await _fill(url, count)
                meter = CpuMeter({"postgres": postgres.pid})
                results[name].samples.append(await _run(name, url, count, meter))
            if "release" in cells:
                await _fill(url, count)
                floor.samples.append(await _floor(url, count))
    for name, cell in results.items():
        reference = floor if name == "release" else cell
        show([floor, cell] if name == "release" else [cell], reference, as_json=as_json)
    return not any(cell.is_void for cell in results.values())


_TARGETS: Mapping[str, Sequence[Target]] = {
    "page": (Target("≤ 1 s with its start", 1.0, _seconds, is_ceiling=True),),
    "release": (Target("≥ 5,000/s with its start", 5000.0, lambda mine, _: mine.messages_per_s or 0.0),),
}
_COMMANDS: Mapping[str, tuple[str, ...]] = {
    "start": ("version",),
    "page": ("dlq", "list"),
    "list": ("dlq", "list", "--limit", "100000", "--json"),
    "summary": ("dlq", "summary"),
    "export": ("dlq", "export"),
    "release": ("dlq", "replay", "--all", "--yes", "--json"),
}


async def _fill(url: str, count: int) -> None:
    connection = await asyncpg.connect(url, command_timeout=600)
    await connection.execute(
        "truncate towpath.task, towpath.dead_letter, towpath.task_event, towpath.key_gate cascade"
    )
    await connection.execute(_FILL, count, _KEYS)
    await connection.execute(_BURY)
    await connection.execute("vacuum analyze towpath.task, towpath.dead_letter")
    await connection.execute("checkpoint")
    await connection.close()


async def _run(name: str, url: str, count: int, meter: CpuMeter) -> Sample:
    """One command; its standard output goes to a file, as into a pipe that is read quickly."""
    with TemporaryDirectory() as directory:
        out = Path(directory, "out")
        meter.start()
        seconds, cpu, rss = await asyncio.to_thread(_command, _COMMANDS[name], url, out)
        used = {"command": cpu, **meter.stop()}
        fault = await _fault(name, url, count, out)
    acted = 1 if name == "start" else 50 if name == "page" else count
    return Sample(
        messages_per_s=None if name in ("start", "page") else acted / seconds,
        cpu_s_per_million={who: spent * 1e6 / acted for who, spent in used.items()},
        rss_mb=rss,
        first_message_s=seconds,
        is_void=bool(fault),
        note=fault,
    )


def _command(arguments: Sequence[str], url: str, out: Path) -> tuple[float, float, float]:
    """Seconds, CPU-seconds and the most MB of memory of one run of `towpath`."""
    # Modules are compiled once, as in every installation.
    environment = {**os.environ, "TOWPATH_DATABASE_URL": url, "PYTHONDONTWRITEBYTECODE": ""}
    began = time.monotonic()
    with out.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "towpath.cli", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=file,
            env=environment,
        )
        most = ended = 0
        while not ended:  # ru_maxrss would begin with the memory of this process
            most = max(most, _most_kb(process.pid))
            time.sleep(_LOOK_SECONDS)
            ended, status, usage = os.wait4(process.pid, os.WNOHANG)
    seconds = time.monotonic() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"towpath {' '.join(arguments)} exited with {process.returncode}")
    return seconds, usage.ru_utime + usage.ru_stime, most / 1024


def _most_kb(pid: int) -> int:
    """The most memory a living process had so far."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1])
    return 0


async def _fault(name: str, url: str, count: int, out: Path) -> str:
    """What is wrong with the outcome of a command; empty when nothing is."""
    if name == "release":
        connection = await asyncpg.connect(url)
        row = await connection.fetchrow(_RELEASED)
        await connection.close()
        released = () if row is None else tuple(row)
        return "" if released == (count,) * 3 else f"released {released} of {count}"
    if name == "list":
        listed = len(await asyncio.to_thread(lambda: json.loads(out.read_text())))
        return "" if listed == count else f"listed {listed} of {count}"
    if name == "export":
        lines = await asyncio.to_thread(lambda: len(out.read_text().splitlines()))
        return "" if lines == count + 2 else f"exported {lines - 2} of {count}"
    return ""


async def _floor(url: str, count: int) -> Sample:
    connection = await asyncpg.connect(url, command_timeout=600)
    began = time.monotonic()
    await connection.execute(_FLOOR)
    seconds = time.monotonic() - began
    row = await connection.fetchrow(_RELEASED)
    await connection.close()
    released = () if row is None else tuple(row)
    fault = "" if released == (count,) * 3 else f"released {released} of {count}"
    return Sample(count / seconds, {}, None, seconds, is_void=bool(fault), note=fault)
