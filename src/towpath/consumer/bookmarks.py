"""The group's own notes of how far it has read, written once a beat where the broker keeps offsets."""

import asyncio
from collections.abc import Callable, Mapping

from towpath.brokers.ports import Bookmark, Mark, Subscriber
from towpath.consumer.upkeep import StoreWatch
from towpath.errors import StoreUnavailable
from towpath.store.offsets import OffsetStore
from towpath.telemetry import names
from towpath.telemetry.metrics import Telemetry


class Bookmarks:
    """Notes what moved; answers the subscriber from what was noted."""

    def __init__(
        self,
        group: str,
        subscriber: Subscriber,
        store: OffsetStore,
        *,
        watch: StoreWatch,
        telemetry: Telemetry,
        every_seconds: float,
        on_progress: Callable[[str], None],
    ) -> None:
        self._group = group
        self._subscriber = subscriber
        self._store = store
        self._watch = watch
        self._telemetry = telemetry
        self._every_seconds = every_seconds
        self._on_progress = on_progress
        self._noted: dict[str, Mark] = {}

    async def run(self) -> None:
        """Note until cancelled."""
        while True:
            await asyncio.sleep(self._every_seconds)
            self._on_progress("bookmarks")
            try:
                await self.note()
            except StoreUnavailable as error:
                self._watch.failed(error)

    async def note(self) -> None:
        """Write down what changed, in one statement. Raises StoreUnavailable."""
        marks = self._subscriber.marks
        moved = {name: mark for name, mark in marks.items() if mark != self._noted.get(name)}
        moved = {name: mark for name, mark in moved.items() if mark != Mark(None)}
        if moved:
            await self._store.note(moved)
        self._noted = dict(marks)
        if marks:
            refused = sum(mark.refusal is not None for mark in marks.values())
            self._telemetry.set(names.PARTITIONS_REFUSED, refused, group=self._group)

    async def take(self, partitions: frozenset[str]) -> Mapping[str, Bookmark]:
        """For partitions that were assigned. Raises StoreUnavailable."""
        return await self._store.take(partitions)

    def lost(self, partition: str, count: int) -> None:
        """Records went unread."""
        topic = partition.rpartition(":")[0]
        self._telemetry.add(names.RECORDS_LOST, count, destination=topic, group=self._group)
