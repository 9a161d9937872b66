"""A broker model for histories of one consumer group: partitions, committed offsets, rebalances, zombies.

After a rebalance the old member does not know for a while: it goes on receiving and acknowledging,
but its commits no longer count. The new owner starts at the committed offset.
"""

import asyncio
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from uuid import UUID

from towpath.brokers.ports import Delivery, GroupListener, Mark
from towpath.messages import Envelope, wire_headers

TOPIC = "protocol"


def delivery_of(message_id: UUID, type_: str, key: str, sequence: int) -> Delivery:
    """A message as the relay would have published it; partition, offset and epoch come later."""
    envelope = Envelope(
        message_id=message_id,
        type=type_,
        source="/test",
        occurred_at=datetime.now(UTC),
        content_type="application/json",
        sequence=sequence,
        installation="test",
    )
    return Delivery(
        source=TOPIC,
        partition="",
        offset=-1,
        key=key,
        headers=wire_headers(envelope),
        value=b"{}",
        timestamp=None,
        is_redelivered=False,
        epoch=0,
    )


class SimBroker:
    """Logs and who owns which partition."""

    def __init__(self, partitions: int, members: int) -> None:
        self.members = members
        self.logs: list[list[Delivery]] = [[] for _ in range(partitions)]
        self.committed = [0] * partitions
        self.owner: list[int | None] = [None] * partitions
        self.generation = [0] * partitions

    def assign(self, partition: int, member: int) -> None:
        self.owner[partition] = member
        self.generation[partition] += 1

    def leave(self, member: int, rnd: random.Random) -> None:
        """The broker gives up a silent member: others get what it had."""
        for partition, owner in enumerate(self.owner):
            if owner == member:
                self.assign(partition, rnd.choice([each for each in range(self.members) if each != member]))

    @property
    def is_drained(self) -> bool:
        return all(done == len(log) for done, log in zip(self.committed, self.logs, strict=True))


@dataclass
class _Assignment:
    generation: int
    position: int
    acknowledged: set[int] = field(default_factory=set)
    lost_at: float | None = None
    """Not told before this instant that it is gone."""


class SimSubscriber:
    """One incarnation of a member as it sees the broker, late."""

    def __init__(self, broker: SimBroker, member: int, rnd: random.Random, zombie_seconds: float) -> None:
        self._broker = broker
        self._member = member
        self._rnd = rnd
        self._zombie_seconds = zombie_seconds
        self._held: dict[int, _Assignment] = {}
        self._listener: GroupListener | None = None
        self.is_connected = True
        self.acknowledged_count = 0

    async def start(self, listener: GroupListener) -> None:
        self._listener = listener

    async def receive(self, max_count: int, *, timeout_seconds: float) -> Sequence[Delivery]:
        await asyncio.sleep(0.004)
        await self._rebalance()
        received: list[Delivery] = []
        for partition, held in self._held.items():
            log = self._broker.logs[partition]
            while held.position < len(log) and len(received) < min(max_count, 12):
                received.append(self._stamped(partition, held))
                held.position += 1
        return received

    def _stamped(self, partition: int, held: _Assignment) -> Delivery:
        message = self._broker.logs[partition][held.position]
        return Delivery(
            source=message.source,
            partition=f"{TOPIC}:{partition}",
            offset=held.position,
            key=message.key,
            headers=message.headers,
            value=message.value,
            timestamp=None,
            is_redelivered=False,
            epoch=held.generation,
        )

    async def _rebalance(self) -> None:
        now = time.monotonic()
        for partition, held in list(self._held.items()):
            if self._broker.generation[partition] == held.generation:
                continue
            held.lost_at = held.lost_at or now + self._rnd.random() * self._zombie_seconds
            if now >= held.lost_at:
                del self._held[partition]
                if self._listener is not None and self._rnd.random() < 0.5:
                    await self._listener.revoking(frozenset({f"{TOPIC}:{partition}"}), timeout_seconds=0.02)
        for partition, owner in enumerate(self._broker.owner):
            if owner == self._member and partition not in self._held:
                generation = self._broker.generation[partition]
                self._held[partition] = _Assignment(generation, self._broker.committed[partition])

    def acknowledge(self, deliveries: Iterable[Delivery]) -> None:
        for delivery in deliveries:
            self.acknowledged_count += 1
            partition = int(delivery.partition.rpartition(":")[2])
            held = self._held.get(partition)
            if held is None or held.generation != delivery.epoch:
                continue
            held.acknowledged.add(delivery.offset)
            while held.generation == self._broker.generation[partition] and (
                self._broker.committed[partition] in held.acknowledged
            ):
                self._broker.committed[partition] += 1

    def release(self, deliveries: Iterable[Delivery]) -> None:
        for delivery in deliveries:
            held = self._held.get(int(delivery.partition.rpartition(":")[2]))
            if held is not None and held.generation == delivery.epoch:
                held.position = min(held.position, delivery.offset)

    def is_current(self, delivery: Delivery) -> bool:
        held = self._held.get(int(delivery.partition.rpartition(":")[2]))
        return held is not None and held.generation == delivery.epoch

    def pause(self) -> None:
        raise AssertionError("nobody pauses")

    def resume(self) -> None:
        """Nobody paused."""

    @property
    def marks(self) -> Mapping[str, Mark]:
        return {}

    async def aclose(self) -> None:
        self._held.clear()
