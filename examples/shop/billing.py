"""The group that hears of orders and charges for them."""

from sqlalchemy import text

from examples.shop.messages import Charge, OrderPlaced
from towpath import App, Tx

app = App("billing")

_WRITE = text("insert into shop_payment values (:order_id, :amount, :told_by)")


@app.transactional()
async def note(order: OrderPlaced, tx: Tx) -> None:
    """An order is expected to be paid."""
    await tx.session.execute(_WRITE, {"order_id": order.order_id, "amount": order.amount, "told_by": "event"})


@app.transactional()
async def charge(order: Charge, tx: Tx) -> None:
    """It is paid."""
    await tx.session.execute(_WRITE, {"order_id": order.order_id, "amount": order.amount, "told_by": "task"})
