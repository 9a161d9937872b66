"""One consuming connection: a channel for each queue, a task that settles, a probe that watches."""

import asyncio
import time
from collections.abc import Callable
from datetime import datetime
from typing import Final

import aiormq
from aiormq import exceptions as amqp
from aiormq import spec

from towpath.brokers.intake import Intake
from towpath.brokers.ports import Delivery, Subscription
from towpath.brokers.rabbitmq.config import RabbitConfig
from towpath.brokers.rabbitmq.connection import Link
from towpath.brokers.rabbitmq.errors import CLIENT_ERRORS, is_cancelled_from_outside, translate
from towpath.brokers.rabbitmq.headers import decode_death, decode_headers, without_death
from towpath.brokers.rabbitmq.settling import Settling
from towpath.brokers.rabbitmq.topology import QueueSpec, broker_dead_letter_queue, group_queues
from towpath.errors import BrokerUnavailable, TopologyError, TowpathError

_PROBE_INTERVAL_SECONDS: Final = 3.0
_PROBE_SECONDS: Final = 5.0
_ALIVE_SECONDS: Final = 9.0
_SETTLE_SECONDS: Final = 3.0
_PAUSE_SECONDS: Final = 0.2
_DEAD_PREFETCH: Final = 10
"""Of what the broker dead-lettered: beside the intake's bound, and few."""


class IntakeOverflow(Exception):
    """The messages are so large that fewer must be prefetched; nothing else is wrong."""

    def __init__(self, prefetch: int) -> None:
        super().__init__(f"prefetch {prefetch}")
        self.prefetch = prefetch


class GivenBack(Exception):
    """Deliveries were released; a new connection brings them again, in order with what came after them."""


class _Consumer:
    """One queue consumed on a channel of its own: an acknowledgement that comes too late closes it."""

    def __init__(
        self, queue: QueueSpec, source: str, channel: aiormq.Channel, epoch: int, *, is_of_the_dead: bool
    ) -> None:
        self.queue = queue
        self.source = source
        """The address its messages were sent to."""
        self.is_of_the_dead = is_of_the_dead
        """Whether its messages are those that the broker dead-lettered."""
        self.channel = channel
        self.epoch = epoch
        self.settling = Settling(channel)
        self.is_ending = False
        """Something was given back: nothing that came later may overtake it."""


class ConsumerSession:
    """Deliveries of one connection. Only the tasks in `run` await the broker; the callback never does."""

    def __init__(
        self,
        config: RabbitConfig,
        subscription: Subscription,
        intake: Intake,
        *,
        prefetch: int,
        new_epoch: Callable[[], int],
    ) -> None:
        self._config = config
        self._subscription = subscription
        self._intake = intake
        self._prefetch = prefetch
        self._least_prefetch = 1
        self._probed = ""
        """A queue that must be there."""
        self._new_epoch = new_epoch
        self._link: Link | None = None
        self._consumers: dict[str, _Consumer] = {}
        self._probe_channel: aiormq.Channel | None = None
        self._answered_at = 0.0
        self._work = asyncio.Event()
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def is_open(self) -> bool:
        """Whether there is a connection."""
        return self._link is not None

    @property
    def is_alive(self) -> bool:
        """Whether every queue is consumed on an open channel and the broker answered lately."""
        return (
            self._link is not None
            and self._link.is_open
            and not self._failure.done()
            and all(not consumer.channel.is_closed for consumer in self._consumers.values())
            and time.monotonic() - self._answered_at < _ALIVE_SECONDS
        )

    async def open(self) -> None:
        """Connect and consume every queue. Raises BrokerUnavailable or ConfigurationError."""
        group, addresses = self._subscription.group, self._subscription.addresses
        queues = [
            (queue, address)
            for address in addresses
            for queue in group_queues(group, address, self._config.queues_per_group)
        ]
        self._least_prefetch, self._probed = len(queues), queues[0][0].name
        try:
            self._link = await Link.open(self._config)
            async with asyncio.timeout(self._config.connect_timeout_seconds):
                self._probe_channel = await self._link.channel(confirms=False)
                if not self._intake.is_paused:
                    share = max(1, self._prefetch // len(queues))
                    for queue, address in queues:
                        await self._consume(queue, address, share)
                    for address in addresses:
                        dead = broker_dead_letter_queue(group, address)
                        await self._consume(dead, address, min(share, _DEAD_PREFETCH), is_of_the_dead=True)
        except BaseException as error:
            await self.abandon()
            if isinstance(error, asyncio.CancelledError) and not is_cancelled_from_outside():
                raise BrokerUnavailable("RabbitMQ: the connection broke while it was opened") from error
            if isinstance(error, CLIENT_ERRORS):
                raise self._explained(error) from error
            raise
        self._answered_at = time.monotonic()

    @staticmethod
    def _explained(error: BaseException) -> TowpathError:
        ours = translate(error)
        if isinstance(error, amqp.ChannelNotFoundEntity):
            return TopologyError(f"{ours}: create it (towpath broker apply)")
        return ours

    async def _consume(
        self, queue: QueueSpec, source: str, prefetch: int, *, is_of_the_dead: bool = False
    ) -> None:
        if self._link is None:
            raise BrokerUnavailable("RabbitMQ: not connected")
        channel = await self._link.channel(confirms=False)
        consumer = _Consumer(queue, source, channel, self._new_epoch(), is_of_the_dead=is_of_the_dead)
        self._consumers[queue.name] = consumer
        channel.closing.add_done_callback(lambda _: self._fail("the broker closed a channel"))
        channel.on_consumer_cancel_callbacks.add(lambda _: self._fail(f"{queue.name}: consumer cancelled"))
        await channel.basic_qos(prefetch_count=prefetch)

        async def arrive(message: aiormq.abc.DeliveredMessage) -> None:
            self._arrive(consumer, message)

        await channel.basic_consume(queue.name, arrive)

    def _fail(self, reason: str, error: BaseException | None = None) -> None:
        if not self._failure.done():
            failure = BrokerUnavailable(f"RabbitMQ: {reason}")
            failure.__cause__ = error
            self._failure.set_exception(failure)
            self._failure.exception()  # seen, also when `run` was never reached

    def _arrive(self, consumer: _Consumer, message: aiormq.abc.DeliveredMessage) -> None:
        """Buffer one message. Called by the library; awaits nothing, so the order stays."""
        delivery = _delivery(consumer, message)
        if delivery is None or consumer.is_ending or self._failure.done():
            return
        consumer.settling.receive(delivery.offset)
        self._intake.add(delivery)
        excess = self._intake.size_bytes - self._subscription.max_in_flight_bytes
        if excess > 0 and self._prefetch > self._least_prefetch:
            mean = self._intake.size_bytes / self._intake.count
            fitting = min(int(self._subscription.max_in_flight_bytes / mean * 0.8), self._prefetch // 2)
            self._failure.set_exception(IntakeOverflow(max(self._least_prefetch, fitting)))
            self._failure.exception()

    def holds(self, delivery: Delivery) -> bool:
        """Whether the delivery came by a channel of this session that is still open, and may start."""
        consumer = self._consumer_of(delivery)
        return consumer is not None and not consumer.is_ending

    def _consumer_of(self, delivery: Delivery) -> _Consumer | None:
        consumer = self._consumers.get(delivery.partition)
        if consumer is None or consumer.epoch != delivery.epoch or consumer.channel.is_closed:
            return None
        return consumer

    def acknowledge(self, delivery: Delivery) -> None:
        """Have it acknowledged; ignored when it is stale or settled."""
        consumer = self._consumer_of(delivery)
        if consumer is not None and consumer.settling.acknowledge(delivery.offset):
            self._intake.settle(delivery)
            self._work.set()

    def release(self, delivery: Delivery) -> None:
        """Give it back; ignored when it is stale or settled.

        It comes again when the session has ended, before everything that came after it: what is
        buffered, or still arrives, waits there with it.
        """
        consumer = self._consumer_of(delivery)
        if consumer is not None and consumer.settling.release(delivery.offset):
            self._intake.settle(delivery)
            consumer.is_ending = True
            for later in self._intake.purge(delivery.partition, delivery.epoch):
                consumer.settling.release(later.offset)

    def end_if_given_back(self) -> None:
        """Let `run` raise GivenBack if anything was released."""
        if any(consumer.is_ending for consumer in self._consumers.values()) and not self._failure.done():
            self._failure.set_exception(GivenBack())
            self._failure.exception()

    async def run(self) -> None:
        """Settle and watch until the session is over; then raise why: BrokerUnavailable or one of ours."""
        tasks = [
            asyncio.create_task(self._settle_regularly(), name="rabbitmq-settle"),
            asyncio.create_task(self._watch(), name="rabbitmq-watch"),
            asyncio.create_task(self._heed_pause(), name="rabbitmq-pause"),
        ]
        try:
            await asyncio.wait([*tasks, self._failure], return_when=asyncio.FIRST_COMPLETED)
            for task in (self._failure, *tasks):
                if task.done():
                    task.result()
        except asyncio.CancelledError as error:
            if is_cancelled_from_outside():
                raise
            raise BrokerUnavailable("RabbitMQ: the connection broke") from error
        except CLIENT_ERRORS as error:
            ours = translate(error)
            raise (ours if isinstance(ours, BrokerUnavailable) else BrokerUnavailable(str(ours))) from error
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _settle_regularly(self) -> None:
        """Send what was settled since the last round; busy rounds gather more by themselves."""
        while True:
            await self._work.wait()
            self._work.clear()
            for consumer in self._consumers.values():
                await consumer.settling.send()

    async def _watch(self) -> None:
        """Ask the broker for something small now and then: TCP hides a frozen peer for a long time."""
        while self._probe_channel is not None:
            await asyncio.sleep(_PROBE_INTERVAL_SECONDS)
            try:
                async with asyncio.timeout(_PROBE_SECONDS):
                    await self._probe_channel.queue_declare(self._probed, passive=True)
            except TimeoutError as error:
                raise BrokerUnavailable("RabbitMQ: the broker does not answer") from error
            self._answered_at = time.monotonic()

    async def _heed_pause(self) -> None:
        """Raise GivenBack when the next session should consume nothing, or again.

        What was prefetched before a pause would be overdue at the broker some day; what runs is
        waited for, so that it can be acknowledged here.
        """
        while True:
            await asyncio.sleep(_PAUSE_SECONDS)
            intake, is_consuming = self._intake, bool(self._consumers)
            is_idle = intake.count == intake.buffered_count
            if is_consuming is intake.is_paused and (is_idle or not is_consuming):
                raise GivenBack

    async def close(self) -> None:
        """Send what is settled, wait until it is written, close in order; bounded."""
        try:
            async with asyncio.timeout(_SETTLE_SECONDS):
                for consumer in self._consumers.values():
                    if not consumer.channel.is_closed:
                        await consumer.settling.send(is_waiting=True)
        except asyncio.CancelledError:
            if is_cancelled_from_outside():
                raise
        except CLIENT_ERRORS:
            pass  # not acknowledged, so it comes again: that is what at least once means
        self._forget()
        link, self._link = self._link, None
        if link is not None:
            await link.aclose()

    async def abandon(self) -> None:
        """Cut the connection; the broker puts back what was not acknowledged. Bounded."""
        self._forget()
        link, self._link = self._link, None
        if link is not None:
            link.abort()
            await link.finish()

    def _forget(self) -> None:
        self._fail("the session was ended")
        consumers, self._consumers = self._consumers, {}
        for consumer in consumers.values():
            self._intake.forget(consumer.queue.name, consumer.epoch)


def _delivery(consumer: _Consumer, message: aiormq.abc.DeliveredMessage) -> Delivery | None:
    frame = message.delivery
    if not isinstance(frame, spec.Basic.Deliver) or frame.delivery_tag is None:
        return None
    properties = message.header.properties
    headers, key, is_null = decode_headers(properties.headers)
    if properties.content_type is not None and all(name != "content-type" for name, _ in headers):
        headers = (*headers, ("content-type", properties.content_type.encode()))
    if consumer.is_of_the_dead:
        headers = without_death(headers)
    timestamp = properties.timestamp
    message_id = properties.message_id
    return Delivery(
        source=consumer.source,
        partition=consumer.queue.name,
        offset=frame.delivery_tag,
        key=key,
        headers=headers,
        value=None if is_null else message.body,
        timestamp=timestamp if isinstance(timestamp, datetime) else None,
        is_redelivered=bool(frame.redelivered),
        epoch=consumer.epoch,
        coordinates=None if not message_id else f"{consumer.source}:{message_id}",
        death=decode_death(properties.headers) if consumer.is_of_the_dead else None,
    )
