"""Publishes windows to RabbitMQ with confirms: keys in parallel, the messages of one key in turn.

The next message of a key is written when the one before it is confirmed, so nothing of a key is
confirmed behind a refusal. A hot key runs at one confirm each.

The broker answers some faults of one message (headers beyond a frame, a body beyond its limit) by
closing the channel or the connection, without saying whose fault it was. Then what is left of the
window is sent one at a time until the culprit is found.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

import aiormq
from aio_pika import exceptions as pika
from aiormq import exceptions as amqp
from aiormq import spec

from towpath.brokers.ordering import OrderKey, chains, order_key
from towpath.brokers.ports import OutboundMessage, PublishResult
from towpath.brokers.rabbitmq.config import RabbitConfig
from towpath.brokers.rabbitmq.connection import Link
from towpath.brokers.rabbitmq.errors import (
    BLAMES_A_MESSAGE,
    CLIENT_ERRORS,
    describe,
    is_cancelled_from_outside,
    translate,
)
from towpath.brokers.rabbitmq.headers import encode_headers, encoded_size_bytes
from towpath.errors import BrokerUnavailable, ConfigurationError, MessageRefused, TopologyError

_PROPERTIES_OVERHEAD_BYTES: Final = 1024
_ROUTING_KEY_LIMIT_BYTES: Final = 255
_PERSISTENT: Final = 2


class RabbitPublisher:
    """The publisher port over one connection with one channel, replaced after every failure."""

    def __init__(self, config: RabbitConfig) -> None:
        self._config = config
        self._link: Link | None = None
        self._channel: aiormq.Channel | None = None
        self._known: set[str] = set()
        self._ended: list[Link] = []

    async def start(self) -> None:
        """Connect. Raises BrokerUnavailable or ConfigurationError."""
        try:
            async with asyncio.timeout(self._config.connect_timeout_seconds):
                await self._open_channel()
        except asyncio.CancelledError as error:
            if is_cancelled_from_outside():
                raise
            raise BrokerUnavailable("RabbitMQ: the connection broke while it was opened") from error
        except CLIENT_ERRORS as error:
            raise translate(error) from error

    async def publish(self, window: Sequence[OutboundMessage], *, timeout_seconds: float) -> PublishResult:
        """Publish a window; what is settled when the time is over counts, the rest is unknown."""
        result = PublishResult()
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._publish(window, result)
        except TimeoutError:
            result.unavailable = BrokerUnavailable(f"RabbitMQ: no answer within {timeout_seconds:g} s")
        except ConfigurationError as error:
            result.configuration = error
        except BrokerUnavailable as error:
            result.unavailable = error
        except asyncio.CancelledError:
            if is_cancelled_from_outside():
                self._abandon()
                raise
            result.unavailable = BrokerUnavailable("RabbitMQ: the connection broke")
        except BaseException:
            self._abandon()
            raise
        if result.unavailable is not None:
            self._abandon()
        if result.configuration is not None and not result.acknowledged and not result.refused:
            raise result.configuration
        return result

    async def _publish(self, window: Sequence[OutboundMessage], result: PublishResult) -> None:
        work = _Work(window, result)
        is_isolating = len({message.message_id for message in window}) < len(window)
        while True:
            try:
                channel = await self._open_channel()
                work.refuse_unsendable(self._config.max_message_bytes, self._frame_max_bytes)
                await self._check_exchanges(work)
                concurrency = 1 if is_isolating else self._config.publish_concurrency
                await self._run(channel, work, concurrency=concurrency)
            except _ClosedChannel as closed:
                self._channel = None
                if isinstance(closed.error, amqp.ChannelNotFoundEntity):
                    self._known.clear()
                    work.not_found_count += 1
                    if work.not_found_count <= 2:
                        continue
                    raise translate(closed.error) from closed.error
                if not isinstance(closed.error, BLAMES_A_MESSAGE):
                    raise translate(closed.error) from closed.error
                if isinstance(closed.error, amqp.ConnectionClosed):
                    self._abandon()
                if is_isolating:
                    work.refuse(closed.index, MessageRefused("refused_by_broker", describe(closed.error)))
                is_isolating = True
            except CLIENT_ERRORS as error:
                raise translate(error) from error
            else:
                return

    @property
    def _frame_max_bytes(self) -> int:
        return 131_072 if self._link is None else self._link.frame_max_bytes

    async def _check_exchanges(self, work: "_Work") -> None:
        """Leave out addresses without an exchange: publishing to one closes the channel."""
        unchecked = {work.window[index].address for index in work.open_indexes()} - self._known - work.missing
        for address in sorted(unchecked):
            if await self._exists(address):
                self._known.add(address)
            else:
                work.missing.add(address)
                work.result.configuration = TopologyError(
                    f"RabbitMQ exchange {address!r} does not exist: create it (towpath broker apply)"
                )

    async def _exists(self, exchange: str) -> bool:
        """Ask on a channel of its own, since the broker closes it for an answer of no."""
        if self._link is None:
            raise BrokerUnavailable("RabbitMQ: not connected")
        channel = await self._link.channel(confirms=False)
        try:
            await channel.exchange_declare(exchange, passive=True)
        except amqp.ChannelNotFoundEntity:
            return False
        await channel.close()
        return True

    async def _run(self, channel: aiormq.Channel, work: "_Work", *, concurrency: int) -> None:
        queue = deque(sorted(chains(work.window, work.open_indexes()), key=len, reverse=True))
        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(min(concurrency, len(queue))):
                    tasks.create_task(self._publish_chains(channel, work, queue))
        except BaseExceptionGroup as group:
            # One failure explains them all; who had a message in flight knows the broker's words.
            failures = sorted(group.exceptions, key=lambda each: not isinstance(each, _ClosedChannel))
            raise failures[0] from group

    async def _publish_chains(self, channel: aiormq.Channel, work: "_Work", queue: deque[list[int]]) -> None:
        while queue:
            for index in queue.popleft():
                if not await self._publish_one(channel, work, index):
                    break

    async def _publish_one(self, channel: aiormq.Channel, work: "_Work", index: int) -> bool:
        """Publish and wait for the confirm; False when the message was refused."""
        message = work.window[index]
        try:
            await channel.basic_publish(
                message.payload or b"",
                exchange=message.address,
                routing_key=routing_key(message),
                properties=_properties(message, work.published_at),
                mandatory=True,
                wait=False,
            )
        except pika.DeliveryError as error:
            refusal = translate(error)
            work.refuse(index, refusal if isinstance(refusal, MessageRefused) else MessageRefused("nacked"))
            return False
        except (TypeError, ValueError, OverflowError) as error:
            work.refuse(index, MessageRefused("malformed", describe(error)))
            return False
        except (amqp.ChannelClosed, *BLAMES_A_MESSAGE) as error:
            raise _ClosedChannel(index, error) from error
        except asyncio.CancelledError as error:
            if is_cancelled_from_outside():
                raise
            raise BrokerUnavailable("RabbitMQ: the connection broke under a publish") from error
        work.result.acknowledged.add(index)
        return True

    async def _open_channel(self) -> aiormq.Channel:
        if self._link is not None and not self._link.is_open:
            self._abandon()
        if self._link is None:
            self._link = await Link.open(self._config)
        if self._channel is None or self._channel.is_closed:
            self._channel = await self._link.channel(confirms=True)
        return self._channel

    def _abandon(self) -> None:
        """Close at once without flushing."""
        link, self._link = self._link, None
        self._channel = None
        self._known.clear()
        if link is not None:
            link.abort()
            self._ended = [*(each for each in self._ended if not each.is_finished), link]

    async def aclose(self) -> None:
        """Close; there is nothing to flush, since `publish` returns only with everything settled."""
        link, self._link = self._link, None
        self._channel = None
        if link is not None:
            await link.aclose()
        for ended in self._ended:
            await ended.finish()


class _ClosedChannel(Exception):
    """The broker closed the channel or the connection while a message was in flight."""

    def __init__(self, index: int, error: BaseException) -> None:
        super().__init__(str(error))
        self.index = index
        self.error = error


class _Work:
    """One window and what is known about it."""

    def __init__(self, window: Sequence[OutboundMessage], result: PublishResult) -> None:
        self.window = window
        self.result = result
        self.missing: set[str] = set()
        self.not_found_count = 0
        self.published_at = datetime.now(UTC)
        self._withheld: set[OrderKey] = set()

    def open_indexes(self) -> list[int]:
        """What is still to be published, in order."""
        return [
            index
            for index, message in enumerate(self.window)
            if index not in self.result.acknowledged
            and index not in self.result.refused
            and message.address not in self.missing
            and order_key(message) not in self._withheld
        ]

    def refuse(self, index: int, refusal: MessageRefused) -> None:
        """Note a refusal and hold back the later messages of its key."""
        self.result.refused[index] = refusal
        key = order_key(self.window[index])
        if key is not None:
            self._withheld.add(key)

    def refuse_unsendable(self, max_message_bytes: int, frame_max_bytes: int) -> None:
        """Refuse what the protocol or the broker cannot take, before it is sent."""
        for index in self.open_indexes():
            message = self.window[index]
            if order_key(message) in self._withheld:
                continue
            if message.size_bytes > max_message_bytes:
                detail = f"{message.size_bytes} bytes, the limit is {max_message_bytes}"
                self.refuse(index, MessageRefused("too_large", detail))
                continue
            headers = encoded_size_bytes(message.headers, message.key) + _PROPERTIES_OVERHEAD_BYTES
            if headers > frame_max_bytes:
                detail = f"headers of {headers} bytes, a frame holds {frame_max_bytes}"
                self.refuse(index, MessageRefused("too_large", detail))
            elif len(routing_key(message).encode()) > _ROUTING_KEY_LIMIT_BYTES:
                self.refuse(index, MessageRefused("malformed", "the type is too long for a routing key"))


def routing_key(message: OutboundMessage) -> str:
    """`<slot>.<type>`: lets a group bind everything, a type, or a share of the keys."""
    return f"{message.routing_slot}.{message.type}"


def _properties(message: OutboundMessage, published_at: datetime) -> spec.Basic.Properties:
    content_type = next((value for name, value in message.headers if name == "content-type"), None)
    return spec.Basic.Properties(
        content_type=None if content_type is None else content_type.decode("utf-8", "replace"),
        headers=encode_headers(message.headers, key=message.key, is_null=message.payload is None),
        delivery_mode=_PERSISTENT,
        message_id=str(message.message_id),
        message_type=message.type,
        timestamp=published_at,
    )
