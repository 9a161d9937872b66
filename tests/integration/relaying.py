"""A broker that remembers the order of arrival, writers that race, and the verdict over both."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import asyncpg

from towpath.backoff import RetryPolicy
from towpath.brokers.ports import Broker, OutboundMessage, PublishResult
from towpath.errors import BrokerUnavailable, MessageRefused
from towpath.relay import Relay, RelayOptions

FAST = RelayOptions(
    lease=20.0,
    renew_every=0.3,
    publish_deadline=0.8,
    margin=0.1,
    journal_every=1.0,
    backoff=RetryPolicy(base="20ms", cap="200ms"),
)
"""Nothing waits long but for a lease that lapses, which none does because the machine is busy."""

Refusal = Callable[[OutboundMessage], MessageRefused | None]


@dataclass(frozen=True, slots=True)
class Arrival:
    """One message as it reached the broker."""

    message: OutboundMessage
    publisher: int
    at: float


@dataclass
class RecordingBroker:
    """Keeps what was published in the order it came; does as it is told otherwise."""

    arrivals: list[Arrival] = field(default_factory=list)
    attempts: int = 0
    """Windows offered, also in vain."""
    is_available: bool = True
    is_keeping: bool = True
    is_slow: bool = False
    """Let others run between two messages, so that a window can break in the middle."""
    count: int = 0
    refuse: Refusal | None = None
    before: Callable[[int, Sequence[OutboundMessage]], Awaitable[None]] | None = None
    """Awaited before a window is written, with the publisher's number."""
    max_message_bytes: int = 1_000_000
    labels: Mapping[str, str | int] = field(default_factory=lambda: {"system": "recorded"})
    publishers: int = 0
    cluster: str | None = None
    """What it says which broker it is."""

    def publisher(self) -> "RecordingPublisher":
        self.publishers += 1
        return RecordingPublisher(self, self.publishers)

    def subscriber(self, subscription: object) -> Any:
        raise AssertionError("a relay does not subscribe")

    def admin(self) -> Any:
        raise AssertionError("a relay does not administer")

    @property
    def payloads(self) -> list[bytes | None]:
        return [arrival.message.payload for arrival in self.arrivals]


class RecordingPublisher:
    """Writes messages one by one, so that a window may break in the middle."""

    def __init__(self, broker: RecordingBroker, number: int) -> None:
        self._broker = broker
        self._number = number

    async def start(self) -> None:
        if not self._broker.is_available:
            self._broker.attempts += 1
            raise BrokerUnavailable("switched off")

    async def cluster(self) -> str | None:
        return self._broker.cluster

    def keep_partitions(self, keep: object) -> None:
        """There are none."""

    async def publish(self, window: Sequence[OutboundMessage], *, timeout_seconds: float) -> PublishResult:
        broker, result = self._broker, PublishResult()
        broker.attempts += 1
        withheld: set[tuple[str, str | None]] = set()
        try:
            async with asyncio.timeout(timeout_seconds):
                if broker.before is not None:
                    await broker.before(self._number, window)
                await asyncio.sleep(0)
                for index, message in enumerate(window):
                    if not broker.is_available:
                        raise BrokerUnavailable("switched off")
                    if (message.address, message.key) in withheld:
                        continue
                    refusal = broker.refuse(message) if broker.refuse else None
                    if refusal is not None:
                        result.refused[index] = refusal
                        withheld.add((message.address, message.key))
                        continue
                    broker.count += 1
                    if broker.is_keeping:
                        broker.arrivals.append(Arrival(message, self._number, time.monotonic()))
                    result.acknowledged.add(index)
                    if broker.is_slow:
                        await asyncio.sleep(0)
        except TimeoutError:
            result.unavailable = BrokerUnavailable("the deadline passed")
        except BrokerUnavailable as error:
            result.unavailable = error
        return result

    async def aclose(self) -> None:
        """Nothing is open."""


async def prepare(connection: "asyncpg.Connection[Any]", keys: int = 20) -> None:
    """Make the hot rows that writers update before they emit."""
    await connection.execute("create table hot (id integer primary key, v bigint not null default 0)")
    await connection.execute("insert into hot (id) select generate_series(1, $1)", keys)


EMIT = """
insert into towpath.outbox (shard, message_id, kind, destination, type, key, content_type, headers, payload)
select towpath.shard($1, $2, m.id), m.id, $3, $1, 'order.placed', $2, 'application/json', $4::text::json, $5
from (select gen_random_uuid() as id) m
"""


async def emit(
    connection: "asyncpg.Connection[Any]",
    key: str | None,
    payload: bytes | None,
    *,
    destination: str = "orders",
    kind: str = "event",
    headers: str = "[]",
) -> None:
    """Insert one outbox row."""
    await connection.execute(EMIT, destination, key, kind, headers, payload)


async def emit_many(
    connection: "asyncpg.Connection[Any]", count: int, *, keys: int = 1000, size: int = 100
) -> None:
    """Insert rows `0 … count - 1` in one statement; the payload starts with the number."""
    await connection.execute(
        """
        insert into towpath.outbox (shard, message_id, kind, destination, type, key, content_type, payload)
        select (hashint4(g % $2) & 15)::smallint, gen_random_uuid(), 'event', 'orders', 'order.placed',
               (g % $2)::text, 'application/json', convert_to(rpad(g::text || ' ', $3, 'x'), 'utf8')
        from generate_series(0, $1 - 1) g
        """,
        count,
        keys,
        size,
    )


async def race(
    url: str,
    committed: list[tuple[str, int]],
    *,
    writer: int,
    until: float | asyncio.Event,
    seed: int = 0,
    keys: int = 20,
    destination: str | None = None,
) -> None:
    """Update a hot row, then emit its new value, with all that transactions do, until a time or event.

    Given a destination, the payload is `key:value`: not every broker shows the key.
    """
    to = destination or "orders"
    rng = random.Random(f"{seed}-{writer}")
    connection = await asyncpg.connect(url, timeout=30)
    try:
        while not until.is_set() if isinstance(until, asyncio.Event) else time.monotonic() < until:
            transaction = connection.transaction()
            await transaction.start()
            number = rng.randint(1, keys)
            if rng.random() < 0.5:
                await connection.execute("select pg_current_xact_id()")
            if rng.random() < 0.3:
                await asyncio.sleep(rng.random() * 0.01)
            value: int = await connection.fetchval(
                "update hot set v = v + 1 where id = $1 returning v", number
            )
            if rng.random() < 0.2:
                with suppress(ZeroDivisionError):
                    async with connection.transaction():
                        await emit(connection, str(number), b"ghost", destination=to)
                        raise ZeroDivisionError
            payload = b"%d:%d" % (number, value) if destination else b"%d" % value
            if rng.random() < 0.3:
                async with connection.transaction():
                    await emit(connection, str(number), payload, destination=to)
            else:
                await emit(connection, str(number), payload, destination=to)
            await asyncio.sleep(rng.random() * 0.02)
            if rng.random() < 0.1:
                await transaction.rollback()
            else:
                await transaction.commit()
                committed.append((str(number), value))
    finally:
        await connection.close(timeout=10)


@dataclass(frozen=True)
class Verdict:
    """What went wrong, in counts; duplicates are allowed only where something crashed."""

    lost: int
    ghosts: int
    duplicates: int
    inversions: int


def verdict(
    committed: Iterable[tuple[str, int]], arrived: Iterable[tuple[str | None, bytes | None]]
) -> Verdict:
    """Compare sets, and the order of first appearances with the order of commits, per key."""
    expected = set(committed)
    seen: set[tuple[str, int]] = set()
    last: dict[str, int] = {}
    duplicates = inversions = ghosts = 0
    for key, payload in arrived:
        if payload == b"ghost":
            ghosts += 1
            continue
        message = (key or "", int(payload or b"0"))
        if message in seen:
            duplicates += 1
            continue
        seen.add(message)
        if message[1] < last.get(message[0], 0):
            inversions += 1
        last[message[0]] = max(message[1], last.get(message[0], 0))
    return Verdict(len(expected - seen), ghosts + len(seen - expected), duplicates, inversions)


def judge(committed: Iterable[tuple[str, int]], broker: RecordingBroker) -> Verdict:
    """The verdict over a recording broker."""
    return verdict(committed, [(each.message.key, each.message.payload) for each in broker.arrivals])


@asynccontextmanager
async def relaying(url: str, broker: Broker, options: RelayOptions = FAST) -> AsyncIterator[Relay]:
    """A running relay; stopped in an orderly way at the end, and whatever killed it is raised."""
    relay = Relay(url, broker, options)
    stop = asyncio.Event()
    running = asyncio.create_task(relay.run(stop))
    try:
        yield relay
    finally:
        stop.set()
        async with asyncio.timeout(60):
            await running


async def eventually(condition: Callable[[], bool], *, seconds: float = 60) -> None:
    """Wait until something becomes true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not become true in time"
        await asyncio.sleep(0.01)
