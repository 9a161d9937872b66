"""Publishes windows to Kafka: one record batch per partition in flight, partitions in parallel.

aiokafka keeps one request per partition on the wire in any case. What this adds is the wait for each
batch's answer before the next batch of that partition is handed over: with several handed over at once
a refused batch would be followed by an acknowledged one of the same key.
"""

import asyncio
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from aiokafka import AIOKafkaProducer
from aiokafka import errors as kafka

from towpath.brokers.kafka.admin import KafkaAdmin
from towpath.brokers.kafka.config import RECORD_OVERHEAD_BYTES, KafkaConfig
from towpath.brokers.kafka.connection import bury, end_producer, start_producer
from towpath.brokers.kafka.errors import TOO_LARGE, translate
from towpath.brokers.kafka.murmur2 import partition_of, positive_hash
from towpath.brokers.ordering import OrderKey, order_key
from towpath.brokers.ports import KeepPartitions, OutboundMessage, PublishResult
from towpath.errors import BrokerUnavailable, ConfigurationError, MessageRefused, TopologyError

_UNLIMITED: Final = 1 << 30
_METADATA_RETRY_SECONDS: Final = 0.25
_CLIENT_ERRORS: Final = (kafka.KafkaError, kafka.IllegalOperation, OSError, TimeoutError)


@dataclass(slots=True)
class _Lane:
    """What is still to be written to one partition, in order."""

    topic: str
    partition: int
    max_message_bytes: int
    pending: deque[int] = field(default_factory=deque)
    withheld: set[OrderKey] = field(default_factory=set)
    """What comes after a refused message: it would overtake that."""
    batch_limit: int = _UNLIMITED
    is_refused: bool = False
    """A batch was refused as a whole: what is left goes through another producer."""


class KafkaPublisher:
    """The publisher port over one aiokafka producer, which is replaced after every failure."""

    def __init__(self, config: KafkaConfig) -> None:
        self._config = config
        self._producer: AIOKafkaProducer | None = None
        self._burials: set[asyncio.Task[None]] = set()
        self._keep: KeepPartitions | None = None
        self._kept: dict[str, int] = {}

    async def start(self) -> None:
        """Connect. Raises BrokerUnavailable or ConfigurationError."""
        try:
            async with asyncio.timeout(self._config.request_timeout_seconds):
                await self._connected()
        except TimeoutError as error:
            raise BrokerUnavailable("Kafka: no answer while connecting") from error

    async def cluster(self) -> str | None:
        """The cluster's own id."""
        admin = KafkaAdmin(self._config)
        try:
            return await admin.cluster()
        finally:
            await admin.aclose()

    def keep_partitions(self, keep: KeepPartitions) -> None:
        """Place keys by these counts also when partitions are added; messages without a key use all."""
        self._keep = keep

    async def publish(self, window: Sequence[OutboundMessage], *, timeout_seconds: float) -> PublishResult:
        """Publish a window; what is settled when the time is over counts, the rest is unknown."""
        result = PublishResult()
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._publish(window, result)
        except TimeoutError:
            result.unavailable = BrokerUnavailable(f"Kafka: no answer within {timeout_seconds:g} s")
        except BrokerUnavailable as error:
            result.unavailable = error
        except ConfigurationError as error:
            result.configuration = error
        except BaseException:
            self._abandon()
            raise
        if result.unavailable is not None:
            self._abandon()
        if result.configuration is not None and not result.acknowledged and not result.refused:
            raise result.configuration
        return result

    async def _publish(self, window: Sequence[OutboundMessage], result: PublishResult) -> None:
        producer = await self._connected()
        partition_counts = await self._partition_counts(producer, window, result)
        placing = await self._placing(partition_counts)
        lanes: dict[tuple[str, int], _Lane] = {}
        for index, message in enumerate(window):
            address, key = message.address, message.key
            count = partition_counts.get(address)
            if count is None:
                continue
            if key is None:
                partition = positive_hash(message.message_id.bytes) % count
            else:
                partition = partition_of(key.encode(), placing[address])
            lane = lanes.get((address, partition))
            if lane is None:
                lane = lanes[address, partition] = _Lane(address, partition, self._config.max_message_bytes)
            lane.pending.append(index)
        await self._drain(list(lanes.values()), window, result)

    async def _partition_counts(
        self,
        producer: AIOKafkaProducer,
        window: Sequence[OutboundMessage],
        result: PublishResult,
    ) -> dict[str, int]:
        """Partitions by topic; the topics that do not exist are left out and noted in the result."""
        counts: dict[str, int] = {}
        missing: list[str] = []
        cluster = producer.client.cluster
        for topic in dict.fromkeys([message.address for message in window]):
            partitions = cluster.partitions_for_topic(topic)
            if partitions:
                counts[topic] = len(partitions)
            else:
                missing.append(topic)
        try:
            for topic in await self._existing(producer, missing):
                counts[topic] = len(await producer.partitions_for(topic))
        except _CLIENT_ERRORS as error:
            raise translate(error) from error
        absent = [topic for topic in missing if topic not in counts]
        if absent:
            result.configuration = TopologyError(
                f"Kafka topic {absent[0]!r} does not exist or may not be seen: create it (towpath broker "
                "apply), or set the broker option create_topics: true"
            )
        return counts

    async def _placing(self, counts: Mapping[str, int]) -> dict[str, int]:
        """By how many partitions keys are placed: those kept, unless the topic has fewer by now."""
        if self._keep is None:
            return dict(counts)
        if new := {topic: count for topic, count in counts.items() if topic not in self._kept}:
            self._kept.update(await self._keep(new))
        return {topic: min(count, self._kept.get(topic, count)) for topic, count in counts.items()}

    async def _existing(self, producer: AIOKafkaProducer, topics: list[str]) -> list[str]:
        """Which of these topics exist, asked in a way that never creates one by accident."""
        if not topics:
            return []
        for is_last in (False, True):
            known = (await producer.client.fetch_all_metadata()).topics()
            existing = [topic for topic in topics if topic in known]
            if len(existing) == len(topics) or is_last:
                return existing
            if self._config.is_creating_topics:
                admin = KafkaAdmin(self._config)
                try:
                    await admin.create(
                        [topic for topic in topics if topic not in known], self._config.partitions
                    )
                finally:
                    await admin.aclose()
            await asyncio.sleep(_METADATA_RETRY_SECONDS)  # a topic made a moment ago spreads among brokers
        raise AssertionError("unreachable")

    async def _drain(
        self,
        lanes: list[_Lane],
        window: Sequence[OutboundMessage],
        result: PublishResult,
    ) -> None:
        """Write every lane to its end; a batch refused as a whole comes again in halves.

        A refused batch leaves a hole in an idempotent producer's sequence, so the halves go through
        a new producer.
        """
        while lanes:
            producer = await self._connected()
            # Most windows have no more than a batch for each partition: a task for each would cost as much.
            sent: list[tuple[_Lane, list[int], asyncio.Future[Any]]] = []
            try:
                for lane in lanes:
                    taken, answer = await _hand_over(producer, lane, window, result)
                    sent.append((lane, taken, answer))
                await asyncio.wait([answer for _, _, answer in sent])
            finally:
                for lane, taken, answer in sent:
                    _take_in(lane, taken, answer, window, result)
            if longer := [lane for lane in lanes if lane.pending and not lane.is_refused]:
                async with asyncio.TaskGroup() as tasks:
                    for lane in longer:
                        tasks.create_task(_drain_lane(producer, lane, window, result))
            if result.unavailable is not None:
                return
            lanes = [lane for lane in lanes if lane.is_refused]
            if lanes:
                self._abandon()

    async def _connected(self) -> AIOKafkaProducer:
        if self._producer is None:
            self._producer = await start_producer(self._config)
        return self._producer

    def _abandon(self) -> None:
        """Close at once without flushing; what remains of the producer is buried in the background."""
        producer, self._producer = self._producer, None
        if producer is None:
            return
        burial = asyncio.create_task(bury(producer.client, end_producer(producer)))
        self._burials.add(burial)
        burial.add_done_callback(self._burials.discard)

    async def aclose(self) -> None:
        """Close; there is nothing to flush, since `publish` returns only with everything settled."""
        self._abandon()
        if self._burials:
            await asyncio.wait(self._burials)


async def _drain_lane(
    producer: AIOKafkaProducer,
    lane: _Lane,
    window: Sequence[OutboundMessage],
    result: PublishResult,
) -> None:
    """Write one lane, batch by batch, until nothing is left or something is wrong."""
    while lane.pending and not lane.is_refused:
        taken, answer = await _hand_over(producer, lane, window, result)
        await asyncio.wait([answer])
        _take_in(lane, taken, answer, window, result)


async def _hand_over(
    producer: AIOKafkaProducer, lane: _Lane, window: Sequence[OutboundMessage], result: PublishResult
) -> tuple[list[int], "asyncio.Future[Any]"]:
    """Give the client the lane's next batch: what is in it, and its answer to come."""
    lane.is_refused = False
    batch, taken = _fill(producer, lane, window, result)
    answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    if not taken:
        lane.pending.clear()
        answer.set_result(None)
        return taken, answer
    try:
        answer = await producer.send_batch(batch, lane.topic, partition=lane.partition)
    except _CLIENT_ERRORS as error:
        answer.set_exception(error)
    return taken, answer


def _take_in(
    lane: _Lane,
    taken: list[int],
    answer: "asyncio.Future[Any]",
    window: Sequence[OutboundMessage],
    result: PublishResult,
) -> None:
    """Note what came of a batch, if that is known; a lane with an error not its own is left for now."""
    if not answer.done():
        answer.cancel()
        return
    error = kafka.KafkaConnectionError("given up by the client") if answer.cancelled() else answer.exception()
    if error is None:
        result.acknowledged.update(taken)
        lane.batch_limit = min(_UNLIMITED, lane.batch_limit * 2)
        return
    is_poisoned = isinstance(error, kafka.UnknownError) and any(
        window[index].key is None for index in taken
    )  # an unkeyed record in a compacted topic is refused with a code the client does not know
    if is_poisoned or isinstance(error, (*TOO_LARGE, kafka.CorruptRecordException)):
        lane.is_refused = True
        _split(taken, lane, window, result, error)
    elif isinstance(error, _CLIENT_ERRORS):
        lane.pending.clear()
        _note(error, result)
    else:
        raise error


def _fill(
    producer: AIOKafkaProducer, lane: _Lane, window: Sequence[OutboundMessage], result: PublishResult
) -> tuple[Any, list[int]]:
    """A batch of the lane's messages, as many as it takes, and their indexes."""
    while True:
        batch = producer.create_batch()
        taken, too_large = _append_all(batch, lane, window)
        if too_large is None:
            return batch, taken
        lane.pending.extendleft(reversed(taken))  # the batch has it, and nothing takes it out again
        size, limit = window[too_large].size_bytes, lane.max_message_bytes
        refusal = MessageRefused("too_large", f"{size} bytes, the limit is {limit}")
        _refuse(too_large, refusal, lane, window, result)


def _append_all(batch: Any, lane: _Lane, window: Sequence[OutboundMessage]) -> tuple[list[int], int | None]:
    """Move messages from the lane into the batch while it takes them; their indexes.

    And the index of one that must not be sent, if there is one, which ends that.
    """
    taken: list[int] = []
    append, pending, limit = batch.append, lane.pending, lane.max_message_bytes
    published_at_ms = int(time.time() * 1000)
    while pending and len(taken) < lane.batch_limit:
        index = pending[0]
        message = window[index]
        if lane.withheld and order_key(message) in lane.withheld:
            pending.popleft()
            continue
        key = None if message.key is None else message.key.encode()
        headers = list(message.headers)
        record = append(timestamp=published_at_ms, key=key, value=message.payload, headers=headers)
        if record is None:
            break
        pending.popleft()
        if record.size > limit and _is_too_large(record.size, message, limit):
            return taken, index
        taken.append(index)
    return taken, None


def _is_too_large(record_bytes: int, message: OutboundMessage, limit: int) -> bool:
    """The limit counts what the sender gave; what the format adds has half of the room kept for it."""
    return message.size_bytes > limit or record_bytes > limit + RECORD_OVERHEAD_BYTES // 2


def _split(
    taken: list[int],
    lane: _Lane,
    window: Sequence[OutboundMessage],
    result: PublishResult,
    error: BaseException,
) -> None:
    """Refuse a lone message, or put a refused batch back to be tried in halves."""
    if len(taken) > 1:
        lane.pending.extendleft(reversed(taken))
        lane.batch_limit = len(taken) // 2
        return
    refusal = translate(error)
    if not isinstance(refusal, MessageRefused):
        refusal = MessageRefused("invalid_record", str(refusal))
    _refuse(taken[0], refusal, lane, window, result)


def _refuse(
    index: int,
    refusal: MessageRefused,
    lane: _Lane,
    window: Sequence[OutboundMessage],
    result: PublishResult,
) -> None:
    result.refused[index] = refusal
    key = order_key(window[index])
    if key is not None:
        lane.withheld.add(key)


def _note(error: BaseException, result: PublishResult) -> None:
    """An error that is not one message's fault, into the result."""
    ours = translate(error)
    ours.__cause__ = error
    if isinstance(ours, ConfigurationError):
        result.configuration = ours
    else:
        result.unavailable = ours if isinstance(ours, BrokerUnavailable) else BrokerUnavailable(str(ours))
