"""The bounded buffer between a client library and the consumer engine."""

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import Final

from towpath.brokers.ports import Delivery

_LOW_WATERMARK: Final = 0.75
_FIRST_GUESS_BYTES: Final = 16_384.0
_LEARNING_RATE: Final = 0.05


@dataclass(slots=True)
class _Load:
    count: int = 0
    size_bytes: int = 0


class Intake:
    """Counts what was received and not yet settled, in messages and bytes, by partition and epoch.

    It refuses nothing: what the broker sent must go somewhere. The owner stops fetching while
    `is_full` and starts again when `has_room`, well below the bound, so that it does not flap.
    """

    def __init__(self, max_count: int, max_bytes: int) -> None:
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._buffer: deque[Delivery] = deque()
        self._loads: dict[tuple[str, int], _Load] = {}
        self._total = _Load()
        self._usual_bytes = _FIRST_GUESS_BYTES
        self._arrived = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self.is_paused = False
        """Whether the owner is to stop fetching, however much room there is."""

    def pause(self) -> None:
        """Be full until `resume`."""
        self.is_paused = True
        self._room.clear()

    def resume(self) -> None:
        """Have the room again that there is."""
        self.is_paused = False
        if self.has_room:
            self._room.set()

    @property
    def count(self) -> int:
        """Messages received and not yet settled."""
        return self._total.count

    @property
    def size_bytes(self) -> int:
        """Their bytes."""
        return self._total.size_bytes

    @property
    def buffered_count(self) -> int:
        """Messages received and not yet taken."""
        return len(self._buffer)

    @property
    def free_count(self) -> int:
        """How many more messages fit, by number and, going by the sizes seen lately, by bytes."""
        by_number = self._max_count - self._total.count
        by_size = int((self._max_bytes - self._total.size_bytes) / self._usual_bytes)
        return max(0, min(by_number, by_size))

    @property
    def is_full(self) -> bool:
        """Whether a bound is reached, or the intake is paused."""
        is_at_bound = self._total.count >= self._max_count or self._total.size_bytes >= self._max_bytes
        return self.is_paused or is_at_bound

    @property
    def has_room(self) -> bool:
        """Whether both counts are back under the low watermark, and nothing is paused."""
        return (
            not self.is_paused
            and self._total.count <= self._max_count * _LOW_WATERMARK
            and self._total.size_bytes <= self._max_bytes * _LOW_WATERMARK
        )

    def add(self, delivery: Delivery) -> None:
        """Take in one arrival, at the end of the buffer."""
        load = self._loads.setdefault((delivery.partition, delivery.epoch), _Load())
        size_bytes = delivery.size_bytes
        for each in (load, self._total):
            each.count += 1
            each.size_bytes += size_bytes
        self._usual_bytes += (size_bytes - self._usual_bytes) * _LEARNING_RATE
        self._buffer.append(delivery)
        self._arrived.set()
        if self.is_full:
            self._room.clear()

    async def take(self, max_count: int, *, timeout_seconds: float) -> list[Delivery]:
        """Up to `max_count` buffered deliveries, in order of arrival; empty after the timeout.

        Safe to cancel: nothing is removed before the result is returned.
        """
        if not self._buffer:
            try:
                async with asyncio.timeout(timeout_seconds):
                    await self._arrived.wait()
            except TimeoutError:
                return []
        taken = [self._buffer.popleft() for _ in range(min(max_count, len(self._buffer)))]
        if not self._buffer:
            self._arrived.clear()
        return taken

    async def wait_for_room(self, *, timeout_seconds: float) -> None:
        """Return when there is room again, or after the timeout."""
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._room.wait()
        except TimeoutError:
            return

    def settle(self, delivery: Delivery) -> None:
        """Free what one delivery took. The caller makes sure that it is called once for each."""
        load = self._loads.get((delivery.partition, delivery.epoch))
        if load is None:
            return
        for each in (load, self._total):
            each.count -= 1
            each.size_bytes -= delivery.size_bytes
        if not self._room.is_set() and self.has_room:
            self._room.set()

    def purge(self, partition: str, epoch: int) -> list[Delivery]:
        """Remove and settle what is buffered of a partition; returns it."""
        purged = [each for each in self._buffer if (each.partition, each.epoch) == (partition, epoch)]
        if purged:
            kept = [each for each in self._buffer if (each.partition, each.epoch) != (partition, epoch)]
            self._buffer = deque(kept)
            if not kept:
                self._arrived.clear()
            for delivery in purged:
                self.settle(delivery)
        return purged

    def forget(self, partition: str, epoch: int) -> None:
        """Drop a partition that is not ours any more, with all that it still counted."""
        self.purge(partition, epoch)
        load = self._loads.pop((partition, epoch), None)
        if load is not None:
            self._total.count -= load.count
            self._total.size_bytes -= load.size_bytes
        if self.has_room:
            self._room.set()
