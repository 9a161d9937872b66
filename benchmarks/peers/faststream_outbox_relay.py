"""faststream-outbox over Kafka: `python -m benchmarks.peers.faststream_outbox_relay install|work`.

Default: the README's relay, a Kafka publisher stacked on a subscriber. Tuned: 50 workers, 500 rows fetched at
a time, 100 finished rows deleted at a time, an engine with a connection for each worker, uvloop, and the
table's autovacuum settings. No logging in both.
"""

import asyncio
import os
import sys

import uvloop
from faststream import FastStream
from faststream.kafka import KafkaBroker, KafkaResponse
from faststream_outbox import OutboxBroker, make_outbox_table
from faststream_outbox.annotations import OutboxMessage
from faststream_outbox.autovacuum import outbox_autovacuum_ddl
from sqlalchemy import MetaData, text
from sqlalchemy.ext.asyncio import create_async_engine

from benchmarks.peers.inbox import BROKER, DATABASE, NAME

IS_TUNED = bool(os.environ.get("PEER_TUNED"))
WORKERS = 50
SETTINGS = (
    {
        "max_workers": WORKERS,
        "fetch_batch_size": 500,
        "min_fetch_interval": 0.01,
        "terminal_flush_batch_size": 100,
    }
    if IS_TUNED
    else {}
)

metadata = MetaData()
table = make_outbox_table(metadata, table_name="outbox")
engine = create_async_engine(
    DATABASE.replace("postgresql://", "postgresql+asyncpg://"),
    **({"pool_size": WORKERS + 5} if IS_TUNED else {}),
)


async def install() -> None:
    async with engine.begin() as connection:
        await connection.run_sync(metadata.create_all)
        if IS_TUNED:
            await connection.execute(text(outbox_autovacuum_ddl("outbox")))


def app() -> FastStream:
    outbox = OutboxBroker(engine, outbox_table=table, logger=None)
    kafka = KafkaBroker(BROKER, logger=None, acks="all", enable_idempotence=True)

    @kafka.publisher(NAME)
    @outbox.subscriber(NAME, **SETTINGS)
    async def relay(body: bytes, message: OutboxMessage) -> KafkaResponse:
        headers = {name: message.headers[name] for name in ("ce_id", "traceparent")}
        return KafkaResponse(body, key=message.headers["key"].encode(), headers=headers)

    async def stop() -> None:
        await kafka.stop()

    return FastStream(outbox, on_startup=[kafka.connect], after_shutdown=[stop], logger=None)


if __name__ == "__main__":
    if sys.argv[1] == "install":
        asyncio.run(install())
    elif IS_TUNED:
        uvloop.run(app().run())
    else:
        asyncio.run(app().run())
