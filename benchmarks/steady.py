"""A steady load and who receives it, in processes of their own; times are of the machine's monotonic clock.

`python -m benchmarks.steady write URL floor|outbox|debezium TOPIC RATE SECONDS` commits single rows over a
few connections; `python -m benchmarks.steady read KAFKA TOPIC COUNT` says that it listens, then waits for
so many records. Both print ids with the moments in which a row's INSERT was sent, and its record received.
"""

import asyncio
import json
import sys
import time
from uuid import uuid4

import asyncpg
from aiokafka import AIOKafkaConsumer, TopicPartition

from benchmarks.filling import DEBEZIUM, FLOOR, OUTBOX
from benchmarks.orders import KEYS
from benchmarks.stage import PARTITIONS, id_of

CONNECTIONS = 8
LISTENING = "listening"
PLANNED_ONCE = {"plan_cache_mode": "force_generic_plan"}
"""Like an INSERT of values: this one, whose number of rows is a parameter, would be planned for every row."""
_PATIENCE_MS = 30_000
ROWS = {"floor": FLOOR, "outbox": OUTBOX, "debezium": DEBEZIUM}


async def write(url: str, table: str, topic: str, rate: int, seconds: int) -> list[tuple[str, float]]:
    """Commit a row whenever one is due; a commit is never waited for by the next connection's."""
    sent: list[tuple[str, float]] = []
    numbers = iter(range(rate * seconds))
    connections = [await asyncpg.connect(url, server_settings=PLANNED_ONCE) for _ in range(CONNECTIONS)]
    began = time.monotonic()

    async def client(connection: asyncpg.Connection) -> None:
        statement = await connection.prepare(ROWS[table].insert())
        for number in numbers:
            await asyncio.sleep(max(0.0, began + number / rate - time.monotonic()))
            id_ = uuid4()
            sent.append((id_.hex, time.monotonic()))
            await statement.fetch(topic, id_, str(number % KEYS), 1)

    await asyncio.gather(*(client(connection) for connection in connections))
    for connection in connections:
        await connection.close()
    return sent


async def read(kafka: str, topic: str, count: int) -> list[tuple[str, float]]:
    """Every record from the beginning, until there are so many or no more come."""
    received: list[tuple[str, float]] = []
    consumer = AIOKafkaConsumer(
        bootstrap_servers=kafka, enable_auto_commit=False, auto_offset_reset="earliest"
    )
    await consumer.start()
    consumer.assign([TopicPartition(topic, number) for number in range(PARTITIONS)])
    print(LISTENING, flush=True)
    while len(received) < count:
        found = await consumer.getmany(timeout_ms=_PATIENCE_MS)
        now = time.monotonic()
        if not found:
            break
        for records in found.values():
            received += [(id_of(record.headers).hex, now) for record in records]
    await consumer.stop()
    return received


if __name__ == "__main__":
    verb, *arguments = sys.argv[1:]
    if verb == "write":
        url, table, topic, rate, seconds = arguments
        answer = asyncio.run(write(url, table, topic, int(rate), int(seconds)))
    else:
        kafka, topic, count = arguments
        answer = asyncio.run(read(kafka, topic, int(count)))
    print(json.dumps(answer))
