"""The first row after a pause, from its COMMIT to the broker's client, and what pausing costs."""

import asyncio
import os
import random
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import asyncpg

from benchmarks.measure import CpuMeter, Sample, percentile
from towpath.brokers.ports import OutboundMessage, PublishResult
from towpath.relay import Relay, RelayOptions
from towpath.settings import WakeupMode
from towpath.testing.services import PostgresServer

ROOT = Path(__file__).parents[2]
ROW = """
insert into towpath.outbox (shard, message_id, kind, destination, type, key, content_type, payload)
values (3, gen_random_uuid(), 'event', 'orders', 'order.placed', 'k', 'application/json',
        decode(repeat('ab', 300), 'hex'))
"""


class Stopwatch:
    """A broker, its publisher and its only use: when did a message get here?"""

    max_message_bytes = 1_000_000
    labels: Mapping[str, str | int] = MappingProxyType({})

    def __init__(self) -> None:
        self.arrived: asyncio.Queue[float] = asyncio.Queue()

    def publisher(self) -> "Stopwatch":
        return self

    def subscriber(self, subscription: object) -> Any:
        raise NotImplementedError

    def admin(self) -> Any:
        raise NotImplementedError

    async def start(self) -> None:
        """Nothing to open."""

    async def publish(self, window: Sequence[OutboundMessage], *, timeout_seconds: float) -> PublishResult:
        del timeout_seconds  # it answers at once
        for _ in window:
            self.arrived.put_nowait(time.perf_counter())
        return PublishResult(acknowledged=set(range(len(window))))

    async def aclose(self) -> None:
        """Nothing to close."""


async def first_after_idle(url: str, mode: WakeupMode, count: int) -> Sample:
    """So many pauses of two to three seconds, each ended by one row."""
    watch = Stopwatch()
    relay = Relay(url, watch, RelayOptions(wakeup=mode))
    stop = asyncio.Event()
    running = asyncio.create_task(relay.run(stop))
    connection = await asyncpg.connect(url)
    waits: list[float] = []
    for _ in range(count + 1):
        await asyncio.sleep(2 + random.random())
        transaction = connection.transaction()
        await transaction.start()
        await connection.execute(ROW)
        committing = time.perf_counter()
        await transaction.commit()
        waits.append((await asyncio.wait_for(watch.arrived.get(), 30) - committing) * 1000)
    await connection.close()
    heard_by = relay.status().wakeup
    stop.set()
    await running
    return Sample(
        messages_per_s=None,
        cpu_s_per_million={},
        rss_mb=None,
        first_message_s=None,
        is_void=heard_by.startswith("poll") != (mode == "poll") or not watch.arrived.empty(),
        note=heard_by,
        p50_ms=percentile(waits[1:], 0.5),  # the first finds a relay that has just started
        p99_ms=percentile(waits[1:], 0.99),
    )


async def idle(server: PostgresServer, url: str, mode: WakeupMode, seconds: float) -> Sample:
    """A relay with nothing to do: percent of a core, and statements a second."""
    process = await start_relay(url, mode)
    observer = await asyncpg.connect(server.url())
    try:
        await asyncio.sleep(10)
        before, began = await _statements(observer, url), time.monotonic()
        meter = CpuMeter({"relay": process.pid, "postgres": server.pid})
        meter.start()
        await asyncio.sleep(seconds)
        cpu, took = meter.stop(), time.monotonic() - began
        statements = (await _statements(observer, url) - before) / took
    finally:
        await end(process)
        await observer.close()
    return Sample(
        messages_per_s=None,
        cpu_s_per_million={},
        rss_mb=None,
        first_message_s=None,
        is_void=False,
        idle={**{name: 100 * used / took for name, used in cpu.items()}, "statements": statements},
    )


async def start_relay(url: str, mode: WakeupMode) -> asyncio.subprocess.Process:
    """The deployable, with a broker that costs next to nothing."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TOWPATH_")}
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "outbox_relay"),
        cwd=ROOT,
        env={
            **clean,
            "TOWPATH_DATABASE_URL": url,
            "TOWPATH_BROKER_URL": "memory://benchmark",
            "TOWPATH_RELAY__WAKEUP": mode,
            "TOWPATH_TELEMETRY__LOG_LEVEL": "WARNING",
        },
    )


async def end(process: asyncio.subprocess.Process) -> None:
    """Stop a relay in order."""
    if process.returncode is None:
        process.terminate()
    await process.wait()


async def _statements(observer: "asyncpg.Connection[Any]", url: str) -> int:
    count: int = await observer.fetchval(
        "select xact_commit + xact_rollback from pg_stat_database where datname = $1", url.rpartition("/")[2]
    )
    return count
