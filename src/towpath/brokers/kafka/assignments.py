"""Which partitions this member holds, under which epoch, and how far each is settled."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

from aiokafka import ConsumerRecord, TopicPartition

from towpath.brokers.intake import Intake
from towpath.brokers.ports import Delivery
from towpath.brokers.watermark import Watermark
from towpath.telemetry.logging import event_logger

_log: Final = event_logger(__name__)


class UnassignedRecord(Exception):
    """The library handed out a record of a partition that it had not told us about."""


def partition_name(topic_partition: TopicPartition) -> str:
    """`topic:3`, as `Delivery.partition` has it."""
    return f"{topic_partition.topic}:{topic_partition.partition}"


@dataclass(slots=True)
class _Held:
    """One partition under one epoch."""

    topic_partition: TopicPartition
    epoch: int
    watermark: Watermark = field(default_factory=Watermark)
    next_offset: int = 0
    committed: int | None = None


class Assignments:
    """The bookkeeping of a subscriber over all its assignments.

    Every assignment has a new epoch, also when the same partition comes back: deliveries of older
    epochs change nothing any more.
    """

    def __init__(self, intake: Intake) -> None:
        self._intake = intake
        self._held: dict[str, _Held] = {}
        self._highest_seen: dict[str, int] = {}
        self._epoch = 0
        self._is_revoking = False

    @property
    def partitions(self) -> list[TopicPartition]:
        """What is held now."""
        return [held.topic_partition for held in self._held.values()]

    def assign(self, topic_partitions: Iterable[TopicPartition]) -> None:
        """Hold these, and only these, under a new epoch."""
        self.clear()
        self._epoch += 1
        self._held = {partition_name(each): _Held(each, self._epoch) for each in topic_partitions}

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
        if self._is_revoking:
            return
        if record.offset < held.next_offset:
            held = self._begin_anew(name, held, record.offset)
        held.next_offset = record.offset + 1
        if not held.watermark.receive(record.offset):
            return
        highest = self._highest_seen.get(name, -1)
        self._highest_seen[name] = max(highest, record.offset)
        self._intake.add(_delivery(record, name, held.epoch, is_redelivered=record.offset <= highest))

    def _begin_anew(self, name: str, held: _Held, offset: int) -> _Held:
        """Offsets went back without a seek of ours: a topic made again, or a truncated log."""
        _log.warning(
            "broker.offsets_restarted", partition=name, offset=offset, expected_offset=held.next_offset
        )
        self._intake.forget(name, held.epoch)
        self._epoch += 1
        anew = self._held[name] = _Held(held.topic_partition, self._epoch)
        return anew

    def _current(self, delivery: Delivery) -> _Held | None:
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
        """Hand these back, and what is buffered behind them; returns the offsets to seek back to."""
        targets: dict[TopicPartition, int] = {}
        for delivery in deliveries:
            held = self._current(delivery)
            if held is None or not held.watermark.release(delivery.offset):
                continue
            self._intake.settle(delivery)
            for later in self._intake.purge(delivery.partition, delivery.epoch):
                held.watermark.release(later.offset)
            if not self._is_revoking and delivery.offset < held.next_offset:
                held.next_offset = delivery.offset
                targets[held.topic_partition] = delivery.offset
        return targets

    def committable(self) -> dict[TopicPartition, int]:
        """Watermarks that moved since they were last committed."""
        return {
            held.topic_partition: position
            for held in self._held.values()
            if (position := held.watermark.position) is not None and position != held.committed
        }

    def committed(self, offsets: dict[TopicPartition, int]) -> None:
        """Note what the broker has accepted."""
        for topic_partition, offset in offsets.items():
            held = self._held.get(partition_name(topic_partition))
            if held is not None:
                held.committed = offset


def _delivery(record: ConsumerRecord, name: str, epoch: int, *, is_redelivered: bool) -> Delivery:
    published_ms = record.timestamp or 0
    return Delivery(
        source=record.topic,
        partition=name,
        offset=record.offset,
        key=None if record.key is None else record.key.decode("utf-8", "backslashreplace"),
        headers=tuple((key, b"" if value is None else value) for key, value in record.headers),
        value=record.value,
        timestamp=None if published_ms <= 0 else datetime.fromtimestamp(published_ms / 1000, UTC),
        is_redelivered=is_redelivered,
        epoch=epoch,
        coordinates=f"{name}:{record.offset}:{record.timestamp}",
    )
