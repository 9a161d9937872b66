"""Run the programs of one subject until they have finished everything, measure and verify."""

import asyncio
import contextlib
import os
import sys
import time
from asyncio.subprocess import Process
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import asyncpg
import psutil

from benchmarks.measure import CpuMeter, Sample, difference, tree, tree_rss_mb
from benchmarks.stage import Stage

ROOT = Path(__file__).parents[1]
DEADLINE_SECONDS = 600.0
_POLL_SECONDS = 0.2
_GRACE_SECONDS = 5.0

TASKS = "select id, finished_at from towpath.task where state = 'SUCCEEDED' and attempt = 1"
FLOOR_DONE = "select id, finished_at from public.floor_done"
INBOX = "select id, finished_at from public.inbox"

Ready: TypeAlias = Callable[[asyncpg.Connection], Awaitable[None]]
Check: TypeAlias = Callable[[asyncpg.Connection], Awaitable[str]]
"""What is wrong with the rows that handlers wrote; empty when nothing is."""


@dataclass(frozen=True)
class Program:
    """A process to run: arguments of an interpreter, and its environment beside the usual one."""

    arguments: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    python: str = sys.executable

    async def start(self, stdout: int = asyncio.subprocess.DEVNULL, stdin: int | None = None) -> Process:
        """In the project's directory, without settings of whoever runs the benchmark.

        Bytecode is cached, or every start would compile what it imports while others are measured.
        """
        clean = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("TOWPATH_") and name != "PYTHONDONTWRITEBYTECODE"
        }
        return await asyncio.create_subprocess_exec(
            self.python,
            *self.arguments,
            cwd=ROOT,
            env={**clean, **self.environment},
            stdout=stdout,
            stdin=stdin,
        )


def worker(app: str, topic: str, url: str, stage: Stage, **settings: str) -> Program:
    """A member of one of `benchmarks.groups`; the group is named as its topic."""
    return Program(
        ["-m", "towpath.cli", "worker", "run", f"benchmarks.groups:{app}"],
        {
            "TOWPATH_DATABASE_URL": url,
            "TOWPATH_BROKER_URL": f"kafka://{stage.kafka.bootstrap}",
            "TOWPATH_TELEMETRY__LOG_LEVEL": "ERROR",
            "TOWPATH_WORKER__CONCURRENCY": "500",
            "TOWPATH_WORKER__MAX_IN_FLIGHT": "5000",
            "BENCHMARK_TOPIC": topic,
            **settings,
        },
    )


@asynccontextmanager
async def running(programs: Mapping[str, Program]) -> AsyncIterator[dict[str, Process]]:
    """The processes, by role; ended with what they started."""
    processes = {role: await program.start() for role, program in programs.items()}
    try:
        yield processes
    finally:
        for process in processes.values():
            if process.returncode is None:
                process.terminate()
        for process in processes.values():
            started = tree(process.pid)
            try:
                await asyncio.wait_for(process.wait(), _GRACE_SECONDS)
            except TimeoutError:
                for each in started:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        each.kill()
                await process.wait()


@asynccontextmanager
async def printing(program: Program) -> AsyncIterator[asyncio.StreamReader]:
    """What a process prints until it ends; it is killed when what listens fails."""
    process = await program.start(asyncio.subprocess.PIPE)
    assert process.stdout is not None
    try:
        yield process.stdout
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        raise
    finally:
        await process.wait()


async def worker_registered(connection: asyncpg.Connection) -> None:
    """Wait for a worker's first heartbeat."""
    async with asyncio.timeout(60):
        while True:
            if await connection.fetchval("select count(*) from towpath.worker"):
                return
            await asyncio.sleep(0.05)


async def drain(
    stage: Stage,
    url: str,
    programs: Mapping[str, Program],
    done: str,
    produced: Collection[object],
    *,
    check: Check | None = None,
    ready: Ready | None = None,
    others: Mapping[str, int] | None = None,
) -> Sample:
    """`done` selects id and finished_at of what is finished. Void unless that is what was produced.

    `ready` makes the work, once the programs run; `check` looks at what handlers themselves wrote.
    The rate is taken between the first and the last finished row, by the database's clock; CPU from
    when the first was seen, `others` are processes that count there too; WAL from `ready`; RSS is of
    the workers. Roles may be numbered, as `worker 2`, and are summed.
    """
    connection = await asyncpg.connect(url, command_timeout=600)
    began = time.monotonic()
    count, first_after, at_first, rss = 0, 0.0, 0, 0.0
    async with running(programs) as processes:
        if ready is not None:
            await ready(connection)
        lsn = await connection.fetchval("select pg_current_wal_lsn()::text")
        pids = {role: process.pid for role, process in processes.items()}
        meter = CpuMeter({**pids, "postgres": stage.postgres.pid, "kafka": stage.kafka.pid, **(others or {})})
        while count < len(produced) and time.monotonic() - began < DEADLINE_SECONDS:
            if any(process.returncode is not None for process in processes.values()):
                break
            count = await connection.fetchval(f"select count(*) from ({done}) d")
            if count and not first_after:
                first_after, at_first = time.monotonic() - began, count
                meter.start()
            rss = max(rss, sum(tree_rss_mb(pid) for role, pid in pids.items() if role.startswith("worker")))
            await asyncio.sleep(_POLL_SECONDS)
        cpu: Counter[str] = Counter()
        for role, used in (meter.stop() if first_after else {}).items():
            cpu[role.partition(" ")[0]] += used
    ids = [row[0] for row in await connection.fetch(f"select id from ({done}) d")]
    seconds = await connection.fetchval(
        f"select extract(epoch from max(finished_at) - min(finished_at))::float8 from ({done}) d"
    )
    wal_bytes = await connection.fetchval("select pg_current_wal_lsn() - $1::text::pg_lsn", lsn)
    note = difference(produced, ids)
    if check is not None and not note:
        note = await check(connection)
    await connection.close()
    return Sample(
        messages_per_s=len(ids) / max(seconds or 0.0, 0.001),
        cpu_s_per_million={role: used / max(1, len(ids) - at_first) * 1e6 for role, used in cpu.items()},
        rss_mb=rss,
        first_message_s=first_after,
        is_void=bool(note),
        note=note,
        wal_bytes_per_message=float(wal_bytes) / max(1, len(produced)),
    )
