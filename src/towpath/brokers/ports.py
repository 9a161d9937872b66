"""What the engines need from a broker. One adapter per broker implements these ports alike.

A message on the wire is CloudEvents binary mode on every broker: `ce_…` headers beside towpath's
own; header values are bytes and survive unchanged, names may repeat, and the order of repeats
survives. (RabbitMQ keeps headers in a table: without repeats their order is not promised.)
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final, Literal, Protocol, TypeAlias
from uuid import UUID

import msgspec

from towpath.errors import BrokerUnavailable, ConfigurationError, MessageRefused

Headers: TypeAlias = tuple[tuple[str, bytes], ...]

ROUTING_SLOTS: Final = 64
"""Shares of the key space in a RabbitMQ routing key `<slot>.<type>`."""


def headers_size_bytes(headers: Headers) -> int:
    """Names (UTF-8) and values, without a protocol's overhead."""
    size_bytes = 0
    for name, value in headers:
        size_bytes += (len(name) if name.isascii() else len(name.encode())) + len(value)
    return size_bytes


class OutboundMessage(msgspec.Struct, frozen=True, gc=False):
    """One message as the relay hands it to a publisher: headers complete, payload final."""

    message_id: UUID
    sequence: int
    """The outbox id: grows with commit order within a key."""
    address: str
    """Kafka topic or RabbitMQ exchange."""
    type: str
    key: str | None
    routing_slot: int
    """`hash(key) % 64`, for RabbitMQ's routing key."""
    headers: Headers
    payload: bytes | None

    @property
    def size_bytes(self) -> int:
        """Payload, key and headers without the protocol's own overhead."""
        key = 0 if self.key is None else len(self.key.encode())
        return headers_size_bytes(self.headers) + key + len(self.payload or b"")


@dataclass(slots=True)
class PublishResult:
    """What is known after a window was offered to the broker, by index into that window.

    An index in neither collection was not sent, or has an unknown outcome: publish it again.
    Within one key, nothing is acknowledged behind a message that is not.
    """

    acknowledged: set[int] = field(default_factory=set)
    refused: dict[int, MessageRefused] = field(default_factory=dict)
    unavailable: BrokerUnavailable | None = None
    """Set when the broker went away or the deadline passed before everything was settled."""
    configuration: ConfigurationError | None = None
    """Set when some messages cannot be published until a person acts (a missing topic), and others of
    the window were settled. Where nothing was settled the error is raised instead."""


KeepPartitions: TypeAlias = Callable[[Mapping[str, int]], Awaitable[Mapping[str, int]]]
"""Given the partitions that addresses have now, the counts by which their keys are to be placed.

Raises BrokerUnavailable when that cannot be found out.
"""


class Publisher(Protocol):
    """Publishes windows of messages. One owner; `publish` is never called concurrently."""

    async def start(self) -> None:
        """Connect. Raises BrokerUnavailable (retry later) or ConfigurationError (do not)."""
        ...

    async def cluster(self) -> str | None:
        """Which cluster it is connected to, as that says itself; None where there is no telling.

        Raises BrokerUnavailable or ConfigurationError.
        """
        ...

    def keep_partitions(self, keep: KeepPartitions) -> None:
        """Ask this once for each address with partitions, before anything is published there.

        Without it keys are placed by the partitions that there are.
        """
        ...

    async def publish(self, window: Sequence[OutboundMessage], *, timeout_seconds: float) -> PublishResult:
        """Publish a window, keeping the order of each (address, key); at most `timeout_seconds`.

        After the deadline nothing of the window is written any more: the connection is closed
        without flushing. Reconnects by itself on the next call. Never raises for the broker's
        state; ConfigurationError (a missing topic, refused credentials) is raised, or put into the
        result when other messages of the window were settled. A refused message withholds the later
        ones of its key in this call. Cancelled, it closes the connection like a passed deadline.
        """
        ...

    async def aclose(self) -> None:
        """Close; idempotent, bounded, never raises for a dead broker."""
        ...


@dataclass(frozen=True, slots=True)
class BrokerDeath:
    """Why a broker gave a message up by itself, as it tells."""

    reason: str
    """`delivery_limit`, `expired`, `maxlen` or `rejected`; `unknown` where the message does not say."""
    queue: str | None
    """Where that was."""
    count: int
    """How often it was given up there for this reason."""


class Delivery(msgspec.Struct, eq=False):
    """One received message. Identity, not value: two deliveries of one message differ. Nobody changes it."""

    source: str
    """Kafka topic or RabbitMQ exchange (the destination's address, not the queue)."""
    partition: str
    """Unit of broker order: `topic:3` on Kafka, the queue on RabbitMQ."""
    offset: int
    """Kafka offset or RabbitMQ delivery tag: grows within a partition and assignment."""
    key: str | None
    """None when absent; bytes that are not UTF-8 are shown with backslash escapes."""
    headers: Headers
    value: bytes | None
    timestamp: datetime | None
    is_redelivered: bool
    """RabbitMQ's flag; on Kafka an offset at or below the highest one seen before."""
    epoch: int
    """The assignment (Kafka) or channel (RabbitMQ) it came by; older ones are no-ops."""
    coordinates: str | None = None
    """Stable identity of the record at the broker: `topic:partition:offset:timestamp` on Kafka.

    None on RabbitMQ, where a redelivery has another tag. Names foreign messages without an id.
    """
    death: BrokerDeath | None = None
    """Set for a message that the broker took from the group by itself: for the catalog, not for a handler."""
    size_bytes: int = 0
    """Value and headers; counted when it is made."""

    def __post_init__(self) -> None:
        self.size_bytes = len(self.value or b"") + headers_size_bytes(self.headers)


Refusal: TypeAlias = Literal["offset_missing", "offset_out_of_range"]
"""Why a partition is not read until a person says where to go on: the group's committed offset is gone, or
lies beyond what the broker has."""


@dataclass(frozen=True, slots=True)
class Bookmark:
    """What the group itself knows of its place in a partition, beside the broker."""

    position: int | None
    """The next offset to read, as last noted; None: it never read there."""
    word: int | None = None
    """Where a person said to go on."""


@dataclass(frozen=True, slots=True)
class Mark:
    """How far a partition that this member holds is committed, or why it is not read."""

    position: int | None
    refusal: Refusal | None = None


class GroupListener(Protocol):
    """What a member of a group is told and asked by its subscriber."""

    async def revoking(self, partitions: frozenset[str], *, timeout_seconds: float) -> None:
        """Let running work of these partitions end, at most `timeout_seconds`, then return.

        Called outside the poll loop; it must not call `receive`. Acknowledgements made before it
        returns are still committed.
        """
        ...

    async def bookmarks(self, partitions: frozenset[str]) -> Mapping[str, Bookmark]:
        """What the group noted of these partitions. A person's word is told once.

        Raises StoreUnavailable: then nothing of them is read yet.
        """
        ...

    def lost(self, partition: str, first_offset: int, count: int) -> None:
        """The broker deleted records that the group had not read."""
        ...


@dataclass(frozen=True, slots=True)
class Subscription:
    """What one consumer group reads."""

    group: str
    addresses: tuple[str, ...]
    max_in_flight: int
    """Messages received but not yet acknowledged, over all partitions; intake pauses there."""
    max_in_flight_bytes: int


class Subscriber(Protocol):
    """Receives for one member of a consumer group. Reconnects and rebuilds itself."""

    async def start(self, listener: GroupListener) -> None:
        """Join. Raises BrokerUnavailable or ConfigurationError."""
        ...

    async def receive(self, max_count: int, *, timeout_seconds: float) -> Sequence[Delivery]:
        """Up to `max_count` deliveries in partition order; empty after the timeout.

        Safe to cancel. While the broker is away it returns nothing and `is_connected` is False.
        """
        ...

    def acknowledge(self, deliveries: Iterable[Delivery]) -> None:
        """The outcome of these is durable. Never blocks; stale epochs are ignored.

        Kafka commits the watermark over received offsets in the background; RabbitMQ acks.
        """
        ...

    def release(self, deliveries: Iterable[Delivery]) -> None:
        """Hand back unprocessed (shutdown, revoke): they are delivered again, to anybody.

        Nothing of their partition that came after them is handed out before them. What was not
        settled either may come again with them.
        """
        ...

    def pause(self) -> None:
        """Fetch nothing more until `resume`; the member keeps its place in the group.

        Call `receive` only after `resume`; what was received may still be acknowledged or released.
        """
        ...

    def resume(self) -> None:
        """Fetch again. Without a pause it does nothing."""
        ...

    def is_current(self, delivery: Delivery) -> bool:
        """Whether the partition still belongs to this member under the delivery's epoch."""
        ...

    @property
    def is_connected(self) -> bool:
        """Whether messages can arrive now: joined and polled, or consuming on an open channel."""
        ...

    @property
    def marks(self) -> Mapping[str, Mark]:
        """Of the partitions held, for the group's own notes; empty where the broker keeps no offsets."""
        ...

    async def aclose(self) -> None:
        """Commit or ack what was acknowledged, leave, close; idempotent and bounded."""
        ...


@dataclass(frozen=True, slots=True)
class GroupTopology:
    """What one consumer group needs at the broker."""

    group: str
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Bounds:
    """The offsets of one partition."""

    first: int
    """Of the oldest record kept."""
    next: int
    """Of the next record."""
    at: int | None = None
    """Of the first record since the instant asked for; `next` where there is none."""


class BrokerAdmin(Protocol):
    """Creates and checks topics, exchanges and queues."""

    async def apply(
        self, addresses: Sequence[str], groups: Sequence[GroupTopology], *, partitions: int
    ) -> list[str]:
        """Create what is missing and say what was created, one line each. Existing things stay.

        Per group and address there is also a dead-letter destination `dead_letter_address(...)`.
        Raises TopologyError where something exists with other arguments.
        """
        ...

    async def server(self) -> str:
        """What answers, in a few words. Raises BrokerUnavailable, and ConfigurationError if it is too old."""
        ...

    async def check(self, addresses: Sequence[str], groups: Sequence[GroupTopology]) -> list[str]:
        """One line for each thing missing or declared otherwise; empty when all is well."""
        ...

    async def bounds(self, address: str, since: datetime | None = None) -> Mapping[int, Bounds]:
        """Offsets by partition number; empty where the broker keeps no offsets of groups.

        Raises TopologyError where the address does not exist.
        """
        ...

    async def kept_for(self, address: str) -> timedelta | None:
        """How long messages can be read again; `timedelta.max` for ever, None where reading removes them."""
        ...

    async def change_queues(self, group: GroupTopology, before: int) -> None:
        """Spread a group's messages over the queues of the settings, over `before` until now; repeatable.

        New queues are bound before old ones are let go, so nothing sent meanwhile is lost. Raises
        UsageError while an old queue holds messages or is read, and where groups have no queues.
        """
        ...

    async def aclose(self) -> None:
        """Close; idempotent."""
        ...


class Broker(Protocol):
    """A configured broker: makes publishers, subscribers and an admin. Owns no connection."""

    @property
    def max_message_bytes(self) -> int:
        """Messages above this are refused before sending, with reason `too_large`."""
        ...

    @property
    def labels(self) -> Mapping[str, str | int]:
        """What telemetry says of it: `system`; `server_address` and `server_port` where it is one server."""
        ...

    @property
    def queues_per_group(self) -> int | None:
        """Queues of a group per address; None at a broker where groups have none."""
        ...

    def publisher(self) -> Publisher: ...

    def subscriber(self, subscription: Subscription) -> Subscriber: ...

    def admin(self) -> BrokerAdmin: ...


def dead_letter_address(group: str, address: str) -> str:
    """Where copies of a group's dead letters of one source go, on every broker."""
    return f"{group}.{address}.dlq"


BrokerOptions: TypeAlias = Mapping[str, object]
"""Settings of one broker beyond its URL, passed on to the client library as they are."""
