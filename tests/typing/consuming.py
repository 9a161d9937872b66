"""A consumer group as a user writes it; type-checked, never run."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from sqlalchemy import text

from towpath import (
    App,
    Batch,
    Call,
    OnceCall,
    Reject,
    Retry,
    RetryPolicy,
    Snooze,
    StillUnknown,
    SyncTx,
    Tx,
    Verdict,
    event,
)


@event("order.placed", destination="orders", key="order_id")
@dataclass(frozen=True)
class OrderPlaced:
    order_id: str
    amount: int


@event("x", destination="orders", key="order_id")
@dataclass(frozen=True)
class Other:
    order_id: str


@event("order.dispatched", destination="orders", key="order_id")
@dataclass(frozen=True)
class Dispatch:
    order_id: str


@event("page.viewed", destination="views")
@dataclass(frozen=True)
class PageViewed:
    url: str


@event("page.seen", destination="views")
@dataclass(frozen=True)
class PageSeen:
    url: str


class Api:
    async def post(self, key: str) -> int:
        return 200


app = App(
    "billing", ordering="key", retry=RetryPolicy(attempts=8, max_age="24h", base="1s", cap="10m", in_place=2)
)


@asynccontextmanager
async def api() -> AsyncIterator[Api]:
    yield Api()


app.provide(Api, api)


class CardDeclined(Exception): ...


app.classify(CardDeclined, Reject("card_declined"))
app.classify(ConnectionError, Retry)


@app.transactional(concurrency=16)
async def invoice(order: OrderPlaced, tx: Tx) -> Reject | None:
    if order.amount <= 0:
        return Reject("bad_amount")
    tx.emit(Other(order.order_id))
    return None


@app.idempotent(timeout="2m", dependency="warehouse")
async def ship(order: Other, call: Call, *, api: Api) -> None:
    if await api.post(call.idempotency_key()) == 409:
        raise Snooze("5m", reason="not_picked_yet")
    await call.progress(0.9, step="booked")
    async with call.transaction() as tx:
        tx.emit(Other("x"))


async def find_shipment(call: OnceCall, *, api: Api) -> Verdict[str]:
    return StillUnknown()


@app.at_most_once(reconcile=find_shipment, timeout="1m")
async def dispatch(order: Dispatch, call: OnceCall, *, api: Api) -> str:
    async with call.once():
        return str(await api.post(call.idempotency_key()))


@app.batch(max_size=500, max_wait="50ms")
async def count_views(batch: Batch[PageViewed], tx: Tx) -> None:
    urls: list[str] = [view.url for view in batch.payloads]
    await tx.session.execute(text("insert into view select unnest(:u)"), {"u": urls})


@app.transactional()
def legacy(view: PageSeen, tx: SyncTx) -> None:
    tx.session.execute(text("insert into seen values (:u)"), {"u": view.url})


async def unit_test(tx: Tx) -> None:
    result: Reject | None = await invoice(OrderPlaced("a", 1), tx)
    assert result is None
