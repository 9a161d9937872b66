"""FastStream over Kafka with an inbox by hand: for each message a transaction with INSERT … ON CONFLICT.

A batch subscriber, acknowledged once behind all inserts of its batch (`AckPolicy.ACK`, not the default),
which run over 16 connections; uvloop, no logging. Its other way, `max_workers` with an acknowledgement
behind each message, commits offsets for each and was several times slower.
"""

import asyncio

import asyncpg
import uvloop
from faststream import AckPolicy, FastStream
from faststream.kafka import KafkaBroker, KafkaMessage

from benchmarks.peers.inbox import BROKER, DATABASE, INSERT, NAME, produced, run

CONNECTIONS = 16
BATCH = 500

broker = KafkaBroker(BROKER, logger=None)
app = FastStream(broker, logger=None)
pools: list[asyncpg.Pool] = []


@app.on_startup
async def connect() -> None:
    pools.append(await asyncpg.create_pool(DATABASE, min_size=CONNECTIONS, max_size=CONNECTIONS))


async def insert(id_: str) -> None:
    async with pools[0].acquire() as connection, connection.transaction():
        await connection.execute(INSERT.format("$1"), id_)


@broker.subscriber(
    NAME,
    group_id=f"{NAME}-faststream",
    auto_offset_reset="earliest",
    batch=True,
    max_records=BATCH,
    ack_policy=AckPolicy.ACK,
)
async def orders(_: list[bytes], message: KafkaMessage) -> None:
    await asyncio.gather(*(insert(headers["ce_id"]) for headers in message.batch_headers))


def fill() -> int:
    return len(produced())  # they are in the topic already


if __name__ == "__main__":
    run(fill, lambda: uvloop.run(app.run()))
