"""Publishes windows to RabbitMQ: one write for many messages, confirms over the window.

The next message of a key is written when the one before it is confirmed, so nothing of a key is
confirmed behind a refusal: in effect a round for the n-th message of every key. A hot key runs at one
confirm each.

The broker answers some faults of one message (headers beyond a frame, a body beyond its limit) by
closing the channel or the connection, without saying whose fault it was. Then what is left of the
window goes out again with half as many messages in flight, until the culprit is alone.
"""

import asyncio
import time
from collections.abc import Sequence
from typing import Final
from urllib.parse import urlsplit

from aiormq import exceptions as amqp

from towpath.brokers.ports import KeepPartitions, OutboundMessage, PublishResult
from towpath.brokers.rabbitmq.config import RabbitConfig
from towpath.brokers.rabbitmq.confirms import ConfirmChannel
from towpath.brokers.rabbitmq.connection import Link
from towpath.brokers.rabbitmq.errors import (
    BLAMES_A_MESSAGE,
    BLAMES_AN_ADDRESS,
    CLIENT_ERRORS,
    describe,
    is_cancelled_from_outside,
    translate,
)
from towpath.brokers.rabbitmq.frames import FrameEncoder
from towpath.brokers.rabbitmq.work import Work
from towpath.errors import BrokerUnavailable, ConfigurationError, MessageRefused, TopologyError

_WRITE_BYTES: Final = 262_144
"""Most bytes written before waiting for the operating system to take them; one larger message goes alone."""
_IN_FLIGHT_BYTES: Final = 8 << 20
_NOT_FOUND_TRIES: Final = 2


class RabbitPublisher:
    """The publisher port over one connection with one channel, replaced after every failure."""

    def __init__(self, config: RabbitConfig) -> None:
        self._config = config
        self._link: Link | None = None
        self._channel: ConfirmChannel | None = None
        self._encoder: FrameEncoder | None = None
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

    async def cluster(self) -> str | None:
        """The cluster's name, and the virtual host in it."""
        await self.start()
        name = None if self._link is None else self._link.cluster_name
        return None if name is None else f"{name}{urlsplit(self._config.url).path or '/'}"

    def keep_partitions(self, keep: KeepPartitions) -> None:
        """Nothing: an exchange has no partitions."""

    async def publish(self, window: Sequence[OutboundMessage], *, timeout_seconds: float) -> PublishResult:
        """Publish a window; what is settled when the time is over counts, the rest is unknown."""
        result = PublishResult()
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._publish(window, result)
        except TimeoutError:
            if self._channel is not None and self._channel.is_blocked and not self._channel.outstanding:
                result.unavailable = BrokerUnavailable(
                    "RabbitMQ accepts no messages: an alarm for memory or disk is on"
                )
                return result  # on a new connection it would say so only after a publish
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
        work = Work(window, result)
        is_ambiguous = len({message.message_id for message in window}) < len(window)
        most = limit = 1 if is_ambiguous else self._config.publish_concurrency
        not_found = 0
        while True:
            try:
                channel, encoder = await self._open_channel()
                await channel.ready()  # the library opens no other channel while it is blocked
                await self._check_exchanges(work)
            except CLIENT_ERRORS as error:
                raise translate(error) from error
            work.begin()
            try:
                await self._run(channel, encoder, work, limit)
            except CLIENT_ERRORS as error:
                self._channel = None
                if isinstance(error, amqp.ConnectionClosed):
                    self._abandon()
                if isinstance(error, amqp.ChannelNotFoundEntity) and not_found < _NOT_FOUND_TRIES:
                    self._known.clear()
                    not_found += 1
                    continue
                limit = self._blame(work, error, most)
            else:
                return

    @staticmethod
    def _blame(work: Work, error: BaseException, most: int) -> int:
        """Settle the message the broker closed the channel for once it is alone; how many go together next.

        What was not written cannot have done it, nor what was settled before. Raises what is no message's
        fault.
        """
        if not isinstance(error, BLAMES_A_MESSAGE + BLAMES_AN_ADDRESS) or not work.in_flight:
            raise translate(error) from error
        if len(work.in_flight) > 1:
            return len(work.in_flight) // 2
        (index,) = work.in_flight
        problem = translate(error)
        if isinstance(error, BLAMES_AN_ADDRESS) and isinstance(problem, ConfigurationError):
            work.exclude(work.window[index].address, problem)
        else:
            work.refuse_one(index, MessageRefused("refused_by_broker", describe(error)))
        return most

    async def _run(self, channel: ConfirmChannel, encoder: FrameEncoder, work: Work, limit: int) -> None:
        """Write and hear of confirms until everything that may be published is settled."""
        published_at = int(time.time())
        channel.report_to(work)
        try:
            while True:
                if (
                    work.is_startable
                    and len(work.in_flight) < limit
                    and work.in_flight_bytes < _IN_FLIGHT_BYTES
                ):
                    await channel.ready()
                    self._write(channel, encoder, work, limit, published_at)
                    await channel.drain()
                    channel.raise_if_closed()
                elif work.in_flight:
                    await channel.change()
                else:
                    return
        finally:
            channel.report_to(None)

    @staticmethod
    def _write(
        channel: ConfirmChannel, encoder: FrameEncoder, work: Work, limit: int, published_at: int
    ) -> None:
        """Write as many messages as may go, in one piece."""
        indexes: list[int] = []
        pieces: list[bytes] = []
        size_bytes = 0
        while work.is_startable and len(work.in_flight) < limit and size_bytes < _WRITE_BYTES:
            index = work.next()
            try:
                frames = encoder.encode(work.window[index], published_at)
            except MessageRefused as refusal:
                work.refuse_one(index, refusal)
                continue
            size = sum(map(len, frames))
            work.wrote(index, size)
            indexes.append(index)
            pieces += frames
            size_bytes += size
        if indexes:
            channel.write(indexes, pieces)

    async def _check_exchanges(self, work: Work) -> None:
        """Leave out addresses without an exchange: publishing to one closes the channel."""
        unchecked = {work.window[index].address for index in work.open_indexes()} - self._known
        for address in sorted(unchecked):
            if await self._exists(address):
                self._known.add(address)
            else:
                problem = f"RabbitMQ exchange {address!r} does not exist: create it (towpath broker apply)"
                work.exclude(address, TopologyError(problem))

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

    async def _open_channel(self) -> tuple[ConfirmChannel, FrameEncoder]:
        if self._link is not None and not self._link.is_open:
            self._abandon()
        if self._link is None:
            self._link = await Link.open(self._config)
        if self._channel is None or self._channel.is_closed or self._encoder is None:
            self._channel = await self._link.confirm_channel()
            self._encoder = FrameEncoder(
                self._channel.number, self._link.frame_max_bytes, self._config.max_message_bytes
            )
        return self._channel, self._encoder

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
