"""What a benchmark runs on: servers of its own, a fresh database for each subject, topics with a backlog."""

import asyncio
import itertools
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from uuid import UUID

import asyncpg
from aiokafka import AIOKafkaProducer
from uuid_utils.compat import uuid7

from benchmarks import filling, floor, floor_consumer
from benchmarks.orders import ACCOUNTS, PAYLOAD, TYPE
from towpath.brokers.factory import broker_from_url
from towpath.brokers.kafka.murmur2 import partition_of
from towpath.brokers.ports import GroupTopology
from towpath.messages.envelope import Envelope, wire_headers
from towpath.messages.headers import CE_ID, SEQUENCE, TRACEPARENT, Headers
from towpath.messages.limits import CANARY
from towpath.store import migrate
from towpath.testing.services import KafkaServer, PostgresServer, RabbitServer, run_sql

PARTITIONS = 6
_BATCH = 500
_TEMPLATE = "bench_template"
_TABLES = f"""
{floor.TABLE};
{floor_consumer.TABLE};
create table public.account (id integer primary key, balance bigint not null default 0);
insert into public.account select generate_series(0, {ACCOUNTS - 1});
create table public.effect (id uuid not null);
create table public.produced (id uuid primary key, job_id bigint);
create table public.inbox (id uuid primary key, finished_at timestamptz not null default clock_timestamp())
"""


@dataclass(frozen=True)
class Message:
    """What is produced: an id and a key."""

    id: UUID
    key: str


class Wire:
    """Headers as the relay writes them."""

    def __init__(self) -> None:
        placeholder = Envelope(
            message_id=UUID(int=0),
            type=TYPE,
            source="/towpath/benchmark/orders",
            occurred_at=datetime.now(UTC),
            content_type="application/octet-stream",
            sequence=0,
            installation="benchmark",
            headers=((TRACEPARENT, filling.TRACEPARENT.encode()),),
        )
        self._template = list(wire_headers(placeholder))
        names = [name for name, _ in self._template]
        self._at_id, self._at_sequence = names.index(CE_ID), names.index(SEQUENCE)

    def headers(self, message: Message, sequence: int) -> Headers:
        """Of one message."""
        pairs = self._template.copy()
        pairs[self._at_id] = (CE_ID, str(message.id).encode())
        pairs[self._at_sequence] = (SEQUENCE, b"%d" % sequence)
        return tuple(pairs)


def id_of(headers: Iterable[tuple[str, bytes]]) -> UUID:
    """Of a record; Debezium has a name of its own for the header."""
    values = dict(headers)
    return UUID((values.get(CE_ID) or values["id"]).decode())


def random_keys(count: int) -> Callable[[], str]:
    """One of so many keys, each as likely."""
    return lambda: str(random.randrange(count))


def messages(count: int, key: Callable[[], str]) -> list[Message]:
    """Made as `emit` makes them: ids that grow with time."""
    return [Message(uuid7(), key()) for _ in range(count)]


class Stage:
    """Servers, databases and topics of one run of a benchmark."""

    def __init__(
        self,
        postgres: PostgresServer,
        kafka: KafkaServer,
        stack: ExitStack,
        *,
        is_quick: bool,
        rabbit: RabbitServer | None = None,
    ) -> None:
        self.postgres = postgres
        self.kafka = kafka
        self.is_quick = is_quick
        self._stack = stack
        self._rabbit = rabbit
        self._kept: dict[str, str] = {}
        self._numbers = itertools.count()

    @property
    def rabbit(self) -> RabbitServer:
        """Unless it was given, it is started when it is first needed."""
        if self._rabbit is None:
            self._rabbit = self._stack.enter_context(RabbitServer())
        return self._rabbit

    def fresh_name(self, of: str) -> str:
        """For a topic, its group and a database that nobody used before."""
        return f"{of.replace('_', '-')}-{next(self._numbers)}"

    @asynccontextmanager
    async def database(self) -> AsyncIterator[str]:
        """A copy of the installed schema with the floor's tables; dropped afterwards."""
        name = f"bench_{next(self._numbers)}"
        url = await asyncio.to_thread(self.postgres.create_database, name, template=_TEMPLATE)
        connection = await asyncpg.connect(url)
        await connection.execute("checkpoint")
        await connection.close()
        try:
            yield url
        finally:
            await asyncio.to_thread(self.postgres.drop_database, name)

    async def kept(self, name: str, make: Callable[[str], Awaitable[None]]) -> str:
        """A database that is made once and then shared by all rounds."""
        if name not in self._kept:
            url = self.postgres.create_database(f"bench_{name}", template=_TEMPLATE)
            await make(url)
            self._kept[name] = url
        return self._kept[name]

    async def topic(self, name: str, group: str | None = None) -> None:
        """Create a topic, what a group needs beside it, and the one of the relay's canaries."""
        admin = broker_from_url(f"kafka://{self.kafka.bootstrap}").admin()
        groups = [GroupTopology(group, (name,))] if group else []
        await admin.apply([name, CANARY], groups, partitions=PARTITIONS)
        await admin.aclose()

    async def preload(self, topic: str, backlog: Sequence[Message], payload: bytes = PAYLOAD) -> None:
        """Put a backlog into a topic, as the relay would have."""
        wire = Wire()
        async with self.producer() as producer:
            for start in range(0, len(backlog), _BATCH * PARTITIONS):
                await _send(
                    producer, topic, backlog[start : start + _BATCH * PARTITIONS], start, wire, payload
                )

    @asynccontextmanager
    async def producer(self) -> AsyncIterator[AIOKafkaProducer]:
        """An idempotent producer."""
        producer = AIOKafkaProducer(
            bootstrap_servers=self.kafka.bootstrap,
            acks="all",
            enable_idempotence=True,
            max_batch_size=1_000_000,
        )
        await producer.start()
        try:
            yield producer
        finally:
            await producer.stop()


async def _send(
    producer: AIOKafkaProducer,
    topic: str,
    chunk: Sequence[Message],
    sequence: int,
    wire: Wire,
    payload: bytes,
) -> None:
    batches = [producer.create_batch() for _ in range(PARTITIONS)]
    answers = []
    now = int(time.time() * 1000)
    for number, message in enumerate(chunk, sequence + 1):
        key = message.key.encode()
        partition = partition_of(key, PARTITIONS)
        record = {
            "timestamp": now,
            "key": key,
            "value": payload,
            "headers": list(wire.headers(message, number)),
        }
        if batches[partition].append(**record) is None:
            answers.append(await producer.send_batch(batches[partition], topic, partition=partition))
            batches[partition] = producer.create_batch()
            batches[partition].append(**record)
    answers += [
        await producer.send_batch(batch, topic, partition=number)
        for number, batch in enumerate(batches)
        if batch.record_count()
    ]
    await asyncio.gather(*answers)


def prepare(postgres: PostgresServer) -> None:
    """What every database of a stage begins with."""
    url = postgres.create_database(_TEMPLATE)
    migrate.upgrade(url)
    run_sql(url, *_TABLES.split(";"))


@asynccontextmanager
async def open_stage(*, quick: bool, has_capture: bool = False) -> AsyncIterator[Stage]:
    """Postgres with fsync on, and Kafka with its usual compiler, unless nothing is measured.

    With change data capture among the subjects, all of them run on a log that can be decoded, and records
    have the broker's time: Debezium gives them its own, of before they wait in its queue.
    """
    settings = {"shared_buffers": "512MB", "max_wal_size": "4GB"}
    if has_capture:
        settings["wal_level"] = "logical"
    broker = {"log.message.timestamp.type": "LogAppendTime"} if has_capture else {}
    with ExitStack() as stack:
        postgres = stack.enter_context(PostgresServer(fsync=not quick, settings=settings))
        kafka = stack.enter_context(
            KafkaServer(is_for_benchmark=not quick, heap_megabytes=1024, settings=broker)
        )
        await asyncio.to_thread(prepare, postgres)
        yield Stage(postgres, kafka, stack, is_quick=quick)
