"""Consumer groups without work of their own, for `towpath worker run benchmarks.groups:…`.

One is run at a time, against a topic of its own, which also names the group.
"""

import asyncio
import os

from sqlalchemy import text

from benchmarks.orders import ACCOUNTS, TYPE
from towpath import App, Batch, Call, Tx, event

TOPIC = os.environ.get("BENCHMARK_TOPIC", "orders")
SLEEP_SECONDS = float(os.environ.get("BENCHMARK_SLEEP_SECONDS", "0"))
SLOW_KEY = "slow"


@event(TYPE, destination=TOPIC)
class Placed(bytes):
    """300 bytes that nobody looks into."""


noop = App(TOPIC)


@noop.idempotent()
async def nothing(_: Placed) -> None: ...


batch = App(TOPIC)


@batch.batch(max_size=500, max_wait="20ms")
async def set_based(orders: Batch[Placed], tx: Tx) -> None:
    ids = [message.id for message in orders.messages]
    await tx.session.execute(
        text("insert into public.effect select unnest(cast(:ids as uuid[]))"), {"ids": ids}
    )


transactional = App(TOPIC)
_DEPOSIT = text("update public.account set balance = balance + 1 where id = :id")


@transactional.transactional(concurrency=16)
async def deposit(_: Placed, tx: Tx) -> None:
    await tx.session.execute(_DEPOSIT, {"id": tx.message_id.int % ACCOUNTS})


sleeping = App(TOPIC)


@sleeping.idempotent()
async def sleep(_: Placed) -> None:
    await asyncio.sleep(SLEEP_SECONDS)


slow_key = App(TOPIC)


@slow_key.idempotent()
async def sleep_for_one(_: Placed, call: Call) -> None:
    if call.attempt.key == SLOW_KEY:
        await asyncio.sleep(SLEEP_SECONDS)
