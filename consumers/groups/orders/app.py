"""The `orders` group: keeps a projection of orders and asks for invoices, each effect once."""

from typing import Final

from sqlalchemy import text

from consumers.groups.orders.messages import InvoiceRequested, OrderChanged
from towpath.app import App
from towpath.backoff import RetryPolicy
from towpath.context import Tx
from towpath.outcomes import Reject

app = App(
    "orders",
    ordering="key",
    retry=RetryPolicy(attempts=6, max_age="1h", base="200ms", cap="2s"),
)

_APPLY: Final = text("""
    insert into order_projection (order_id, position, status, amount)
    values (:order_id, :position, :status, :amount)
    on conflict (order_id) do update
      set position = excluded.position, status = excluded.status, amount = excluded.amount
""")
_RECORD: Final = text("""
    insert into order_effect (message_id, order_id, position) values (:message_id, :order_id, :position)
""")
_INVOICE: Final = text("""
    insert into invoice (message_id, order_id, amount) values (:message_id, :order_id, :amount)
""")


class PassingTrouble(Exception):
    """What is gone at the next attempt."""


@app.transactional(concurrency=16)
async def project(order: OrderChanged, tx: Tx) -> Reject | None:
    """Apply one step of an order; a paid one asks for its invoice in the same transaction."""
    if order.amount <= 0:
        return Reject("bad_amount", f"the amount of {order.order_id} is {order.amount}")
    step = {"order_id": order.order_id, "position": order.position}
    await tx.session.execute(_RECORD, {"message_id": tx.message_id, **step})
    await tx.session.execute(_APPLY, {**step, "status": order.status, "amount": order.amount})
    if order.status == "paid":
        tx.emit(InvoiceRequested(order.order_id, order.amount))
    # After the writes, so that what a failed attempt wrote is seen to be rolled back.
    if tx.attempt.attempt <= order.failing_attempts:
        raise PassingTrouble(f"attempt {tx.attempt.attempt} of {order.failing_attempts} that fail")
    return None


@app.transactional(concurrency=16)
async def bill(request: InvoiceRequested, tx: Tx) -> None:
    """Write the invoice."""
    await tx.session.execute(
        _INVOICE,
        {"message_id": tx.message_id, "order_id": request.order_id, "amount": request.amount},
    )
