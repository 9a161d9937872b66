"""Redelivery: every message of the topic was settled before, by a worker whose offsets were lost."""

import asyncio
import time

import asyncpg
from aiokafka import TopicPartition
from aiokafka.admin import AIOKafkaAdminClient

from benchmarks.cells.round import Backlog, Round
from benchmarks.drain import DEADLINE_SECONDS, TASKS, running, worker
from benchmarks.measure import CpuMeter, Sample, difference, tree_rss_mb
from benchmarks.orders import TYPE
from benchmarks.stage import PARTITIONS

_POLL_SECONDS = 0.05
_SETTLED = """
insert into towpath.task (consumer_group, id, type, kind, source, key, lane, state, held_by, version, attempt,
                          deliveries, started_at, finished_at)
select $1, x.id, $2, 'event', $1, x.key, x.key, 'SUCCEEDED', 'broker', 2, 1, 1, towpath.clock(),
       towpath.clock()
  from unnest($3::uuid[], $4::text[]) x(id, key)
"""
_UNTOUCHED = f"select id from ({TASKS}) d join towpath.task t using (id) where t.version = 2"


async def duplicates(round_: Round) -> Sample:
    """Nothing may run again; done when the group's committed offsets reach the end of the topic.

    The rate is taken between two observations of those offsets, which are committed every 100 ms.
    """
    stage = round_.stage
    backlog = await round_.backlog("duplicates", round_.size(100_000, 10_000))
    count = len(backlog.messages)
    async with stage.database() as url:
        connection = await asyncpg.connect(url, command_timeout=600)
        await _settle(connection, backlog)
        programs = {
            "worker": worker(
                "noop",
                backlog.topic,
                url,
                stage,
                TOWPATH_BROKER_OPTIONS='{"commit_interval_ms": 100}',
            )
        }
        admin = AIOKafkaAdminClient(bootstrap_servers=stage.kafka.bootstrap)
        await admin.start()
        began = time.monotonic()
        lsn = await connection.fetchval("select pg_current_wal_lsn()::text")
        seen, first, first_at, rss, cpu = 0, 0, 0.0, 0.0, {}
        async with running(programs) as processes:
            process = processes["worker"]
            meter = CpuMeter(
                {"worker": process.pid, "postgres": stage.postgres.pid, "kafka": stage.kafka.pid}
            )
            while seen < count and time.monotonic() - began < DEADLINE_SECONDS and process.returncode is None:
                seen = await _committed(admin, backlog.topic)
                if seen and not first:
                    first, first_at = seen, time.monotonic()
                    meter.start()
                rss = max(rss, tree_rss_mb(process.pid))
                await asyncio.sleep(_POLL_SECONDS)
            seconds = time.monotonic() - first_at
            cpu = meter.stop() if first else {}
        await admin.close()
        wal_bytes = await connection.fetchval("select pg_current_wal_lsn() - $1::text::pg_lsn", lsn)
        note = difference(backlog.ids, [row[0] for row in await connection.fetch(_UNTOUCHED)])
        await connection.close()
    if seen < count:
        note = f"{count - seen} are not acknowledged; {note}"
    return Sample(
        messages_per_s=(seen - first) / max(seconds, 0.001),
        cpu_s_per_million={role: used / max(1, seen - first) * 1e6 for role, used in cpu.items()},
        rss_mb=rss,
        first_message_s=first_at - began,
        is_void=bool(note),
        note=note,
        wal_bytes_per_message=float(wal_bytes) / count,
    )


async def _settle(connection: asyncpg.Connection, backlog: Backlog) -> None:
    ids = [message.id for message in backlog.messages]
    keys = [message.key for message in backlog.messages]
    await connection.execute(_SETTLED, backlog.topic, TYPE, ids, keys)
    await connection.execute("vacuum analyze towpath.task")
    await connection.execute("checkpoint")


async def _committed(admin: AIOKafkaAdminClient, topic: str) -> int:
    partitions = [TopicPartition(topic, number) for number in range(PARTITIONS)]
    offsets = await admin.list_consumer_group_offsets(topic, partitions=partitions)
    return sum(max(0, each.offset) for each in offsets.values())
