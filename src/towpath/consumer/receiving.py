"""From the broker into the lanes: receive, read, skip what the group passes over on purpose."""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Final

from towpath.app import App
from towpath.brokers.ports import Delivery, Subscriber
from towpath.consumer.intake import Undecodable, read, skipped
from towpath.consumer.lanes import Lanes, Received
from towpath.consumer.pauses import Pauses
from towpath.consumer.repeats import Repeats
from towpath.crashpoints import CrashPoint, crash_point
from towpath.telemetry import names
from towpath.telemetry.metrics import Telemetry

_RECEIVE_COUNT: Final = 500
_IDLE_SECONDS: Final = 0.5


class Receiver:
    """Fills the lanes; the subscriber bounds what is in flight."""

    def __init__(
        self,
        app: App,
        subscriber: Subscriber,
        lanes: Lanes,
        *,
        destinations: Mapping[str, str],
        pauses: Pauses,
        repeats: Repeats,
        wake: asyncio.Event,
        telemetry: Telemetry,
        on_progress: Callable[[str], None],
    ) -> None:
        self._app = app
        self._subscriber = subscriber
        self._lanes = lanes
        self._destinations = destinations
        self._pauses = pauses
        self._repeats = repeats
        self._wake = wake
        self._telemetry = telemetry
        self._on_progress = on_progress

    async def run(self) -> None:
        """Receive until cancelled."""
        while True:
            self._on_progress("receive")
            if self._pauses.is_all:
                await asyncio.sleep(_IDLE_SECONDS)
                continue
            deliveries = await self._subscriber.receive(_RECEIVE_COUNT, timeout_seconds=_IDLE_SECONDS)
            if deliveries:
                crash_point(CrashPoint.RECEIVED_BEFORE_CLAIM)
                self._count(deliveries)
                self._accept(await self._repeats.sift(deliveries))
                self._wake.set()

    def _count(self, deliveries: Sequence[Delivery]) -> None:
        for source, amount in Counter(delivery.source for delivery in deliveries).items():
            self._telemetry.add(
                names.CONSUMED_MESSAGES,
                amount,
                operation="receive",
                destination=source,
                group=self._app.name,
            )

    def _accept(self, deliveries: Sequence[Delivery]) -> None:
        now = datetime.now(UTC)
        for delivery in deliveries:
            name = self._destinations.get(delivery.source)
            asked = read(self._app, delivery, now, destination=name)
            if delivery.death is not None:
                work = asked.work if isinstance(asked, Undecodable) else asked
                self._lanes.add(Received(work, delivery))
            elif reason := skipped(self._app, delivery, asked, name or delivery.source):
                self._skip(delivery, reason)
            elif isinstance(asked, Undecodable):
                self._lanes.add(Received(asked.work, delivery, undecodable=asked.error))
            else:
                self._lanes.add(Received(asked, delivery))

    def _skip(self, delivery: Delivery, reason: str) -> None:
        self._subscriber.acknowledge([delivery])
        self._telemetry.add(
            names.SKIPPED_MESSAGES, 1, destination=delivery.source, group=self._app.name, reason=reason
        )
