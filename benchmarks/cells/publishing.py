"""Publishing to RabbitMQ from a backlog of the outbox, and to both brokers when they answer late.

Rates of a backlog are taken between the moments in which the queue's first and last message were seen.
"""

import asyncio
import time
from collections.abc import Collection, Mapping
from uuid import UUID

import aiormq
import asyncpg
from aiokafka import AIOKafkaConsumer, TopicPartition

from benchmarks.cells.round import Round
from benchmarks.drain import DEADLINE_SECONDS, Program, running
from benchmarks.filling import OUTBOX, RANDOM_KEY, fill
from benchmarks.measure import CpuMeter, Sample, difference, tree_rss_mb
from benchmarks.stage import PARTITIONS
from towpath.brokers.factory import broker_from_url
from towpath.brokers.ports import GroupTopology
from towpath.brokers.rabbitmq.topology import group_queue
from towpath.testing.proxy import TcpProxy

_POLL_SECONDS = 0.02
_ONE_WAY_SECONDS = 0.001


async def exchange(url: str, name: str) -> str:
    """An exchange with the quorum queue of a group; the queue's name."""
    admin = broker_from_url(url).admin()
    await admin.apply([name], [GroupTopology(name, (name,))], partitions=1)
    await admin.aclose()
    return group_queue(name, name, 0)


async def read_queue(channel: aiormq.abc.AbstractChannel, queue: str, count: int) -> list[UUID]:
    """The ids in a queue, until there are so many and no more come."""
    ids: list[UUID] = []
    arrived = asyncio.Event()

    async def take(message: aiormq.abc.DeliveredMessage) -> None:
        ids.append(UUID(message.header.properties.message_id))
        arrived.set()

    await channel.basic_consume(queue, take, no_ack=True)
    while True:
        arrived.clear()
        try:
            await asyncio.wait_for(arrived.wait(), 1 if len(ids) >= count else 20)
        except TimeoutError:
            return ids


async def _publish(round_: Round, program: Program, queue: str, produced: Collection[UUID]) -> Sample:
    """Run a program until the queue holds everything."""
    stage, count = round_.stage, len(produced)
    connection = await aiormq.connect(stage.rabbit.url)
    channel = await connection.channel()
    async with running({"publisher": program}) as processes:
        pid = processes["publisher"].pid
        meter = CpuMeter({"publisher": pid, "postgres": stage.postgres.pid, "rabbitmq": stage.rabbit.pid})
        began, seen, first, first_at, last_at, rss = time.monotonic(), 0, 0, 0.0, 0.0, 0.0
        cpu: Mapping[str, float] = {}
        while seen < count and time.monotonic() - began < DEADLINE_SECONDS:
            declared = await channel.queue_declare(queue, passive=True)
            seen, last_at = declared.message_count or 0, time.monotonic()
            if seen and not first:
                first, first_at = seen, last_at
                meter.start()
            rss = max(rss, tree_rss_mb(pid))
            await asyncio.sleep(_POLL_SECONDS)
        cpu = meter.stop() if first else {}
    note = difference(produced, await read_queue(channel, queue, seen))
    await connection.close()
    measured = max(1, count - first)
    return Sample(
        messages_per_s=measured / max(last_at - first_at, 0.001),
        cpu_s_per_million={name: value / measured * 1e6 for name, value in cpu.items()},
        rss_mb=rss,
        first_message_s=first_at - began,
        is_void=bool(note),
        note=note,
    )


async def gathered(round_: Round) -> Sample:
    """aio-pika: 500 publishes with confirms at a time, of messages that are in memory already."""
    url, name = round_.stage.rabbit.url, round_.stage.fresh_name("gathered")
    queue = await exchange(url, name)
    count = round_.size(30_000, 200)
    program = Program(["-m", "benchmarks.publish_windows", "aio-pika", url, name, str(count)])
    return await _publish(round_, program, queue, [UUID(int=number) for number in range(1, count + 1)])


async def relayed(round_: Round) -> Sample:
    """The relay, from the outbox: a thousand keys."""
    return await _relayed(round_, round_.size(100_000, 500), RANDOM_KEY)


async def relayed_one_key(round_: Round) -> Sample:
    """The relay, from the outbox: every message waits for the confirm of the one before it."""
    return await _relayed(round_, round_.size(5_000, 50), "'hot'")


async def _relayed(round_: Round, count: int, key: str) -> Sample:
    stage = round_.stage
    name = stage.fresh_name("relayed")
    queue = await exchange(stage.rabbit.url, name)
    async with stage.database() as url:
        connection = await asyncpg.connect(url, command_timeout=600)
        produced = await fill(connection, OUTBOX, name, count, key=key)
        await connection.close()
        environment = {
            "TOWPATH_DATABASE_URL": url,
            "TOWPATH_BROKER_URL": stage.rabbit.url,
            "TOWPATH_TELEMETRY__LOG_LEVEL": "ERROR",
        }
        return await _publish(round_, Program(["-m", "outbox_relay"], environment), queue, produced)


async def slow_rabbitmq(round_: Round) -> Sample:
    """Windows to a quorum queue, 1 ms there and 1 ms back."""
    return await _rabbitmq(round_, _ONE_WAY_SECONDS)


async def quick_rabbitmq(round_: Round) -> Sample:
    """The same through a proxy that holds nothing back."""
    return await _rabbitmq(round_, 0)


async def slow_kafka(round_: Round) -> Sample:
    """Windows to a topic of six partitions, 1 ms there and 1 ms back."""
    return await _kafka(round_, _ONE_WAY_SECONDS)


async def quick_kafka(round_: Round) -> Sample:
    """The same through a proxy that holds nothing back."""
    return await _kafka(round_, 0)


async def _rabbitmq(round_: Round, delay_seconds: float) -> Sample:
    stage = round_.stage
    name = stage.fresh_name("late-rabbitmq")
    queue = await exchange(stage.rabbit.url, name)
    count = round_.size(60_000, 20_000)
    async with TcpProxy("127.0.0.1", stage.rabbit.port) as proxy:
        url = stage.rabbit.url.replace(str(stage.rabbit.port), str(proxy.port))
        sample = await _through(proxy, delay_seconds, url, name, count)
    connection = await aiormq.connect(stage.rabbit.url)
    ids = await read_queue(await connection.channel(), queue, count)
    await connection.close()
    return _verified(sample, count, ids)


async def _kafka(round_: Round, delay_seconds: float) -> Sample:
    stage = round_.stage
    name = stage.fresh_name("late-kafka")
    await stage.topic(name, name)
    count = round_.size(60_000, 20_000)
    async with TcpProxy("127.0.0.1", stage.kafka.proxied_port, port=stage.kafka.advertised_port) as proxy:
        sample = await _through(proxy, delay_seconds, f"kafka://127.0.0.1:{proxy.port}", name, count)
    consumer = AIOKafkaConsumer(bootstrap_servers=stage.kafka.bootstrap, auto_offset_reset="earliest")
    await consumer.start()
    consumer.assign([TopicPartition(name, number) for number in range(PARTITIONS)])
    ids: list[UUID] = []
    while found := await consumer.getmany(timeout_ms=2000, max_records=5000):
        ids += [
            UUID(dict(record.headers)["ce_id"].decode()) for records in found.values() for record in records
        ]
    await consumer.stop()
    return _verified(sample, count, ids)


async def _through(proxy: TcpProxy, delay_seconds: float, url: str, address: str, count: int) -> Sample:
    """Publish through a proxy, from a process of its own."""
    await proxy.delay(delay_seconds)
    program = Program(["-m", "benchmarks.publish_windows", "towpath", url, address, str(count)])
    process = await program.start(stdout=asyncio.subprocess.PIPE)
    printed, _ = await process.communicate()
    if process.returncode:
        return Sample(None, {}, None, None, is_void=True, note=f"exit code {process.returncode}")
    return Sample(count / float(printed), {}, None, None, is_void=False)


def _verified(sample: Sample, count: int, ids: list[UUID]) -> Sample:
    sample.note = sample.note or difference([UUID(int=number) for number in range(1, count + 1)], ids)
    sample.is_void = bool(sample.note)
    return sample
