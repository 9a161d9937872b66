"""A partition without a leader, on three real brokers, holds up nobody but those that go there."""

import asyncio
import uuid
from collections.abc import Iterator
from typing import Any

import asyncpg
import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from tests.integration.relaying import FAST, emit, eventually, relaying
from towpath.brokers.factory import broker_from_url
from towpath.brokers.kafka.murmur2 import partition_of
from towpath.testing.services import KafkaCluster

NODES = (1, 2, 3)
SHARD = "select towpath.shard($1, $2, gen_random_uuid())"


@pytest.fixture(scope="module")
def cluster() -> Iterator[KafkaCluster]:
    with KafkaCluster() as cluster:
        yield cluster


async def topic_of_one_replica(bootstrap: str) -> str:
    """Its partitions are on one broker each."""
    topic = f"orders-{uuid.uuid4().hex[:8]}"
    places = {node - 1: [node] for node in NODES}
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    settings = {"min.insync.replicas": "1"}
    await admin.create_topics([NewTopic(topic, -1, -1, replica_assignments=places, topic_configs=settings)])
    await admin.close()
    return topic


@pytest.mark.services
async def test_a_partition_without_a_leader_holds_up_its_own_messages_only(
    db: "asyncpg.Connection[Any]", migrated_url: str, cluster: KafkaCluster
) -> None:
    """R6, R7: the others are published while its broker is dead, and its own in order when it is back."""
    topic = await topic_of_one_replica(cluster.bootstrap)
    broker: Any = broker_from_url(f"kafka://{cluster.bootstrap}", {"request_timeout_ms": 3_000})
    consumer = AIOKafkaConsumer(bootstrap_servers=cluster.bootstrap, auto_offset_reset="earliest")
    await consumer.start()
    consumer.assign([TopicPartition(topic, node - 1) for node in NODES])
    values: list[bytes] = []

    async def read() -> None:
        while True:
            values.append((await consumer.getone()).value)

    reading = asyncio.create_task(read())
    keys = [f"k{number}" for number in range(200)]
    dead = next(key for key in keys if partition_of(key.encode(), 3) == 2)
    shard = await db.fetchval(SHARD, topic, dead)
    others = [
        key
        for key in keys
        if partition_of(key.encode(), 3) != 2 and await db.fetchval(SHARD, topic, key) != shard
    ][:20]
    async with relaying(migrated_url, broker, FAST) as relay:
        await eventually(lambda: len(relay.status().shards) == 16)
        await emit(db, dead, b"before", destination=topic)
        await eventually(lambda: values == [b"before"])
        cluster.broker(3).kill()
        for payload in (b"first", b"second"):
            await emit(db, dead, payload, destination=topic)
        for key in others:
            await emit(db, key, key.encode(), destination=topic)
            await eventually(lambda key=key: key.encode() in values)  # type: ignore[misc]
        assert not {b"first", b"second"} & set(values)
        assert not relay.status().is_ready
        await asyncio.to_thread(cluster.broker(3).start)
        await eventually(lambda: b"second" in values)
        await eventually(lambda: relay.status().is_ready)
    reading.cancel()
    await consumer.stop()
    own = list(dict.fromkeys(value for value in values if value in (b"before", b"first", b"second")))
    assert own == [b"before", b"first", b"second"]
