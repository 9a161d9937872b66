"""Where a member goes on in the partitions it is given.

The client's own answer to an offset that is gone, to begin anew at one end, either repeats or skips what
lies between, and tells nobody. Here a committed offset is followed, a group that never read a partition
begins where the options say, and everything else waits for a person's word: also an offset of a topic that
was deleted and made again, however far the new one reaches. What the broker deleted before it was read is
reported, and cannot be helped.
"""

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Final

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka import errors as kafka
from aiokafka.structs import OffsetAndMetadata

from towpath.brokers.kafka.assignments import Assignments, Held
from towpath.brokers.kafka.config import KafkaConfig
from towpath.brokers.kafka.connection import committed, known_topics
from towpath.brokers.kafka.topic_ids import is_another
from towpath.brokers.ports import Bookmark, GroupListener, Refusal
from towpath.errors import StoreUnavailable
from towpath.telemetry.logging import event_logger

_ASK_SECONDS: Final = 1.0
"""Between two looks for a person's word, and for a database that is away."""
_NEVER_READ: Final = Bookmark(None)

_log: Final = event_logger(__name__)


class Placing:
    """Places the partitions of one consumer. `run` is its one task; the rest is called by the session."""

    def __init__(
        self, config: KafkaConfig, group: str, assignments: Assignments, listener: GroupListener
    ) -> None:
        self._config = config
        self._group = group
        self._assignments = assignments
        self._listener = listener
        self._wanted = asyncio.Event()
        self._topic_ids: Mapping[str, str] = {}

    def begin(self, consumer: AIOKafkaConsumer) -> None:
        """Partitions were assigned: the client must neither fetch them nor look for their place."""
        for held in self._assignments.unplaced:
            consumer.pause(held.topic_partition)
            consumer.seek(held.topic_partition, 0)
        self._wanted.set()

    def displace(self, consumer: AIOKafkaConsumer, offsets: Mapping[TopicPartition, int]) -> None:
        """The broker does not have these offsets."""
        for topic_partition, offset in offsets.items():
            consumer.pause(topic_partition)
            self._assignments.displace(topic_partition, offset)
        self._wanted.set()

    async def run(self, consumer: AIOKafkaConsumer) -> None:
        """Place what is unplaced, until cancelled. Raises errors of the client."""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            with contextlib.suppress(StoreUnavailable):  # the member reports it; nothing is read meanwhile
                await self._round(consumer)
            if self._assignments.unplaced:
                try:
                    async with asyncio.timeout(_ASK_SECONDS):
                        await self._wanted.wait()
                except TimeoutError:
                    self._wanted.set()

    async def _round(self, consumer: AIOKafkaConsumer) -> None:
        unplaced = self._assignments.unplaced
        bookmarks = await self._listener.bookmarks(frozenset(held.name for held in unplaced))
        async with asyncio.timeout(self._config.request_timeout_seconds):
            self._topic_ids = await known_topics(consumer, {held.topic_partition.topic for held in unplaced})
            for held in unplaced:
                if held.topic_partition.topic in self._topic_ids:  # else it is about to come or to go
                    await self._place(consumer, held, bookmarks.get(held.name, _NEVER_READ))

    async def _place(self, consumer: AIOKafkaConsumer, held: Held, bookmark: Bookmark) -> None:
        at = held.out_of_range_at
        left_off = (
            await committed(consumer, held.topic_partition)
            if at is None
            else OffsetAndMetadata(at, held.topic_id)
        )
        is_there = left_off is not None and not is_another(
            left_off.metadata, self._topic_ids[held.topic_partition.topic]
        )
        if left_off is not None and is_there and at is None:
            self._go_on(consumer, held, left_off.offset, committed=left_off.offset)
        elif bookmark.word is not None:
            self._obey(consumer, held, bookmark.word)
        elif left_off is not None and not is_there:
            self._refuse(held, "offset_missing", left_off.offset)
        elif at is not None:
            await self._place_out_of_range(consumer, held, at)
        elif bookmark.position is not None:
            self._refuse(held, "offset_missing", bookmark.position)
        else:
            first, end = await _bounds(consumer, held.topic_partition)
            offset = end if self._config.is_starting_at_the_end else first
            self._go_on(consumer, held, offset, committed=None)

    async def _place_out_of_range(self, consumer: AIOKafkaConsumer, held: Held, at: int) -> None:
        first, end = await _bounds(consumer, held.topic_partition)
        if at > end:
            self._refuse(held, "offset_out_of_range", at)
            return
        if at < first and self._assignments.holds(held):
            _log.error(
                "broker.records_lost",
                group=self._group,
                partition=held.name,
                first_offset=at,
                count=first - at,
            )
            self._listener.lost(held.name, at, first - at)
        self._go_on(consumer, held, max(at, first), committed=held.committed)

    def _obey(self, consumer: AIOKafkaConsumer, held: Held, word: int) -> None:
        if self._assignments.holds(held):
            _log.warning("broker.offset_given", group=self._group, partition=held.name, offset=word)
            self._go_on(consumer, self._assignments.renew(held), word, committed=None)

    def _go_on(self, consumer: AIOKafkaConsumer, held: Held, offset: int, *, committed: int | None) -> None:
        if not self._assignments.holds(held):
            return  # revoked meanwhile: its next owner places it
        try:
            consumer.seek(held.topic_partition, offset)
            consumer.resume(held.topic_partition)
        except kafka.IllegalStateError:  # it is about to be revoked
            return
        topic_id = self._topic_ids[held.topic_partition.topic]
        self._assignments.place(held, offset, committed=committed, topic_id=topic_id)

    def _refuse(self, held: Held, why: Refusal, offset: int) -> None:
        """Say once that a person is needed; it is asked for again and again."""
        if not self._assignments.holds(held) or held.refusal is not None:
            return
        held.refusal = why
        _log.error(
            "broker.partition_refused",
            group=self._group,
            partition=held.name,
            reason=why,
            offset=offset,
            fix=f"towpath worker offsets --group {self._group} --topic {held.topic_partition.topic}"
            " --to recorded | earliest | latest | <time>",
        )


async def _bounds(consumer: AIOKafkaConsumer, topic_partition: TopicPartition) -> tuple[int, int]:
    first = await consumer.beginning_offsets([topic_partition])
    end = await consumer.end_offsets([topic_partition])
    return int(first[topic_partition]), int(end[topic_partition])
