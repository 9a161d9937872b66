"""A consumer group in this process at a real broker, under addresses of its own."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import asyncpg
from uuid_utils.compat import uuid7

from tests.integration.engine import Engine, brisk
from towpath.app import App
from towpath.brokers.factory import broker_from_url
from towpath.brokers.ports import GroupTopology, Headers, OutboundMessage

KAFKA: Mapping[str, object] = {
    "session_timeout_ms": 10_000,
    "rebalance_timeout_ms": 10_000,
    "heartbeat_interval_ms": 300,
    "commit_interval_ms": 50,
}


def new_name(kind: str) -> str:
    """A group's or an address's name that no other test has."""
    return f"{kind}-{uuid7().hex[-10:]}"


@dataclass(kw_only=True)
class Wired(Engine):
    """An engine at Kafka or RabbitMQ; what looks into the memory broker does not work."""

    broker: Any
    addresses: Mapping[str, str]
    """By destination."""
    broker_url: str

    async def publish_raw(
        self,
        address: str,
        value: bytes | None,
        headers: Headers = (),
        *,
        key: str | None = None,
        message_id: UUID | None = None,
    ) -> None:
        """Bytes as they are, to the address of a destination."""
        target = self.addresses.get(address, address)
        message = OutboundMessage(message_id or uuid7(), 0, target, "raw", key, 0, headers, value)
        publisher = self.broker.publisher()
        try:
            result = await publisher.publish([message], timeout_seconds=60)
        finally:
            await publisher.aclose()
        assert {0} == result.acknowledged


@asynccontextmanager
async def wired(
    app: App,
    url: str,
    broker_url: str,
    options: Mapping[str, object],
    *,
    partitions: int = 1,
    **settings: Any,
) -> AsyncIterator[Wired]:
    """The group's topology under new addresses, and a look at the database; no member runs."""
    broker = broker_from_url(broker_url, options)
    addresses = {name: new_name(name) for name in app.destinations}
    admin = broker.admin()
    try:
        await admin.apply([], [GroupTopology(app.name, tuple(addresses.values()))], partitions=partitions)
    finally:
        await admin.aclose()
    db = await asyncpg.connect(url, timeout=30)
    try:
        for name, address in addresses.items():
            await db.execute("insert into towpath.destination values ($1, 0, $2)", name, address)
        yield Wired(
            app,
            url,
            broker=broker,
            db=db,
            settings=brisk(**settings),
            addresses=addresses,
            broker_url=broker_url,
        )
    finally:
        await db.close(timeout=30)
