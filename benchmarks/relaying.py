"""Run a program that drains the outbox into a topic until everything is there, measure and verify."""

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

from benchmarks.filling import FLOOR, ROWS_PER_TRANSACTION, outbox_rows
from benchmarks.measure import CpuMeter, Sample
from towpath.brokers.factory import broker_from_url
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


def relay(database: str, bootstrap: str, name: str = "towpath", **environment: str) -> Subject:
    """The relay."""
    return Subject(
        name,
        outbox_rows(),
        "select message_id from towpath.outbox",
        ["outbox_relay"],
        {
            "TOWPATH_DATABASE_URL": database,
            "TOWPATH_BROKER_URL": f"kafka://{bootstrap}",
            "TOWPATH_TELEMETRY__LOG_LEVEL": "WARNING",
            **environment,
        },
    )


def subjects(database: str, bootstrap: str, topic: str, *, quick: bool) -> list[Subject]:
    """The floor at two sizes, and the relay."""
    floor = "select message_id from public.floor_outbox"
    floors = [
        Subject(
            f"floor {size}", FLOOR, floor, ["benchmarks.floor", database, bootstrap, topic, str(size)], {}
        )
        for size in ((2000,) if quick else (2000, 500))
    ]
    return [*floors, relay(database, bootstrap)]


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
