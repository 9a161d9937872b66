"""What one slow key does to the others: latency from publish to finished at a steady rate."""

import asyncio
import time
from dataclasses import replace

import asyncpg

from benchmarks.cells.round import Backlog, Round
from benchmarks.drain import TASKS, drain, worker, worker_registered
from benchmarks.groups import SLOW_KEY
from benchmarks.measure import Sample, percentile
from benchmarks.orders import KEYS, PAYLOAD
from benchmarks.stage import Message, Wire, messages

_RATE = 400
_SLOW_SHARE = 50
_SLOW_SECONDS = 0.2
_TICK_SECONDS = 0.01


async def without(round_: Round) -> Sample:
    """Every fiftieth message has the one key, which is as quick as the others."""
    return await _steady(round_, 0.0)


async def beside(round_: Round) -> Sample:
    """The same, but that key takes 200 ms a message: more than a second of work arrives in a second."""
    return await _steady(round_, _SLOW_SECONDS)


async def _steady(round_: Round, slow_seconds: float) -> Sample:
    stage = round_.stage
    topic = stage.fresh_name("slow-key")
    await stage.topic(topic, topic)
    numbers = iter(range(10**9))

    def key() -> str:
        number = next(numbers)
        return str(number * 7919 % (KEYS - 1)) if number % _SLOW_SHARE else SLOW_KEY

    backlog = Backlog(topic, messages(_RATE * round_.size(15, 2), key))
    sent_at: dict[object, float] = {}
    latencies: list[float] = []
    async with stage.database() as url:

        async def publish(connection: asyncpg.Connection) -> None:
            await worker_registered(connection)
            await asyncio.sleep(1)  # the group's first rebalance
            await _publish(round_, backlog, sent_at)

        async def measure(connection: asyncpg.Connection) -> str:
            for id_, finished_at in await connection.fetch(TASKS):
                if id_ in sent_at:
                    latencies.append((finished_at.timestamp() - sent_at[id_]) * 1000)
            return ""

        settings = {"TOWPATH_WORKER__CONCURRENCY": "64", "BENCHMARK_SLEEP_SECONDS": str(slow_seconds)}
        programs = {"worker": worker("slow_key", topic, url, stage, **settings)}
        sample = await drain(stage, url, programs, TASKS, backlog.ids, check=measure, ready=publish)
    if not latencies:
        return sample
    return replace(
        sample,
        messages_per_s=None,
        first_message_s=None,
        cpu_s_per_million={},
        p50_ms=percentile(latencies, 0.5),
        p99_ms=percentile(latencies, 0.99),
        wal_bytes_per_message=None,
    )


async def _publish(round_: Round, backlog: Backlog, sent_at: dict[object, float]) -> None:
    """At a steady rate; notes when each message of another key than the slow one was sent."""
    wire = Wire()
    began = time.monotonic()
    async with round_.stage.producer() as producer:
        answers = []
        for number, message in enumerate(backlog.messages):
            ahead = number / _RATE - (time.monotonic() - began)
            if ahead > 0:
                await asyncio.sleep(max(ahead, _TICK_SECONDS))
            answers.append(await _send(producer, backlog.topic, message, number, wire))
            if message.key != SLOW_KEY:
                sent_at[message.id] = time.time()
        await asyncio.gather(*answers)


async def _send(producer: object, topic: str, message: Message, number: int, wire: Wire) -> object:
    headers = list(wire.headers(message, number))
    return await producer.send(topic, PAYLOAD, key=message.key.encode(), headers=headers)  # type: ignore[attr-defined]
