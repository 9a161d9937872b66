"""The brokers as an outsider sees them: by their own clients, not through our adapters."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import aio_pika
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from towpath.brokers.rabbitmq.topology import group_queue

Headers = tuple[tuple[str, bytes], ...]


@dataclass(frozen=True)
class WireMessage:
    """A message as it lies at the broker."""

    address: str
    key: bytes | None
    headers: Headers
    body: bytes | None
    routing_key: str = ""

    def header(self, name: str) -> str:
        """The value of a header that is there once."""
        (value,) = [value for header, value in self.headers if header == name]
        return value.decode()

    def has(self, name: str) -> bool:
        """Whether a header is there."""
        return any(header == name for header, _ in self.headers)

    def changed(
        self, *, headers: Mapping[str, str] | None = None, body: bytes | None = None
    ) -> "WireMessage":
        """With other header values, or another body."""
        new = headers or {}
        return replace(
            self,
            headers=tuple(
                (name, new[name].encode() if name in new else value) for name, value in self.headers
            ),
            body=self.body if body is None else body,
        )


class WireBroker(Protocol):
    """What tests do at a broker behind the product's back."""

    @property
    def url(self) -> str: ...

    @property
    def options(self) -> Mapping[str, object]:
        """For our adapters."""
        ...

    async def listen(self, address: str) -> None:
        """From now on keep what is sent to an address, for `heard`."""
        ...

    async def heard(self, address: str) -> Sequence[WireMessage]:
        """What was sent to an address since `listen`, and not returned before."""
        ...

    async def dead_letters(self, group: str, address: str) -> Sequence[WireMessage]:
        """What lies in a group's dead-letter queue; it is taken out where reading does so."""
        ...

    async def send(self, messages: Sequence[WireMessage]) -> None:
        """Send messages as they are, one after another."""
        ...

    async def unread(self, group: str, address: str) -> int:
        """How many messages a group that nobody consumes for has not acknowledged."""
        ...


class KafkaWire:
    """Apache Kafka."""

    def __init__(self, bootstrap: str) -> None:
        self._bootstrap = bootstrap
        self.url = f"kafka://{bootstrap}"
        # A member that was killed is missed after this; the broker allows no less.
        self.options: Mapping[str, object] = {
            "session_timeout_ms": 6_000,
            "rebalance_timeout_ms": 10_000,
            "heartbeat_interval_ms": 1_000,
        }
        self._read: dict[TopicPartition, int] = {}

    async def listen(self, address: str) -> None:
        """A topic keeps everything."""

    async def heard(self, address: str) -> Sequence[WireMessage]:
        consumer = AIOKafkaConsumer(bootstrap_servers=self._bootstrap, enable_auto_commit=False)
        try:
            await consumer.start()
            partitions = [
                TopicPartition(address, number) for number in await self._partitions(consumer, address)
            ]
            consumer.assign(partitions)
            ends: dict[TopicPartition, int] = await consumer.end_offsets(partitions)
            found: list[WireMessage] = []
            for partition, end in ends.items():
                position = self._read.get(partition, 0)
                consumer.seek(partition, position)
                while position < end:
                    record = await asyncio.wait_for(consumer.getone(partition), 60)
                    position = record.offset + 1
                    found.append(WireMessage(address, record.key, tuple(record.headers), record.value))
                self._read[partition] = position
            return found
        finally:
            await consumer.stop()

    def forget(self, address: str) -> None:
        """The topic was deleted: one that is made again is read from its beginning."""
        self._read = {partition: at for partition, at in self._read.items() if partition.topic != address}

    async def _partitions(self, consumer: AIOKafkaConsumer, address: str) -> set[int]:
        await consumer._client.add_topic(address)
        async with asyncio.timeout(60):  # a new topic is not known at once
            while not (partitions := consumer.partitions_for_topic(address)):
                await asyncio.sleep(0.1)
                await consumer._client.force_metadata_update()
        return set(partitions)

    async def dead_letters(self, group: str, address: str) -> Sequence[WireMessage]:
        return await self.heard(f"{group}.{address}.dlq")

    async def send(self, messages: Sequence[WireMessage]) -> None:
        producer = AIOKafkaProducer(bootstrap_servers=self._bootstrap, acks="all")
        await producer.start()
        try:
            for message in messages:
                await producer.send_and_wait(
                    message.address, message.body, key=message.key, headers=list(message.headers)
                )
        finally:
            await producer.stop()

    async def unread(self, group: str, address: str) -> int:
        consumer = AIOKafkaConsumer(
            bootstrap_servers=self._bootstrap, group_id=group, enable_auto_commit=False
        )
        try:
            await consumer.start()
            numbers = await self._partitions(consumer, address)
            consumer.assign([TopicPartition(address, number) for number in numbers])
            ends = await consumer.end_offsets(list(consumer.assignment()))
            return sum([end - (await consumer.committed(partition) or 0) for partition, end in ends.items()])
        finally:
            await consumer.stop()


class RabbitWire:
    """RabbitMQ."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.options: Mapping[str, object] = {}

    async def listen(self, address: str) -> None:
        async with await aio_pika.connect(self.url) as connection:
            channel = await connection.channel()
            queue = await channel.declare_queue(f"heard.{address}", durable=True)
            await queue.bind(await channel.get_exchange(address), routing_key="#")

    async def heard(self, address: str) -> Sequence[WireMessage]:
        return await self._drain(f"heard.{address}", address)

    async def dead_letters(self, group: str, address: str) -> Sequence[WireMessage]:
        return await self._drain(f"{group}.{address}.dlq", address)

    async def _drain(self, queue_name: str, address: str) -> Sequence[WireMessage]:
        async with await aio_pika.connect(self.url) as connection:
            channel = await connection.channel()
            queue = await channel.get_queue(queue_name)
            found: list[WireMessage] = []
            while (message := await queue.get(fail=False, no_ack=True, timeout=60)) is not None:
                headers = tuple((name, _bytes(value)) for name, value in message.headers.items())
                found.append(WireMessage(address, None, headers, message.body, message.routing_key or ""))
            return found

    async def send(self, messages: Sequence[WireMessage]) -> None:
        async with await aio_pika.connect(self.url) as connection:
            channel = await connection.channel(on_return_raises=True)
            for message in messages:
                exchange = await channel.get_exchange(message.address, ensure=False)
                await exchange.publish(
                    aio_pika.Message(
                        message.body or b"", headers={name: value.decode() for name, value in message.headers}
                    ),
                    message.routing_key,
                )

    async def unread(self, group: str, address: str) -> int:
        async with await aio_pika.connect(self.url) as connection:
            channel = await connection.channel()
            queue = await channel.declare_queue(group_queue(group, address, 0), passive=True)
            return queue.declaration_result.message_count or 0


def _bytes(value: Any) -> bytes:
    return bytes(value) if isinstance(value, bytes | bytearray) else str(value).encode()
