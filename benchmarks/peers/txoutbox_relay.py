"""txoutbox over Kafka: `python -m benchmarks.peers.txoutbox_relay install|work`.

Default: the README's relay, whose publisher awaits `send_and_wait`, with an idempotent producer. Tuned:
`batch_size=500`, `concurrency=100`, rows deleted when acknowledged, and wake-up by notification. Order by key
(`strict_ordering`) is on in both, as in its documentation.
"""

import asyncio
import os
import sys

import asyncpg
from aiokafka import AIOKafkaProducer
from txoutbox import OutboxMessage, Relay, RelayConfig
from txoutbox.adapters.postgres import PostgresStorage

from benchmarks.peers.inbox import BROKER, DATABASE

IS_TUNED = bool(os.environ.get("PEER_TUNED"))


def storage_of(pool: asyncpg.Pool) -> PostgresStorage:
    return (
        PostgresStorage(pool, delete_on_ack=True, notify_channel="outbox")
        if IS_TUNED
        else PostgresStorage(pool)
    )


async def install() -> None:
    async with asyncpg.create_pool(DATABASE) as pool:
        await storage_of(pool).create_schema()


async def work() -> None:
    producer = AIOKafkaProducer(bootstrap_servers=BROKER, acks="all", enable_idempotence=True)
    await producer.start()

    async def publish(message: OutboxMessage) -> None:
        headers = [(name, value.encode()) for name, value in message.headers.items()]
        await producer.send_and_wait(
            message.topic, message.payload, key=message.key.encode(), headers=headers
        )

    async with asyncpg.create_pool(DATABASE) as pool:
        storage = storage_of(pool)
        config = RelayConfig(batch_size=500, concurrency=100) if IS_TUNED else RelayConfig()
        relay = Relay(storage, publish, config=config)
        if IS_TUNED:
            await storage.listen(relay.wake)
        await relay.run(handle_signals=True)
    await producer.stop()


if __name__ == "__main__":
    asyncio.run(install() if sys.argv[1] == "install" else work())
