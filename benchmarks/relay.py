"""Draining a backlog of the outbox, and publishing, each beside its reference, in alternating rounds.

Every cell compares the ids at the broker with the ids committed, as sets, and is void if they
differ. Rates are taken between the first and the last record's timestamps, CPU between the moments
in which the first and the last record were seen.
"""

import asyncio
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

import asyncpg
import psutil
from aiokafka import AIOKafkaConsumer, TopicPartition

from benchmarks.cells import publishing
from benchmarks.filling import FLOOR, ROWS_PER_TRANSACTION, outbox_rows
from benchmarks.floor import TABLE
from benchmarks.measure import Cell, CpuMeter, Sample, Target
from benchmarks.plans import Plan, run
from benchmarks.report import show
from benchmarks.sleeping import taxes, wakeups
from towpath.brokers.factory import broker_from_url
from towpath.store import migrate
from towpath.testing.services import KafkaServer, PostgresServer

ROOT = Path(__file__).parents[1]
PARTITIONS = 6


@dataclass(frozen=True)
class Subject:
    """A program that drains."""

    name: str
    fill: str
    ids: str
    command: Sequence[str]
    environment: Mapping[str, str]


def subjects(database: str, bootstrap: str, topic: str, *, quick: bool) -> list[Subject]:
    """The floor at two sizes, and the relay."""
    floor = "select message_id from public.floor_outbox"
    floors = [
        Subject(
            f"floor {size}", FLOOR, floor, ["benchmarks.floor", database, bootstrap, topic, str(size)], {}
        )
        for size in ((2000,) if quick else (2000, 500))
    ]
    relay = Subject(
        "towpath",
        outbox_rows(),
        "select message_id from towpath.outbox",
        ["outbox_relay"],
        {
            "TOWPATH_DATABASE_URL": database,
            "TOWPATH_BROKER_URL": f"kafka://{bootstrap}",
            "TOWPATH_TELEMETRY__LOG_LEVEL": "WARNING",
        },
    )
    return [*floors, relay]


class Watch:
    """Reads a topic from its beginning: when records appeared, and which."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        self._partitions = [TopicPartition(topic, number) for number in range(PARTITIONS)]
        self._consumer = AIOKafkaConsumer(
            bootstrap_servers=bootstrap, enable_auto_commit=False, auto_offset_reset="earliest"
        )

    async def start(self) -> None:
        await self._consumer.start()

    async def count(self) -> int:
        """Records so far; cheap for the broker."""
        ends = await self._consumer.end_offsets(self._partitions)
        return sum(ends.values())

    async def read(self, count: int) -> tuple[list[UUID], float]:
        """Ids of every record, and the seconds from the first to the last."""
        self._consumer.assign(self._partitions)  # not before: it would fetch while others are measured
        await self._consumer.seek_to_beginning()
        ids: list[UUID] = []
        first, last = float("inf"), 0.0
        while len(ids) < count:
            found = await self._consumer.getmany(timeout_ms=2000, max_records=5000)
            if not found:
                break
            for records in found.values():
                for record in records:
                    ids.append(UUID(dict(record.headers)["ce_id"].decode()))
                    first, last = min(first, record.timestamp), max(last, record.timestamp)
        return ids, (last - first) / 1000

    async def aclose(self) -> None:
        await self._consumer.stop()


async def drain(
    subject: Subject, count: int, server: PostgresServer, kafka: KafkaServer, topic: str, url: str
) -> Sample:
    """Fill, start the subject, wait until everything is at the broker, verify."""
    admin = broker_from_url(f"kafka://{kafka.bootstrap}").admin()
    await admin.apply([topic], [], partitions=PARTITIONS)
    await admin.aclose()
    connection = await asyncpg.connect(url, command_timeout=600)
    await connection.execute("truncate public.floor_outbox, towpath.outbox")
    await connection.execute(subject.fill)
    await connection.execute(
        f"call public.fill('{topic}', {count // ROWS_PER_TRANSACTION}, {ROWS_PER_TRANSACTION})"
    )
    await connection.execute("vacuum analyze")
    await connection.execute("checkpoint")
    committed = {row[0] for row in await connection.fetch(subject.ids)}
    await connection.close()
    watch = Watch(kafka.bootstrap, topic)
    await watch.start()
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TOWPATH_")}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", *subject.command, cwd=ROOT, env={**clean, **subject.environment}
    )
    try:
        began = time.monotonic()
        meter = CpuMeter({"relay": process.pid, "postgres": server.pid, "kafka": kafka.pid})
        seen, first_after, at_first, rss, deadline = 0, 0.0, 0, 0, began + 300
        while seen < count and time.monotonic() < deadline and process.returncode is None:
            seen = await watch.count()
            if seen and not first_after:
                first_after, at_first = time.monotonic() - began, seen
                meter.start()
            rss = max(rss, psutil.Process(process.pid).memory_info().rss)
            await asyncio.sleep(0.05)
        cpu = meter.stop() if first_after else {}
        ids, seconds = await watch.read(seen)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        await watch.aclose()
    measured = max(1, count - at_first)
    missing, extra = len(committed - set(ids)), len(ids) - len(committed & set(ids))
    return Sample(
        messages_per_s=len(ids) / max(seconds, 0.001),
        cpu_s_per_million={name: value / measured * 1e6 for name, value in cpu.items()},
        rss_mb=rss / 2**20,
        first_message_s=first_after,
        is_void=bool(missing or extra),
        note=f"{missing} missing, {extra} more than committed",
    )


async def backlog_to_kafka(*, quick: bool, as_json: bool, rounds: int) -> bool:
    """Run and print; False when a cell is void."""
    count = 60_000 if quick else 300_000
    name = f"backlog {count // 1000}k to kafka"
    settings = {"shared_buffers": "512MB", "max_wal_size": "4GB"}
    cells: dict[str, Cell] = {}
    with (
        PostgresServer(fsync=True, settings=settings) as server,
        KafkaServer(is_for_benchmark=True, heap_megabytes=1024) as kafka,
    ):
        for round_ in range(rounds + 1):
            is_warm_up = round_ == 0
            for number in range(len(subjects("", "", "", quick=quick))):
                database = f"bench_{round_}_{number}"
                url = server.create_database(database)
                await asyncio.to_thread(migrate.upgrade, url)
                connection = await asyncpg.connect(url)
                await connection.execute(TABLE)
                await connection.close()
                topic = f"orders-{round_}-{number}"
                subject = subjects(url, kafka.bootstrap, topic, quick=quick)[number]
                amount = 20_000 if is_warm_up else count
                sample = await drain(subject, amount, server, kafka, topic, url)
                server.drop_database(database)
                if not is_warm_up:
                    cells.setdefault(subject.name, Cell(name, subject.name)).samples.append(sample)
    floor = max((cell for key, cell in cells.items() if key.startswith("floor")), key=lambda cell: cell.rate)
    show(cells.values(), floor, as_json=as_json)
    return not any(cell.is_void for cell in cells.values())


def _per_second(mine: Sample, _: Sample) -> float:
    return mine.messages_per_s or 0.0


PLANS = (
    Plan(
        "rabbitmq",
        {"aio-pika": publishing.gathered, "towpath": publishing.relayed},
        ("aio-pika",),
        (Target("≥ 2.4 × aio-pika's gathered publish", 2.4),),
    ),
    Plan(
        "rabbitmq-one-key",
        {"towpath": publishing.relayed_one_key},
        (),
    ),
    Plan(
        "ack-latency-kafka",
        {"no delay": publishing.quick_kafka, "towpath": publishing.slow_kafka},
        ("no delay",),
        (Target("≥ 10,000/s at 2 ms", 10_000, _per_second),),
    ),
    Plan(
        "ack-latency-rabbitmq",
        {"no delay": publishing.quick_rabbitmq, "towpath": publishing.slow_rabbitmq},
        ("no delay",),
        (Target("≥ 10,000/s at 2 ms", 10_000, _per_second),),
    ),
)
SLEEPING = {"wakeup": wakeups, "producers": taxes}
CELLS = ("backlog", *(plan.name for plan in PLANS), *SLEEPING)


async def main(*, quick: bool, as_json: bool, rounds: int, cells: Sequence[str] = CELLS) -> bool:
    """Run and print; False when a cell is void."""
    is_valid = True
    if "backlog" in cells:
        is_valid = await backlog_to_kafka(quick=quick, as_json=as_json, rounds=rounds)
    for name in SLEEPING.keys() & set(cells):
        is_valid &= await SLEEPING[name](quick=quick, as_json=as_json, rounds=rounds)
    if chosen := [plan for plan in PLANS if plan.name in cells]:
        is_valid &= await run(chosen, quick=quick, as_json=as_json, rounds=rounds)
    return is_valid
