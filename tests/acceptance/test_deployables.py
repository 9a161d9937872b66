"""The groups that are shipped, as they are started in production: `python -m consumers run …`."""

import sys

from consumers.groups.orders.messages import OrderChanged
from tests.acceptance.world import World, apply_topology
from towpath.outbox import emit

GROUP = "orders"


async def test_order_events_become_one_invoice_each(world: World) -> None:
    """A1, A2, A4 in small: orders retried, rejected, paid; destinations have addresses of their own."""
    addresses = {name: f"{name}.{world.group}" for name in ("orders", "invoices")}
    for name, address in addresses.items():
        query = "insert into towpath.destination (name, broker, address) values ($1, 0, $2)"
        await world.db.execute(query, name, address)
    await apply_topology(world.broker, GROUP, tuple(addresses.values()))
    await world.run("init", sys.executable, "-m", "consumers", "init", GROUP)
    world.relay()
    world.spawn("orders", sys.executable, "-m", "consumers", "run", GROUP)

    async with world.db.transaction():
        for position, (status, failing) in enumerate((("placed", 2), ("paid", 0), ("shipped", 1)), 1):
            step = {"order_id": "o1", "position": position, "status": status, "amount": 5}
            await emit(world.db, OrderChanged(**step, failing_attempts=failing))
        await emit(world.db, OrderChanged(order_id="o2", position=1, status="paid", amount=0))

    query = "select count(*) from towpath.task where consumer_group = 'orders' and finished_at is not null"
    await world.until_counted(5, query)
    effects = await world.db.fetch("select order_id, position from order_effect order by id")
    assert [("o1", 1), ("o1", 2), ("o1", 3)] == [tuple(effect) for effect in effects]
    invoices = await world.db.fetch("select order_id, amount from invoice")
    assert [("o1", 5)] == [tuple(invoice) for invoice in invoices]
    rejected = await world.db.fetch(
        "select key, state, reason_code from towpath.task where state <> 'SUCCEEDED'"
    )
    assert [("o2", "FAILED", "bad_amount")] == [tuple(task) for task in rejected]
    assert (0, 0) == (world.stop("orders"), world.stop("relay"))
