"""The least code that finishes what Kafka brings: `benchmarks.floor_consumer DATABASE KAFKA TOPIC`.

A batched fetch, one insert of the finished rows, one commit of the offsets. It keeps no order over
retries, knows no failure, no lease and no dead letter: nothing but the cost of remembering the ids.
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from uuid import UUID

import asyncpg
from aiokafka import AIOKafkaConsumer, ConsumerRecord

from benchmarks.orders import TYPE

BATCH = 500
TABLE = """
create table if not exists public.floor_done (
  id uuid primary key, type text not null, key text,
  finished_at timestamptz not null default clock_timestamp()
)
"""
FINISH = """
insert into public.floor_done (id, type, key)
select * from unnest($1::uuid[], $2::text[], $3::text[]) order by 1 on conflict do nothing
"""


def id_of(record: ConsumerRecord) -> UUID:
    """The message's id."""
    return UUID(dict(record.headers)["ce_id"].decode())


def key_of(record: ConsumerRecord) -> str | None:
    """The message's key as text."""
    return None if record.key is None else record.key.decode()


@asynccontextmanager
async def batches(kafka: str, topic: str) -> AsyncIterator[AsyncIterator[list[ConsumerRecord]]]:
    """Fetched records; their offsets are committed when the next batch is asked for."""
    consumer = AIOKafkaConsumer(
        topic,
        bootstrap_servers=kafka,
        group_id=f"{topic}-floor",
        enable_auto_commit=False,
        auto_offset_reset="earliest",
    )

    async def fetched() -> AsyncIterator[list[ConsumerRecord]]:
        while True:
            found = await consumer.getmany(timeout_ms=200, max_records=BATCH)
            if found:
                yield [record for records in found.values() for record in records]
                await consumer.commit(
                    {partition: records[-1].offset + 1 for partition, records in found.items()}
                )

    await consumer.start()
    try:
        yield fetched()
    finally:
        await consumer.stop()


async def finish(database: str, kafka: str, topic: str) -> None:
    """Finish messages until the process is ended."""
    connection = await asyncpg.connect(database)
    async with batches(kafka, topic) as fetched:
        async for records in fetched:
            ids = [id_of(record) for record in records]
            keys = [key_of(record) for record in records]
            await connection.execute(FINISH, ids, [TYPE] * len(ids), keys)


if __name__ == "__main__":
    asyncio.run(finish(*sys.argv[1:4]))
