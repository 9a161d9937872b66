"""Publishes windows to Kafka: one record batch per partition in flight, partitions in parallel.

aiokafka keeps one request per partition on the wire in any case. What this adds is the wait for each
batch's answer before the next batch of that partition is handed over: with several handed over at once
a refused batch would be followed by an acknowledged one of the same key.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Final

from aiokafka import AIOKafkaProducer

from towpath.brokers.kafka.admin import KafkaAdmin
from towpath.brokers.kafka.config import KafkaConfig
from towpath.brokers.kafka.connection import bury, end_producer, start_producer
from towpath.brokers.kafka.errors import translate
from towpath.brokers.kafka.lanes import CLIENT_ERRORS, Lane, drain_lane, hand_over, take_in
from towpath.brokers.kafka.murmur2 import partition_of, positive_hash
from towpath.brokers.ports import KeepPartitions, OutboundMessage, PublishResult
from towpath.errors import BrokerUnavailable, ConfigurationError, TopologyError

_METADATA_RETRY_SECONDS: Final = 0.25


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
        lanes: dict[tuple[str, int], Lane] = {}
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
                lane = lanes[address, partition] = Lane(address, partition, self._config.max_message_bytes)
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
        except CLIENT_ERRORS as error:
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
        lanes: list[Lane],
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
            sent: list[tuple[Lane, list[int], asyncio.Future[Any]]] = []
            try:
                for lane in lanes:
                    taken, answer = await hand_over(producer, lane, window, result)
                    sent.append((lane, taken, answer))
                await asyncio.wait([answer for _, _, answer in sent])
            finally:
                for lane, taken, answer in sent:
                    take_in(lane, taken, answer, window, result)
            if longer := [lane for lane in lanes if lane.pending and not lane.is_refused]:
                async with asyncio.TaskGroup() as tasks:
                    for lane in longer:
                        tasks.create_task(drain_lane(producer, lane, window, result))
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
