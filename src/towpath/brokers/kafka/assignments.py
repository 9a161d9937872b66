"""Which partitions this member holds, under which epoch, and how far each is settled."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime

from aiokafka import ConsumerRecord, TopicPartition
from aiokafka.structs import OffsetAndMetadata

from towpath.brokers.intake import Intake
from towpath.brokers.ports import Delivery, Mark, Refusal
from towpath.brokers.watermark import Watermark


class UnassignedRecord(Exception):
    """The library handed out a record of a partition that is not ours, or one before where we read."""


def partition_name(topic_partition: TopicPartition) -> str:
    """`topic:3`, as `Delivery.partition` has it."""
    return f"{topic_partition.topic}:{topic_partition.partition}"


@dataclass(slots=True)
class Held:
    """One partition under one epoch."""

    topic_partition: TopicPartition
    epoch: int
    watermark: Watermark = field(default_factory=Watermark)
    next_offset: int = 0
    committed: int | None = None
    is_placed: bool = False
    """Whether it is known where to read. Nothing of it arrives before."""
    topic_id: str = ""
    """Of the topic in which the place is; empty where the broker does not tell."""
    out_of_range_at: int | None = None
    """The offset that the broker does not have, where it was told that."""
    refusal: Refusal | None = None

    @property
    def name(self) -> str:
        """`topic:3`."""
        return partition_name(self.topic_partition)


class Assignments:
    """The bookkeeping of a subscriber over all its assignments.

    Every assignment has a new epoch, also when the same partition comes back: deliveries of older
    epochs change nothing any more.
    """

    def __init__(self, intake: Intake) -> None:
        self._intake = intake
        self._held: dict[str, Held] = {}
        self._highest_seen: dict[str, int] = {}
        self._epoch = 0
        self._is_revoking = False

    @property
    def partitions(self) -> list[TopicPartition]:
        """What is held and read now."""
        return [held.topic_partition for held in self._held.values() if held.is_placed]

    @property
    def unplaced(self) -> list[Held]:
        """What is held, and not read before its place is found."""
        return [held for held in self._held.values() if not held.is_placed]

    @property
    def is_placing(self) -> bool:
        """Whether the place of one is still being looked for."""
        return any(not held.is_placed and held.refusal is None for held in self._held.values())

    @property
    def marks(self) -> dict[str, Mark]:
        """How far each is committed, and which are refused."""
        return {name: Mark(held.committed, held.refusal) for name, held in self._held.items()}

    def holds(self, held: Held) -> bool:
        """Whether it is still held under its epoch."""
        return self._held.get(held.name) is held

    @property
    def topics_read(self) -> frozenset[tuple[str, str]]:
        """Names and ids."""
        placed = [held for held in self._held.values() if held.is_placed]
        return frozenset((held.topic_partition.topic, held.topic_id) for held in placed)

    def place(self, held: Held, offset: int, *, committed: int | None, topic_id: str = "") -> None:
        """Read from `offset` on; what was received before keeps its place."""
        held.is_placed, held.refusal, held.out_of_range_at = True, None, None
        held.topic_id = topic_id
        held.next_offset = offset
        held.watermark.skip_to(offset)
        held.committed = committed

    def renew(self, held: Held) -> Held:
        """Hold it under a new epoch, as if it had just been assigned."""
        self._intake.forget(held.name, held.epoch)
        self._epoch += 1
        anew = self._held[held.name] = Held(held.topic_partition, self._epoch)
        return anew

    def displace(self, topic_partition: TopicPartition, offset: int) -> None:
        """The broker does not have the offset that is to be read next."""
        held = self._held.get(partition_name(topic_partition))
        if held is not None:
            held.is_placed, held.out_of_range_at = False, offset

    def assign(self, topic_partitions: Iterable[TopicPartition]) -> None:
        """Hold these, and only these, under a new epoch."""
        self.clear()
        self._epoch += 1
        self._held = {partition_name(each): Held(each, self._epoch) for each in topic_partitions}

    def begin_revoking(self) -> frozenset[str]:
        """Hand out nothing more; what was not taken yet is dropped. Returns what is about to leave."""
        self._is_revoking = True
        for name, held in self._held.items():
            self._intake.purge(name, held.epoch)
        return frozenset(self._held)

    def clear(self) -> None:
        """Hold nothing."""
        for name, held in self._held.items():
            self._intake.forget(name, held.epoch)
        self._held = {}
        self._is_revoking = False

    def arrive(self, record: ConsumerRecord) -> None:
        """Take one record in, unless it is known from before a seek.

        Raises UnassignedRecord where skipping the record would lose it.
        """
        name = f"{record.topic}:{record.partition}"
        held = self._held.get(name)
        if held is None:
            raise UnassignedRecord(name)
        if self._is_revoking or not held.is_placed:
            return
        if record.offset < held.next_offset:
            raise UnassignedRecord(f"{name}:{record.offset}")
        held.next_offset = record.offset + 1
        if not held.watermark.receive(record.offset):
            return
        highest = self._highest_seen.get(name, -1)
        self._highest_seen[name] = max(highest, record.offset)
        self._intake.add(_delivery(record, name, held.epoch, is_redelivered=record.offset <= highest))

    def _current(self, delivery: Delivery) -> Held | None:
        held = self._held.get(delivery.partition)
        return held if held is not None and held.epoch == delivery.epoch else None

    def is_current(self, delivery: Delivery) -> bool:
        """Whether the delivery's partition is held under its epoch."""
        return self._current(delivery) is not None

    def acknowledge(self, delivery: Delivery) -> None:
        """Settle one delivery; a stale or repeated one changes nothing."""
        held = self._current(delivery)
        if held is not None and held.watermark.acknowledge(delivery.offset):
            self._intake.settle(delivery)

    def release(self, deliveries: Iterable[Delivery]) -> dict[TopicPartition, int]:
        """Hand these back, and what is buffered of their partitions; returns the offsets to seek back to.

        What is buffered may lie before them: it was released and read again, while they were not.
        """
        targets: dict[TopicPartition, int] = {}
        for delivery in deliveries:
            held = self._current(delivery)
            if held is None or not held.watermark.release(delivery.offset):
                continue
            self._intake.settle(delivery)
            buffered = self._intake.purge(delivery.partition, delivery.epoch)
            for each in buffered:
                held.watermark.release(each.offset)
            first = min([delivery.offset, *(each.offset for each in buffered)])
            if not self._is_revoking and first < held.next_offset:
                held.next_offset = first
                if held.out_of_range_at is not None:
                    held.out_of_range_at = min(held.out_of_range_at, first)
                targets[held.topic_partition] = first
        return targets

    def committable(self) -> dict[TopicPartition, OffsetAndMetadata]:
        """Watermarks that moved since they were last committed, with the topics they are in."""
        return {
            held.topic_partition: OffsetAndMetadata(position, held.topic_id)
            for held in self._held.values()
            if (position := held.watermark.position) is not None and position != held.committed
        }

    def committed(self, marks: dict[TopicPartition, OffsetAndMetadata]) -> None:
        """Note what the broker has accepted."""
        for topic_partition, mark in marks.items():
            held = self._held.get(partition_name(topic_partition))
            if held is not None:
                held.committed = mark.offset


def _delivery(record: ConsumerRecord, name: str, epoch: int, *, is_redelivered: bool) -> Delivery:
    published_ms = record.timestamp or 0
    return Delivery(
        source=record.topic,
        partition=name,
        offset=record.offset,
        key=None if record.key is None else record.key.decode("utf-8", "backslashreplace"),
        headers=tuple([(key, b"" if value is None else value) for key, value in record.headers]),
        value=record.value,
        timestamp=None if published_ms <= 0 else datetime.fromtimestamp(published_ms / 1000, UTC),
        is_redelivered=is_redelivered,
        epoch=epoch,
        coordinates=f"{name}:{record.offset}:{record.timestamp}",
    )
