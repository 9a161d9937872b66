"""Run a program that moves rows to a topic until everything is there, measure and verify."""

import asyncio
import time
from asyncio.subprocess import Process
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Self, TypeAlias
from uuid import UUID

import asyncpg
from aiokafka import AIOKafkaConsumer, TopicPartition

from benchmarks.drain import DEADLINE_SECONDS, Program, running
from benchmarks.filling import FLOOR, OUTBOX, ROWS_PER_TRANSACTION, Rows, fill
from benchmarks.measure import CpuMeter, Sample, difference, tree_rss_mb
from benchmarks.stage import PARTITIONS, Stage, id_of

_POLL_SECONDS = 0.05

Around: TypeAlias = Callable[[str, str], AbstractAsyncContextManager[None]]
"""What goes on in the database (of this URL) meanwhile; it may write rows for the topic."""


Waiting: TypeAlias = tuple[Sequence[UUID], Callable[[], Awaitable[object]] | None]
"""The ids to move, and what commits them, unless they are committed."""


@dataclass(frozen=True)
class Subject:
    """Something that moves rows to Kafka."""

    rows: Rows
    program: Callable[[Stage, str, str], Program]
    """Of a stage, a database and a topic."""
    install: Callable[[str], Awaitable[None]] | None = None
    """Makes its table, unless every database has it."""


def floor(batch: int) -> Subject:
    """The floor with batches of this size."""

    def program(stage: Stage, url: str, topic: str) -> Program:
        return Program(["-m", "benchmarks.floor", url, stage.kafka.bootstrap, topic, str(batch)])

    return Subject(FLOOR, program)


def relay(**environment: str) -> Subject:
    """The relay."""

    def program(stage: Stage, url: str, _: str) -> Program:
        return Program(
            ["-m", "outbox_relay"],
            {
                "TOWPATH_DATABASE_URL": url,
                "TOWPATH_BROKER_URL": f"kafka://{stage.kafka.bootstrap}",
                "TOWPATH_TELEMETRY__LOG_LEVEL": "ERROR",
                **environment,
            },
        )

    return Subject(OUTBOX, program)


class Watch:
    """Reads a topic from its beginning: when records appeared, and which."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        self._partitions = [TopicPartition(topic, number) for number in range(PARTITIONS)]
        self._consumer = AIOKafkaConsumer(
            bootstrap_servers=bootstrap, enable_auto_commit=False, auto_offset_reset="earliest"
        )

    async def __aenter__(self) -> Self:
        await self._consumer.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._consumer.stop()

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
            found = await self._consumer.getmany(timeout_ms=10_000, max_records=5000)
            if not found:
                break
            for records in found.values():
                for record in records:
                    ids.append(id_of(record.headers))
                    first, last = min(first, record.timestamp), max(last, record.timestamp)
        return ids, (last - first) / 1000


@asynccontextmanager
async def alone(_url: str, _topic: str) -> AsyncIterator[None]:
    """Nothing else."""
    yield


async def drain(
    stage: Stage,
    subject: Subject,
    count: int,
    *,
    rows_each: int = ROWS_PER_TRANSACTION,
    around: Around = alone,
    url: str | None = None,
) -> Sample:
    """Fill a database, a new one unless there is a URL, start the subject, wait until all is there."""
    if url is None:
        async with stage.database() as fresh:
            return await drain(stage, subject, count, rows_each=rows_each, around=around, url=fresh)
    topic = stage.fresh_name("drained")
    await stage.topic(topic)
    if subject.install is not None:
        await subject.install(url)
    connection = await asyncpg.connect(url, command_timeout=DEADLINE_SECONDS)
    async with around(url, topic):
        committed = await fill(connection, subject.rows, topic, count, rows_each=rows_each)

        async def wait() -> Waiting:
            return committed, None

        sample = await move(stage, url, topic, {"relay": subject.program(stage, url, topic)}, wait)
    await connection.close()
    return sample


async def move(
    stage: Stage,
    url: str,
    topic: str,
    programs: Mapping[str, Program],
    wait: Callable[[], Awaitable[Waiting]],
) -> Sample:
    """Run programs until the topic has the rows of which `wait`, called behind their start, gives the ids."""
    async with Watch(stage.kafka.bootstrap, topic) as watch, running(programs) as processes:
        return await observe(stage, url, watch, processes, wait)


async def observe(
    stage: Stage,
    url: str,
    watch: Watch,
    processes: Mapping[str, Process],
    wait: Callable[[], Awaitable[Waiting]],
) -> Sample:
    """Measure processes that run already until the topic has the rows of which `wait` gives the ids.

    Roles may be numbered, as `relay 2`, and are summed. The rate is taken between the first and the last
    record's timestamps. CPU and WAL count from the commit; when there is none because rows were there
    before the programs, CPU counts from when the first record was seen.
    """
    connection = await asyncpg.connect(url, command_timeout=DEADLINE_SECONDS)
    pids = {role: process.pid for role, process in processes.items()}
    meter = CpuMeter({**pids, "postgres": stage.postgres.pid, "kafka": stage.kafka.pid})
    began = time.monotonic()
    committed, commit = await wait()
    lsn = await connection.fetchval("select pg_current_wal_lsn()::text")
    if commit is not None:
        began = time.monotonic()
        meter.start()
        await commit()
    count, seen, first_after, at_first, rss = len(committed), 0, 0.0, 0, 0.0
    while seen < count and time.monotonic() - began < DEADLINE_SECONDS:
        if any(process.returncode is not None for process in processes.values()):
            break
        seen = await watch.count()
        if seen and not first_after:
            first_after = time.monotonic() - began
            if commit is None:
                at_first = seen
                meter.start()
        rss = max(rss, sum(tree_rss_mb(pid) for pid in pids.values()))
        await asyncio.sleep(_POLL_SECONDS)
    cpu: Counter[str] = Counter()
    for role, used in (meter.stop() if first_after else {}).items():
        cpu[role.partition(" ")[0]] += used
    wal_bytes = await connection.fetchval("select pg_current_wal_lsn() - $1::text::pg_lsn", lsn)
    await connection.close()
    ids, seconds = await watch.read(seen)
    note = difference(committed, ids)
    measured = max(1, count - at_first)
    return Sample(
        messages_per_s=len(ids) / max(seconds, 0.001),
        cpu_s_per_million={role: used / measured * 1e6 for role, used in cpu.items()},
        rss_mb=rss,
        first_message_s=first_after,
        is_void=bool(note),
        note=note,
        wal_bytes_per_message=float(wal_bytes) / max(1, count),
    )
