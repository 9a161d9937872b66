"""The first row after a pause, from its COMMIT to the broker's client, and what pausing costs."""

import asyncio
import random
import time
from typing import Any

import asyncpg

from benchmarks.cells.round import Round, Trial
from benchmarks.drain import Program, running
from benchmarks.filling import OUTBOX
from benchmarks.measure import CpuMeter, Sample, difference, percentile
from benchmarks.notebook import NotingBroker
from benchmarks.stage import Stage
from towpath.relay import Relay, RelayOptions
from towpath.settings import WakeupMode


def first_after_idle(mode: WakeupMode) -> Trial:
    """Pauses of two to three seconds, each ended by one row."""

    async def trial(round_: Round) -> Sample:
        async with round_.stage.database() as url:
            return await _first(url, mode, round_.size(30, 1))

    return trial


async def _first(url: str, mode: WakeupMode, count: int) -> Sample:
    broker = NotingBroker()
    notebook, relay = broker.notebook, Relay(url, broker, RelayOptions(wakeup=mode))
    stop = asyncio.Event()
    running = asyncio.create_task(relay.run(stop))
    connection = await asyncpg.connect(url)
    waits: list[float] = []
    for _ in range(count + 1):
        await asyncio.sleep(2 + random.random())
        transaction = connection.transaction()
        await transaction.start()
        await connection.execute(OUTBOX.insert(), "orders", None, None, 1)
        committing = time.perf_counter()
        await transaction.commit()
        waits.append((await asyncio.wait_for(notebook.arrived.get(), 30) - committing) * 1000)
    committed = [row[0] for row in await connection.fetch(OUTBOX.select_ids("orders"))]
    await connection.close()
    heard_by = relay.status().wakeup
    stop.set()
    await running
    fault = difference(committed, notebook.ids)
    return Sample(
        messages_per_s=None,
        cpu_s_per_million={},
        rss_mb=None,
        first_message_s=None,
        is_void=bool(fault) or heard_by.startswith("poll") != (mode == "poll"),
        note=f"{heard_by} {fault}".strip(),
        p50_ms=percentile(waits[1:], 0.5),  # the first finds a relay that has just started
        p99_ms=percentile(waits[1:], 0.99),
    )


def idle(mode: WakeupMode) -> Trial:
    """A relay with nothing to do: percent of a core, and statements a second."""

    async def trial(round_: Round) -> Sample:
        async with round_.stage.database() as url:
            return await _idle(round_.stage, url, mode, round_.size(30, 1))

    return trial


async def _idle(stage: Stage, url: str, mode: WakeupMode, seconds: float) -> Sample:
    environment = {
        "TOWPATH_DATABASE_URL": url,
        "TOWPATH_BROKER_URL": "memory://benchmark",
        "TOWPATH_RELAY__WAKEUP": mode,
        "TOWPATH_TELEMETRY__LOG_LEVEL": "WARNING",
    }
    async with running({"relay": Program(["-m", "outbox_relay"], environment)}) as processes:
        observer = await asyncpg.connect(stage.postgres.url())
        await asyncio.sleep(2 if stage.is_quick else 10)
        before, began = await _statements(observer, url), time.monotonic()
        meter = CpuMeter({"relay": processes["relay"].pid, "postgres": stage.postgres.pid})
        meter.start()
        await asyncio.sleep(seconds)
        cpu, took = meter.stop(), time.monotonic() - began
        statements = (await _statements(observer, url) - before) / took
        is_alive = processes["relay"].returncode is None
        await observer.close()
    return Sample(
        messages_per_s=None,
        cpu_s_per_million={},
        rss_mb=None,
        first_message_s=None,
        is_void=not is_alive,
        note="" if is_alive else "the relay ended",
        idle={**{name: 100 * used / took for name, used in cpu.items()}, "statements": statements},
    )


async def _statements(observer: "asyncpg.Connection[Any]", url: str) -> int:
    count: int = await observer.fetchval(
        "select xact_commit + xact_rollback from pg_stat_database where datname = $1", url.rpartition("/")[2]
    )
    return count
