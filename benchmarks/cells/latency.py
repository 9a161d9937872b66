"""From a row's commit to a consumer of the topic, at a steady rate.

A row's time begins when the INSERT that commits it is sent, so the commit is in it. The first second is
left out.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import asyncpg

from benchmarks.cells.round import Round, Trial
from benchmarks.drain import Program, printing, running
from benchmarks.filling import DEBEZIUM, FLOOR, OUTBOX, Rows, settle
from benchmarks.measure import CpuMeter, Sample, difference, percentile, tree_rss_mb
from benchmarks.relaying import Around, Subject, Watch, alone, floor, relay
from benchmarks.steady import LISTENING

RATES = (200, 1000, 3000)
_NAMES = {FLOOR: "floor", OUTBOX: "outbox", DEBEZIUM: "debezium"}
_START_SECONDS = 60
_WARM_SECONDS = 1.0


def at_rate(rate: int, subject: Subject, around: Around = alone) -> Trial:
    """So many single rows are committed in a second."""

    async def trial(round_: Round) -> Sample:
        return await _measure(round_, rate, subject, around)

    return trial


async def _measure(round_: Round, rate: int, subject: Subject, around: Around) -> Sample:
    stage = round_.stage
    topic = stage.fresh_name("steady")
    await stage.topic(topic)
    async with (
        stage.database() as url,
        around(url, topic),
        running({"relay": subject.program(stage, url, topic)}) as processes,
    ):
        return await load(round_, rate, subject.rows, url, topic, processes["relay"].pid)


async def load(round_: Round, rate: int, rows: Rows, url: str, topic: str, pid: int) -> Sample:
    """Of a program that runs already."""
    stage, seconds = round_.stage, round_.size(20, 2)
    kafka, count = stage.kafka.bootstrap, rate * seconds
    async with Watch(kafka, topic) as watch:
        first = await _first(url, rows, topic, watch)
    reader = Program(["-m", "benchmarks.steady", "read", kafka, topic, str(count + 1)])
    arguments = ["write", url, _NAMES[rows], topic, str(rate), str(seconds)]
    writer = Program(["-m", "benchmarks.steady", *arguments])
    async with printing(reader) as received_lines:
        if (await received_lines.readline()).decode().strip() != LISTENING:
            raise RuntimeError("the reader ended before it listened")
        meter = CpuMeter({"relay": pid, "postgres": stage.postgres.pid, "kafka": stage.kafka.pid})
        meter.start()
        async with printing(writer) as sent_lines:
            sent_json = await sent_lines.read()
        cpu, rss = meter.stop(), tree_rss_mb(pid)
        received_json = await received_lines.read()
    sent, received = dict(json.loads(sent_json)), json.loads(received_json)
    note = difference([first, *sent], [id_ for id_, _ in received])
    begin = min(sent.values()) + min(_WARM_SECONDS, seconds / 2)
    waits = [(at - sent[id_]) * 1000 for id_, at in received if id_ in sent and sent[id_] >= begin]
    sample = Sample(
        messages_per_s=count / (max(sent.values()) - min(sent.values())),
        cpu_s_per_million={name: used / count * 1e6 for name, used in cpu.items()},
        rss_mb=rss,
        first_message_s=None,
        is_void=bool(note),
        note=note,
    )
    if not waits:
        return sample
    return replace(sample, p50_ms=percentile(waits, 0.5), p99_ms=percentile(waits, 0.99))


async def _first(url: str, rows: Rows, topic: str, watch: Watch) -> str:
    """Write one row and wait until the program has moved it; its id."""
    connection = await asyncpg.connect(url)
    await settle(connection)
    await connection.execute(rows.insert(), topic, None, "first", 1)
    id_ = (await connection.fetch(rows.select_ids(topic)))[0][0]
    await connection.close()
    deadline = time.monotonic() + _START_SECONDS
    while not await watch.count():
        if time.monotonic() > deadline:
            raise TimeoutError("the first row was not moved")
        await asyncio.sleep(0.05)
    hexadecimal: str = id_.hex
    return hexadecimal


def _uncommitted(count: int) -> Around:
    @asynccontextmanager
    async def around(url: str, topic: str) -> AsyncIterator[None]:
        """A transaction that has written so many rows and rolls back in the end."""
        connection = await asyncpg.connect(url, command_timeout=600)
        transaction = connection.transaction()
        await transaction.start()
        await connection.execute(OUTBOX.insert(), topic, None, None, count)
        yield
        await transaction.rollback()
        await connection.close()

    return around


async def beside_uncommitted(round_: Round) -> Sample:
    """1,000 a second beside a transaction that has 300,000 rows."""
    count = round_.size(300_000, 1_000)
    return await _measure(round_, 1000, relay(), _uncommitted(count))


FLOOR_AT = {rate: at_rate(rate, floor(500)) for rate in RATES}
RELAY_AT = {rate: at_rate(rate, relay()) for rate in RATES}
AGAIN = at_rate(1000, relay())
"""The same as `RELAY_AT[1000]`, run once more: what a difference of nothing looks like."""
