"""The least code that finishes what Kafka brings: `benchmarks.floor_consumer DATABASE KAFKA TOPIC`.

A batched fetch, one insert of the finished rows, one commit of the offsets. It keeps no order over
retries, knows no failure, no lease and no dead letter: nothing but the cost of remembering the ids.
"""

import asyncio
import sys
from uuid import UUID

import asyncpg
from aiokafka import AIOKafkaConsumer

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


async def finish(database: str, kafka: str, topic: str) -> None:
    """Finish messages until the process is ended."""
    connection = await asyncpg.connect(database)
    consumer = AIOKafkaConsumer(
        topic,
        bootstrap_servers=kafka,
        group_id="floor",
        enable_auto_commit=False,
        auto_offset_reset="earliest",
    )
    await consumer.start()
    while True:
        found = await consumer.getmany(timeout_ms=200, max_records=500)
        ids, types, keys = [], [], []
        for records in found.values():
            for record in records:
                ids.append(UUID(dict(record.headers)["ce_id"].decode()))
                types.append("order.placed")
                keys.append(None if record.key is None else record.key.decode())
        if ids:
            await connection.execute(FINISH, ids, types, keys)
            await consumer.commit({partition: records[-1].offset + 1 for partition, records in found.items()})


if __name__ == "__main__":
    asyncio.run(finish(*sys.argv[1:4]))
