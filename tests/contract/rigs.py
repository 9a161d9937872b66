"""The same handles on every broker: what the behaviour suite needs to drive and to break one."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

from towpath.brokers.factory import broker_from_url
from towpath.brokers.memory.broker import MemoryBroker
from towpath.brokers.ports import (
    Bookmark,
    Broker,
    Delivery,
    GroupTopology,
    Headers,
    OutboundMessage,
    PublishResult,
    Subscriber,
    Subscription,
)
from towpath.testing.proxy import Direction, TcpProxy

KAFKA_OPTIONS: dict[str, object] = {
    "session_timeout_ms": 10_000,
    "rebalance_timeout_ms": 10_000,
    "heartbeat_interval_ms": 300,
    "request_timeout_ms": 5_000,
    "commit_interval_ms": 100,
    "max_message_bytes": 200_000,
}
RABBIT_OPTIONS: dict[str, object] = {"max_message_bytes": 200_000, "heartbeat_seconds": 5}
MEMORY_OPTIONS: dict[str, object] = {"max_message_bytes": 200_000, "strict": True}

Outage = Callable[[], Awaitable[None]]


class Listener:
    """Remembers what was revoked; acknowledges while revoking where a test asks for it."""

    def __init__(self) -> None:
        self.revoked: list[frozenset[str]] = []
        self.seconds: list[float] = []
        """What each time was given for it."""
        self.while_revoking: Callable[[], Awaitable[None]] | None = None
        self.noted: dict[str, Bookmark] = {}
        self.losses: list[tuple[str, int, int]] = []

    async def revoking(self, partitions: frozenset[str], *, timeout_seconds: float) -> None:
        """The port's callback."""
        assert timeout_seconds > 0
        self.revoked.append(partitions)
        self.seconds.append(timeout_seconds)
        if self.while_revoking is not None:
            await self.while_revoking()

    async def bookmarks(self, partitions: frozenset[str]) -> Mapping[str, Bookmark]:
        """What a test says was noted."""
        return {name: mark for name, mark in self.noted.items() if name in partitions}

    def lost(self, partition: str, first_offset: int, count: int) -> None:
        """Remembered."""
        self.losses.append((partition, first_offset, count))


@dataclass
class Rig:
    """One broker with a fresh address and group."""

    name: str
    broker: Broker
    """Reached through a link that `hang`, `cut` and `restore` act upon."""
    hang: Outage
    cut: Outage
    restore: Outage
    mute: Outage
    """The broker hears everything and is heard no more, until `restore`."""
    strand: Outage
    """The connections there are carry nothing any more, for good; new ones work."""
    delay: Callable[[float], Awaitable[None]]
    """Everything takes so many seconds longer, in both directions."""
    shares_partitions: bool
    """Whether two members of a group work at the same time; else the second takes over."""
    address: str = field(default_factory=lambda: f"orders.{uuid.uuid4().hex[:8]}")
    group: str = field(default_factory=lambda: f"billing-{uuid.uuid4().hex[:8]}")
    opened: list[Subscriber] = field(default_factory=list)

    async def apply(self) -> None:
        """Create the address and the group."""
        admin = self.broker.admin()
        await admin.apply([self.address], [GroupTopology(self.group, (self.address,))], partitions=4)
        await admin.aclose()

    def message(
        self,
        number: int,
        key: str | None = "k",
        *,
        payload: bytes | str | None = "number",
        headers: Headers = (),
        address: str | None = None,
    ) -> OutboundMessage:
        """A message whose payload is its number, unless told otherwise."""
        return OutboundMessage(
            message_id=uuid.uuid4(),
            sequence=number,
            address=address or self.address,
            type="order.placed",
            key=key,
            routing_slot=number % 64,
            headers=headers,
            payload=str(number).encode() if isinstance(payload, str) else payload,
        )

    async def publish(
        self, messages: Sequence[OutboundMessage], timeout_seconds: float = 60
    ) -> PublishResult:
        """Through a publisher of its own."""
        publisher = self.broker.publisher()
        try:
            return await publisher.publish(messages, timeout_seconds=timeout_seconds)
        finally:
            await publisher.aclose()

    async def publish_all(self, messages: Sequence[OutboundMessage]) -> None:
        """Publish and expect every one to be acknowledged."""
        result = await self.publish(messages)
        assert result == PublishResult(acknowledged=set(range(len(messages))))

    async def subscribe(
        self,
        *,
        max_in_flight: int = 1000,
        max_in_flight_bytes: int = 1 << 24,
        listener: Listener | None = None,
        is_waiting: bool = True,
    ) -> Subscriber:
        """A started member, by default one that has joined."""
        subscriber = self.broker.subscriber(
            Subscription(self.group, (self.address,), max_in_flight, max_in_flight_bytes)
        )
        self.opened.append(subscriber)
        await subscriber.start(listener or Listener())
        if is_waiting:
            await eventually(lambda: subscriber.is_connected)
        return subscriber

    async def aclose(self) -> None:
        """Close what a test left open."""
        for subscriber in self.opened:
            await subscriber.aclose()


async def eventually(condition: Callable[[], bool], timeout_seconds: float = 60) -> None:
    """Wait until the condition holds; fail when it never does."""
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        await asyncio.sleep(0.02)


async def receive(subscriber: Subscriber, count: int, timeout_seconds: float = 60) -> list[Delivery]:
    """Receive until there are at least `count`; fail when they do not come."""
    deadline = time.monotonic() + timeout_seconds
    received: list[Delivery] = []
    while len(received) < count:
        assert time.monotonic() < deadline, f"{len(received)} of {count} deliveries came"
        received += await subscriber.receive(count - len(received), timeout_seconds=0.5)
    return received


async def receive_rest(
    subscriber: Subscriber, quiet_seconds: float = 1.0, *, wanted: Iterable[int] = ()
) -> list[Delivery]:
    """Receive until these numbers have come, and then until nothing comes for a while."""
    received: list[Delivery] = []
    missing, deadline = set(wanted), time.monotonic() + 60
    while (batch := await subscriber.receive(1000, timeout_seconds=quiet_seconds)) or missing:
        assert batch or time.monotonic() < deadline, f"{missing} never came"
        received += batch
        if missing:  # else they may be no numbers at all
            missing -= set(numbers(batch))
    return received


async def receive_shared(count: int, *subscribers: Subscriber) -> list[list[Delivery]]:
    """What each of them is given, once so many have come to all together and nothing more comes."""
    received: list[list[Delivery]] = [[] for _ in subscribers]
    deadline = time.monotonic() + 60
    is_quiet = False
    while sum(map(len, received)) < count or not is_quiet:
        assert time.monotonic() < deadline, f"{[numbers(each) for each in received]} of {count}"
        batches = [await receive_rest(each) for each in subscribers]
        is_quiet = not any(batches)
        received = [mine + batch for mine, batch in zip(received, batches, strict=True)]
    return received


def numbers(deliveries: Sequence[Delivery]) -> list[int]:
    """Their payloads."""
    return [int(delivery.value or b"-1") for delivery in deliveries]


@asynccontextmanager
async def memory_rig() -> AsyncIterator[Rig]:
    """On a hub of its own."""
    broker = broker_from_url(f"memory://{uuid.uuid4().hex}", MEMORY_OPTIONS)
    assert isinstance(broker, MemoryBroker)
    hub = broker.hub

    async def switch_off() -> None:
        hub.is_available = False

    async def restore() -> None:
        hub.restore()

    async def delay(_: float) -> None:
        """Nothing is on the way."""

    async def strand() -> None:
        """There are no connections."""

    outages = switch_off, switch_off, restore, switch_off, strand
    yield Rig("memory", broker, *outages, delay, shares_partitions=True)


@asynccontextmanager
async def proxied_rig(
    name: str, url: str, proxy: TcpProxy, options: dict[str, object], *, shares_partitions: bool
) -> AsyncIterator[Rig]:
    """On a real broker behind a proxy."""
    broker = broker_from_url(url, options)
    yield Rig(
        name,
        broker,
        proxy.hang,
        proxy.cut,
        proxy.restore,
        partial(proxy.hang, Direction.REPLIES),
        proxy.strand,
        proxy.delay,
        shares_partitions=shares_partitions,
    )
