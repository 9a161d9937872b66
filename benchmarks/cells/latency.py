"""From a row's commit to a consumer of the topic, at a steady rate.

A row's time begins when the INSERT that commits it is sent, so the commit is in it. The first second is
left out.
"""

import asyncio
import json
import time
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import asyncpg

from benchmarks.cells.round import Round, Trial
from benchmarks.drain import Program, running
from benchmarks.filling import FLOOR, OUTBOX, settle
from benchmarks.measure import CpuMeter, Sample, difference, percentile, tree_rss_mb
from benchmarks.relaying import Around, Subject, Watch, alone, floor, relay
from benchmarks.steady import LISTENING

_NAMES = {FLOOR: "floor", OUTBOX: "outbox"}
_START_SECONDS = 60
_WARM_SECONDS = 1.0


def at_rate(rate: int, subject: Subject, around: Around = alone) -> Trial:
    """So many single rows are committed in a second."""

    async def trial(round_: Round) -> Sample:
        return await _measure(round_, rate, subject, around)

    return trial


async def _measure(round_: Round, rate: int, subject: Subject, around: Around) -> Sample:
    stage, seconds = round_.stage, round_.size(20, 2)
    topic, kafka, count = stage.fresh_name("steady"), stage.kafka.bootstrap, rate * seconds
    await stage.topic(topic)
    async with stage.database() as url, around(url, topic), Watch(kafka, topic) as watch:
        programs = {"relay": subject.program(stage, url, topic)}
        async with running(programs) as processes:
            first = await _first(url, subject, topic, watch)
            reading = await Program(["-m", "benchmarks.steady", "read", kafka, topic, str(count + 1)]).start(
                PIPE
            )
            assert reading.stdout is not None
            if (await reading.stdout.readline()).decode().strip() != LISTENING:
                raise RuntimeError("the reader ended before it listened")
            pid = processes["relay"].pid
            meter = CpuMeter({"relay": pid, "postgres": stage.postgres.pid, "kafka": stage.kafka.pid})
            meter.start()
            arguments = ["write", url, _NAMES[subject.rows], topic, str(rate), str(seconds)]
            writing = await Program(["-m", "benchmarks.steady", *arguments]).start(PIPE)
            printed, _ = await writing.communicate()
            cpu, rss = meter.stop(), tree_rss_mb(pid)
            received_json, _ = await reading.communicate()
    sent, received = dict(json.loads(printed)), json.loads(received_json)
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


async def _first(url: str, subject: Subject, topic: str, watch: Watch) -> str:
    """Write one row and wait until the program has moved it; its id."""
    connection = await asyncpg.connect(url)
    await settle(connection)
    await connection.execute(subject.rows.insert(), topic, None, "first", 1)
    id_ = (await connection.fetch(subject.rows.select_ids(topic)))[0][0]
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


FLOOR_AT = {rate: at_rate(rate, floor(500)) for rate in (200, 1000, 3000)}
RELAY_AT = {rate: at_rate(rate, relay()) for rate in (200, 1000, 3000)}
AGAIN = at_rate(1000, relay())
"""The same as `RELAY_AT[1000]`, run once more: what a difference of nothing looks like."""
