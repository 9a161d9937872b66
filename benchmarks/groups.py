"""Consumer groups without work of their own, for `towpath worker run benchmarks.groups:…`."""

import os

from towpath import App, Batch, Call, Tx, event

TOPIC = os.environ.get("BENCHMARK_TOPIC", "orders")


@event("order.placed", destination=TOPIC)
class Placed(bytes):
    """300 bytes that nobody looks into."""


noop = App("noop")


@noop.idempotent()
async def nothing(order: Placed, call: Call) -> None: ...


batch = App("batch")


@batch.batch(max_size=500, max_wait="20ms")
async def set_based(orders: Batch[Placed], tx: Tx) -> None: ...
