"""The events of the `orders` group. Producers import this module; it needs no consumer code."""

from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel

from towpath.messages import event


@event("order.changed", destination="orders", key="order_id")
class OrderChanged(BaseModel):
    """An order took its next step; `position` counts the steps of one order from 1."""

    order_id: str
    position: int
    status: Literal["placed", "paid", "shipped"]
    amount: int
    """In cents; nothing but a positive amount is accepted."""
    failing_attempts: int = 0
    """For demonstrations and tests: the first attempts that fail with a passing error."""


@event("invoice.requested", destination="invoices", key="order_id")
@dataclass(frozen=True)
class InvoiceRequested:
    """A paid order wants its invoice."""

    order_id: str
    amount: int
