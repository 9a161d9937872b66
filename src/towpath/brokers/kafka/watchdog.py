"""Whether the broker answers a consumer, and whether the consumer makes progress.

The library reconnects by itself and says nothing; and a fetcher that has silently stopped looks like
an idle topic. Readiness and the replacement of a stuck consumer rest on what is found out here.
"""

import asyncio
import time
from typing import Final

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka import errors as kafka

from towpath.brokers.intake import Intake
from towpath.brokers.kafka.assignments import Assignments
from towpath.brokers.kafka.connection import known_topics, reset_consumer
from towpath.brokers.kafka.topic_ids import is_another
from towpath.errors import BrokerUnavailable, TopologyError

_INTERVAL_SECONDS: Final = 1.0
_PROBE_SECONDS: Final = 3.0
_ALIVE_SECONDS: Final = 6.0
_STALL_SECONDS: Final = 60.0
_UNANSWERED: Final = (kafka.KafkaError, OSError, TimeoutError)


class Watchdog:
    """Watches one consumer. `watch` raises when it must be replaced."""

    def __init__(
        self,
        assignments: Assignments,
        intake: Intake,
        *,
        silence_seconds: float,
        join_seconds: float,
    ) -> None:
        self._assignments = assignments
        self._intake = intake
        self._silence_seconds = silence_seconds
        """After so long without any answer the connections are made anew."""
        self._join_seconds = join_seconds
        """A join may take so long."""
        self._joined_at: float | None = None
        self._left_at = time.monotonic()
        self._answered_at = 0.0
        self._reset_at = 0.0
        self._stamps: dict[TopicPartition, int | None] = {}
        self._fetched_at = 0.0
        self._pressed_at = 0.0
        """When the intake was last without room, so that nothing had to be fetched."""

    @property
    def is_alive(self) -> bool:
        """Whether the group was joined and the broker answered within the last seconds."""
        return self._joined_at is not None and time.monotonic() - self._answered_at < _ALIVE_SECONDS

    def answered(self) -> None:
        """The broker answered something just now."""
        self._answered_at = time.monotonic()

    def joined(self) -> None:
        """The member has its partitions."""
        self._joined_at = self._answered_at = time.monotonic()

    def left(self) -> None:
        """The member is about to join again, or has gone."""
        self._joined_at = None
        self._left_at = time.monotonic()

    async def watch(self, consumer: AIOKafkaConsumer, addresses: tuple[str, ...]) -> None:
        """Look every second. Raises BrokerUnavailable or TopologyError when a new consumer is needed."""
        while True:
            await asyncio.sleep(_INTERVAL_SECONDS)
            if self._joined_at is not None:
                _raise_if_deleted(consumer, addresses)
            if not self._intake.has_room or not self._assignments.partitions:
                self._pressed_at = time.monotonic()
            fetched_at = self._last_fetch_at(consumer)
            self._answered_at = max(self._answered_at, fetched_at)
            if time.monotonic() - self._answered_at >= _ALIVE_SECONDS / 2:
                if not await _answers(consumer):
                    self._bear_silence(consumer)
                    continue
                self.answered()
                self._raise_if_stalled(fetched_at)
            await self._raise_if_made_anew(consumer)

    async def _raise_if_made_anew(self, consumer: AIOKafkaConsumer) -> None:
        """The client reads on at its offset in whatever has the topic's name by now."""
        read = [(topic, topic_id) for topic, topic_id in self._assignments.topics_read if topic_id]
        if not read:
            return
        try:
            async with asyncio.timeout(_PROBE_SECONDS):
                known = await known_topics(consumer, {topic for topic, _ in read})
        except _UNANSWERED:
            return  # silence is judged elsewhere
        for topic, topic_id in read:
            if is_another(topic_id, known.get(topic, "")):
                raise TopologyError(f"Kafka topic {topic!r} was deleted and made again")

    def _last_fetch_at(self, consumer: AIOKafkaConsumer) -> float:
        """When the broker last answered a fetch, on the monotonic clock; 0 when it never did.

        The library stamps a fetch by the wall clock, which may jump: only that a stamp is new counts.
        """
        assigned = consumer.assignment()
        stamps = {
            each: consumer.last_poll_timestamp(each)
            for each in self._assignments.partitions
            if each in assigned
        }
        if any(stamp is not None and stamp != self._stamps.get(each) for each, stamp in stamps.items()):
            self._fetched_at = time.monotonic()
        self._stamps = stamps
        return self._fetched_at

    def _raise_if_stalled(self, fetched_at: float) -> None:
        now = time.monotonic()
        if self._joined_at is None:
            if now - self._left_at > 3 * self._join_seconds:
                raise BrokerUnavailable("Kafka: the group could not be joined, starting anew")
            return
        progress_at = max(fetched_at, self._joined_at, self._pressed_at)
        if self._assignments.partitions and now - progress_at > _STALL_SECONDS:
            raise BrokerUnavailable("Kafka: the consumer stopped fetching, starting anew")

    def _bear_silence(self, consumer: AIOKafkaConsumer) -> None:
        """Reset the connections now and then; after long begin anew, which also shows refused credentials."""
        now = time.monotonic()
        if now - max(self._answered_at, self._left_at) > _STALL_SECONDS:
            raise BrokerUnavailable("Kafka: the broker does not answer")
        if now - max(self._answered_at, self._reset_at) > self._silence_seconds:
            reset_consumer(consumer)
            self._reset_at = now


def _raise_if_deleted(consumer: AIOKafkaConsumer, addresses: tuple[str, ...]) -> None:
    """A deleted topic leaves the member without partitions, and made again it would not be noticed."""
    for address in addresses:
        if not consumer.partitions_for_topic(address):
            raise TopologyError(f"Kafka topic {address!r} was deleted: create it (towpath broker apply)")


async def _answers(consumer: AIOKafkaConsumer) -> bool:
    """Ask for the list of topics: a small question to any broker of the cluster."""
    try:
        async with asyncio.timeout(_PROBE_SECONDS):
            await consumer.topics()
    except _UNANSWERED:
        return False
    return True
