"""What is in the database once everything has ended, as the check compares it."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

import asyncpg

from examples.demo.promises import AGENTS, ORDERS, Group
from towpath.messages.limits import CANARY

_INVOICE: Final = "invoice.requested"
_EFFECTS: Final[Mapping[Group, str]] = {
    AGENTS: "select message_id, agent_id as key from agent_effect order by id",
    ORDERS: "select message_id, order_id as key from order_effect order by id",
}
_COPIES: Final = """
    select count(*) from towpath.outbox_message o where o.kind = 'copy' and o.status = 'SENT'
"""


@dataclass(frozen=True, slots=True)
class Findings:
    """What is in the database."""

    tasks: Mapping[tuple[str, UUID], str]
    """State by group and message; of invoices only those that nobody promised are left out."""
    invoice_tasks: Mapping[UUID, tuple[str, str]]
    """Key and state of what the orders group asked of itself."""
    outbox_ids: frozenset[UUID]
    effects: Mapping[Group, Sequence[tuple[UUID, str]]]
    """Message and key, in the order in which they happened."""
    invoices: Counter[tuple[str, int]]
    steps: Mapping[str, int]
    """How many steps the producer's own rows count, by agent and order."""
    projection: Mapping[str, int]
    dead: Mapping[tuple[str, UUID], str]
    """State in the catalog."""
    copy_count: int


async def read(connection: "asyncpg.Connection[Any]") -> Findings:
    """What is in the database; one snapshot if the transaction it runs in keeps to one."""
    tasks = await connection.fetch("select consumer_group, id, type, key, state from towpath.task")
    outbox = await connection.fetch(
        "select message_id from towpath.outbox where destination <> $1",
        CANARY,  # the relay's own
    )
    invoices = await connection.fetch("select order_id, amount, count(*) from invoice group by 1, 2")
    steps = await connection.fetch("select * from shop_agent union all select * from shop_order")
    projection = await connection.fetch("select order_id, position from order_projection")
    dead = await connection.fetch("select consumer_group, message_id, state from towpath.dead_letter")
    return Findings(
        tasks={(row["consumer_group"], row["id"]): row["state"] for row in tasks if row["type"] != _INVOICE},
        invoice_tasks={row["id"]: (row["key"], row["state"]) for row in tasks if row["type"] == _INVOICE},
        outbox_ids=frozenset(row["message_id"] for row in outbox),
        effects={
            group: [tuple(row) for row in await connection.fetch(sql)] for group, sql in _EFFECTS.items()
        },
        invoices=Counter({(row["order_id"], row["amount"]): row["count"] for row in invoices}),
        steps=dict(steps),
        projection=dict(projection),
        dead={(row["consumer_group"], row["message_id"]): row["state"] for row in dead},
        copy_count=await connection.fetchval(_COPIES),
    )
