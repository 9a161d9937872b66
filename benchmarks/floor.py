"""The least code that moves rows to Kafka: `python -m benchmarks.floor DATABASE KAFKA TOPIC BATCH`.

Select and delete a batch, `send_batch` per partition, commit. It keeps no order across a crash, has
no leases, no retention, no dead letters: nothing but the cost of moving the bytes.
"""

import asyncio
import json
import sys
import time

import asyncpg
from aiokafka import AIOKafkaProducer

from towpath.brokers.kafka.murmur2 import partition_of

TABLE = """
create table if not exists public.floor_outbox (
  id bigint generated always as identity primary key, topic text not null,
  message_id uuid not null, key text not null, headers json not null, payload bytea not null
)
"""
TAKE = """
delete from public.floor_outbox where id = any(array(
  select id from public.floor_outbox order by id limit $1 for update skip locked))
returning id, message_id, key, headers, payload
"""


async def move(database: str, kafka: str, topic: str, batch_size: int) -> None:
    """Move rows until the process is ended."""
    connection = await asyncpg.connect(database)
    producer = AIOKafkaProducer(
        bootstrap_servers=kafka, acks="all", enable_idempotence=True, max_batch_size=1_000_000
    )
    await producer.start()
    partitions = len(await producer.partitions_for(topic))
    while True:
        async with connection.transaction():
            rows = await connection.fetch(TAKE, batch_size)
            rows.sort(key=lambda row: row["id"])
            batches = [producer.create_batch() for _ in range(partitions)]
            now = int(time.time() * 1000)
            for row in rows:
                key = row["key"].encode()
                headers = [("ce_id", str(row["message_id"]).encode())]
                headers += [(name, value.encode()) for name, value in json.loads(row["headers"])]
                batches[partition_of(key, partitions)].append(
                    timestamp=now, key=key, value=row["payload"], headers=headers
                )
            answers = [
                await producer.send_batch(batch, topic, partition=number)
                for number, batch in enumerate(batches)
                if batch.record_count()
            ]
            await asyncio.gather(*answers)
        if not rows:
            await asyncio.sleep(0.005)


if __name__ == "__main__":
    asyncio.run(move(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])))
