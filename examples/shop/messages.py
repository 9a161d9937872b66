"""What the shop says, whichever service says it."""

from dataclasses import dataclass

from towpath import event, task


@event("order.placed", destination="orders", key="order_id")
@dataclass(frozen=True)
class OrderPlaced:
    """An order exists from now on."""

    order_id: str
    amount: int


@task("payment.charge", group="billing", key="order_id", unique=("order_id",))
@dataclass(frozen=True)
class Charge:
    """Take the money of an order, once."""

    order_id: str
    amount: int
