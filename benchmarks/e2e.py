"""From a backlog of the outbox to finished tasks, through relay, Kafka and one worker, beside the floor.

Every cell compares the ids that are finished with the ids committed, as sets, and is void if they
differ. Rates are taken between the first and the last finished row, by the database's clock, CPU
over the same time.
"""

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import asyncpg
import psutil

from benchmarks import floor, floor_consumer
from benchmarks.measure import Cell, CpuMeter, Sample, show
from benchmarks.relay import FLOOR, OUTBOX, PARTITIONS, ROOT, ROWS_PER_TRANSACTION
from towpath.brokers.factory import broker_from_url
from towpath.brokers.ports import GroupTopology
from towpath.store import migrate
from towpath.testing.services import KafkaServer, PostgresServer

DEADLINE_SECONDS = 600.0
SUBJECTS = ("floor", "noop", "batch")


@dataclass(frozen=True)
class Subject:
    """Two programs: one moves rows to Kafka, one finishes what arrives."""

    name: str
    fill: str
    committed: str
    done: str
    commands: Mapping[str, Sequence[str]]
    environment: Mapping[str, str]


def subject(name: str, database: str, bootstrap: str, topic: str) -> Subject:
    """The floor, or towpath with one of `benchmarks.groups`."""
    if name == "floor":
        return Subject(
            name,
            FLOOR,
            "select message_id from public.floor_outbox",
            "public.floor_done",
            {
                "relay": ["-m", "benchmarks.floor", database, bootstrap, topic, "500"],
                "worker": ["-m", "benchmarks.floor_consumer", database, bootstrap, topic],
            },
            {},
        )
    return Subject(
        name,
        OUTBOX,
        "select message_id from towpath.outbox",
        "towpath.task",
        {
            "relay": ["-m", "outbox_relay"],
            "worker": ["-m", "towpath.cli", "worker", "run", f"benchmarks.groups:{name}"],
        },
        {
            "TOWPATH_DATABASE_URL": database,
            "TOWPATH_BROKER_URL": f"kafka://{bootstrap}",
            "TOWPATH_TELEMETRY__LOG_LEVEL": "WARNING",
            "TOWPATH_WORKER__CONCURRENCY": "500",
            "TOWPATH_WORKER__MAX_IN_FLIGHT": "5000",
            "BENCHMARK_TOPIC": topic,
        },
    )


@asynccontextmanager
async def running(subject: Subject) -> AsyncIterator[dict[str, int]]:
    """Its processes, by role."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TOWPATH_")}
    processes = {
        role: await asyncio.create_subprocess_exec(
            sys.executable, *command, cwd=ROOT, env={**clean, **subject.environment}
        )
        for role, command in subject.commands.items()
    }
    try:
        yield {role: process.pid for role, process in processes.items()}
    finally:
        for process in processes.values():
            if process.returncode is None:
                process.kill()
            await process.wait()


async def finish(
    subject: Subject, count: int, server: PostgresServer, kafka: KafkaServer, topic: str, url: str
) -> Sample:
    """Fill, start the subject, wait until everything is finished, verify."""
    admin = broker_from_url(f"kafka://{kafka.bootstrap}").admin()
    await admin.apply([topic], [GroupTopology(subject.name, (topic,))], partitions=PARTITIONS)
    await admin.aclose()
    connection = await asyncpg.connect(url, command_timeout=600)
    await connection.execute(subject.fill)
    await connection.execute(
        f"call public.fill('{topic}', {count // ROWS_PER_TRANSACTION}, {ROWS_PER_TRANSACTION})"
    )
    await connection.execute("vacuum analyze")
    await connection.execute("checkpoint")
    committed = {row[0] for row in await connection.fetch(subject.committed)}
    finished = f"select count(*) from {subject.done} where finished_at is not null"
    began = time.monotonic()
    first_after, at_first, rss = 0.0, 0, 0
    async with running(subject) as pids:
        meter = CpuMeter({**pids, "postgres": server.pid, "kafka": kafka.pid})
        done = 0
        while done < count and time.monotonic() - began < DEADLINE_SECONDS:
            done = await connection.fetchval(finished)
            if done and not first_after:
                first_after, at_first = time.monotonic() - began, done
                meter.start()
            rss = max(rss, psutil.Process(pids["worker"]).memory_info().rss)
            await asyncio.sleep(0.1)
        cpu = meter.stop() if first_after else {}
    ids = {
        row[0]
        for row in await connection.fetch(f"select id from {subject.done} where finished_at is not null")
    }
    seconds = await connection.fetchval(
        f"select extract(epoch from max(finished_at) - min(finished_at))::float8 from {subject.done}"
    )
    await connection.close()
    missing, extra = len(committed - ids), len(ids - committed)
    return Sample(
        messages_per_s=len(ids) / max(seconds or 0.0, 0.001),
        cpu_s_per_million={role: used / max(1, count - at_first) * 1e6 for role, used in cpu.items()},
        rss_mb=rss / 2**20,
        first_message_s=first_after,
        is_void=bool(missing or extra),
        note=f"{missing} missing, {extra} more than committed",
    )


async def main(*, quick: bool, as_json: bool, rounds: int) -> bool:
    """Run and print; False when a cell is void."""
    count = 20_000 if quick else 100_000
    settings = {"shared_buffers": "512MB", "max_wal_size": "4GB"}
    cells = {name: Cell(f"{count // 1000}k to finished", name) for name in SUBJECTS}
    with (
        PostgresServer(fsync=True, settings=settings) as server,
        KafkaServer(is_for_benchmark=True, heap_megabytes=1024) as kafka,
    ):
        for round_ in range(rounds):
            for name in SUBJECTS:
                database = f"bench_{round_}_{name}"
                url = server.create_database(database)
                await asyncio.to_thread(migrate.upgrade, url)
                connection = await asyncpg.connect(url)
                await connection.execute(floor.TABLE + ";" + floor_consumer.TABLE)
                await connection.close()
                topic = f"{name}-{round_}"
                programs = subject(name, url, kafka.bootstrap, topic)
                cells[name].samples.append(await finish(programs, count, server, kafka, topic, url))
                server.drop_database(database)
    show(cells.values(), cells["floor"], as_json=as_json)
    return not any(cell.is_void for cell in cells.values())
