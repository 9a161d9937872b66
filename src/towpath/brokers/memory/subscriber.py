"""One member of a consumer group on a hub: assigned partitions, a watermark each, bounded intake."""

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence

from towpath.brokers.intake import Intake
from towpath.brokers.memory.hub import Hub, PartitionId
from towpath.brokers.ports import Delivery, GroupListener, Mark, Subscription
from towpath.brokers.watermark import Watermark
from towpath.errors import BrokerUnavailable

_REVOKE_SECONDS = 5.0


def _name(partition: PartitionId) -> str:
    return f"{partition[0]}:{partition[1]}"


class _Assignment:
    """One partition held under one epoch."""

    def __init__(self, partition: PartitionId, epoch: int, position: int) -> None:
        self.partition = partition
        self.epoch = epoch
        self.position = position
        self.watermark = Watermark()


class MemorySubscriber:
    """The subscriber port over a hub."""

    def __init__(self, hub: Hub, subscription: Subscription) -> None:
        self._hub = hub
        self._subscription = subscription
        self._intake = Intake(subscription.max_in_flight, subscription.max_in_flight_bytes)
        self._held: dict[str, _Assignment] = {}
        self._seen: dict[str, int] = {}
        self._epoch = 0
        self._wakeup = asyncio.Event()
        self._listener: GroupListener | None = None

    @property
    def addresses(self) -> tuple[str, ...]:
        """What this member reads."""
        return self._subscription.addresses

    async def start(self, listener: GroupListener) -> None:
        """Join the group. Raises BrokerUnavailable while the hub is made unreachable."""
        if not self._hub.is_available:
            raise BrokerUnavailable("the memory broker is switched off")
        for address in self.addresses:
            self._hub.partitions(address)
        self._listener = listener
        await self._hub.join(self._subscription.group, self)

    async def receive(self, max_count: int, *, timeout_seconds: float) -> Sequence[Delivery]:
        """Up to `max_count` deliveries in partition order; empty after the timeout."""
        deadline = time.monotonic() + timeout_seconds
        while True:
            self._fill()
            remaining = deadline - time.monotonic()
            if self._intake.buffered_count or remaining <= 0:
                return await self._intake.take(max_count, timeout_seconds=0)
            self._wakeup.clear()
            try:
                async with asyncio.timeout(remaining):
                    await self._wakeup.wait()
            except TimeoutError:
                return []

    def _fill(self) -> None:
        """Move what the logs hold into the buffer, round by round over the partitions, while it fits."""
        moved = self._hub.is_available
        while moved and not self._intake.is_full:
            moved = False
            for held in self._held.values():
                log = self._hub.log(held.partition)
                if held.position < len(log) and not self._intake.is_full:
                    self._arrive(held)
                    moved = True

    def _arrive(self, held: _Assignment) -> None:
        offset, name = held.position, _name(held.partition)
        record = self._hub.log(held.partition)[offset]
        held.position += 1
        if not held.watermark.receive(offset):
            return
        highest = self._seen.get(name, -1)
        self._seen[name] = max(highest, offset)
        self._intake.add(
            Delivery(
                source=held.partition[0],
                partition=name,
                offset=offset,
                key=record.key,
                headers=record.headers,
                value=record.value,
                timestamp=record.published_at,
                is_redelivered=offset <= highest,
                epoch=held.epoch,
                coordinates=f"{name}:{offset}:{record.published_at.timestamp():.6f}",
            )
        )

    def acknowledge(self, deliveries: Iterable[Delivery]) -> None:
        """Advance the watermarks and commit them."""
        for delivery in deliveries:
            held = self._held.get(delivery.partition)
            if held is None or held.epoch != delivery.epoch:
                continue
            if held.watermark.acknowledge(delivery.offset):
                self._intake.settle(delivery)
        self._commit()
        self._wakeup.set()

    def release(self, deliveries: Iterable[Delivery]) -> None:
        """Go back to the first of them; what was settled meanwhile is not handed out again."""
        for delivery in deliveries:
            held = self._held.get(delivery.partition)
            if held is None or held.epoch != delivery.epoch:
                continue
            if held.watermark.release(delivery.offset):
                self._intake.settle(delivery)
                held.position = min(held.position, delivery.offset)
                for buffered in self._intake.purge(delivery.partition, delivery.epoch):
                    held.watermark.release(buffered.offset)
                    held.position = min(held.position, buffered.offset)
        self._wakeup.set()

    def pause(self) -> None:
        """Fetch nothing more."""
        self._intake.pause()

    def resume(self) -> None:
        """Fetch again."""
        self._intake.resume()
        self._wakeup.set()

    def is_current(self, delivery: Delivery) -> bool:
        """Whether the partition is still held under the delivery's epoch."""
        held = self._held.get(delivery.partition)
        return held is not None and held.epoch == delivery.epoch

    @property
    def is_connected(self) -> bool:
        """Whether this member has joined and the hub is reachable."""
        return self._listener is not None and self._hub.is_available

    @property
    def marks(self) -> Mapping[str, Mark]:
        """None: this broker keeps no offsets that could be lost."""
        return {}

    async def aclose(self) -> None:
        """Commit, leave; the others get the partitions."""
        if self._listener is None:
            return
        self._listener = None
        self._commit()
        self._drop()
        await self._hub.leave(self._subscription.group, self)

    async def revoke(self) -> None:
        """Let the engine finish, commit what it acknowledged, hold nothing."""
        for name, held in self._held.items():
            self._intake.purge(name, held.epoch)
        if self._held and self._listener is not None:
            partitions = frozenset(self._held)
            try:
                async with asyncio.timeout(_REVOKE_SECONDS * 1.2):
                    await self._listener.revoking(partitions, timeout_seconds=_REVOKE_SECONDS)
            except TimeoutError:
                pass  # the work goes on under an epoch that has ended: its acknowledgements are ignored
        self._commit()
        self._drop()

    def assign(self, partitions: list[PartitionId]) -> None:
        """Hold these under a new epoch, from their committed offsets."""
        self._epoch += 1
        committed = self._hub.group(self._subscription.group).committed
        self._held = {
            _name(each): _Assignment(each, self._epoch, committed.get(each, 0)) for each in partitions
        }
        self._wakeup.set()

    def wake(self) -> None:
        """Something may have arrived."""
        self._wakeup.set()

    def _commit(self) -> None:
        committed = self._hub.group(self._subscription.group).committed
        for held in self._held.values():
            if held.watermark.position is not None:
                committed[held.partition] = held.watermark.position

    def _drop(self) -> None:
        for name, held in self._held.items():
            self._intake.forget(name, held.epoch)
        self._held = {}
