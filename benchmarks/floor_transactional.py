"""A transaction of its own for each message, by hand: `… DATABASE KAFKA TOPIC sqlalchemy|asyncpg`.

Begin, the handler's UPDATE, the finished row, commit; as many at once as towpath's handler has. The
offsets of a batch are committed behind its last transaction. No order, no failures.
"""

import asyncio
import sys
from collections.abc import Awaitable, Callable

import asyncpg
from aiokafka import ConsumerRecord
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from benchmarks.floor_consumer import batches, id_of, key_of
from benchmarks.orders import ACCOUNTS, TYPE

CONCURRENCY = 16
UPDATE = "update public.account set balance = balance + 1 where id = {}"
SETTLE = "insert into public.floor_done (id, type, key) values ({}, {}, {}) on conflict do nothing"


async def by_sqlalchemy(database: str) -> Callable[[ConsumerRecord], Awaitable[None]]:
    """A fresh session for each message, as a handler is given."""
    engine = create_async_engine(
        database.replace("postgresql://", "postgresql+asyncpg://"), pool_size=CONCURRENCY
    )
    update, settle = text(UPDATE.format(":account")), text(SETTLE.format(":id", ":type", ":key"))

    async def handle(record: ConsumerRecord) -> None:
        id_ = id_of(record)
        async with AsyncSession(engine, expire_on_commit=False) as session, session.begin():
            await session.execute(update, {"account": id_.int % ACCOUNTS})
            await session.execute(settle, {"id": id_, "type": TYPE, "key": key_of(record)})

    return handle


async def by_asyncpg(database: str) -> Callable[[ConsumerRecord], Awaitable[None]]:
    """The same on the bare driver."""
    pool = await asyncpg.create_pool(database, min_size=CONCURRENCY, max_size=CONCURRENCY)
    update, settle = UPDATE.format("$1"), SETTLE.format("$1", "$2", "$3")

    async def handle(record: ConsumerRecord) -> None:
        id_ = id_of(record)
        async with pool.acquire() as connection, connection.transaction():
            await connection.execute(update, id_.int % ACCOUNTS)
            await connection.execute(settle, id_, TYPE, key_of(record))

    return handle


async def finish(database: str, kafka: str, topic: str, driver: str) -> None:
    """Finish messages until the process is ended."""
    handle = await (by_sqlalchemy if driver == "sqlalchemy" else by_asyncpg)(database)

    async def take(records: list[ConsumerRecord]) -> None:
        while records:
            await handle(records.pop())

    async with batches(kafka, topic) as fetched:
        async for records in fetched:
            await asyncio.gather(*(take(records) for _ in range(CONCURRENCY)))


if __name__ == "__main__":
    asyncio.run(finish(*sys.argv[1:5]))
