"""Publishes windows into a hub, with the same rules as the real brokers."""

import asyncio
from collections.abc import Sequence

from towpath.brokers.memory.hub import Hub
from towpath.brokers.ordering import OrderKey, order_key
from towpath.brokers.ports import KeepPartitions, OutboundMessage, PublishResult
from towpath.errors import BrokerUnavailable, MessageRefused, TopologyError


class MemoryPublisher:
    """The publisher port over a hub."""

    def __init__(self, hub: Hub, max_message_bytes: int) -> None:
        self._hub = hub
        self._max_message_bytes = max_message_bytes

    async def start(self) -> None:
        """Raises BrokerUnavailable while the hub is made unreachable."""
        if not self._hub.is_available:
            raise BrokerUnavailable("the memory broker is switched off")

    async def cluster(self) -> str | None:
        """None: it lasts as long as its process."""
        return None

    def keep_partitions(self, keep: KeepPartitions) -> None:
        """Nothing: a hub keeps the order of every key."""

    async def publish(self, window: Sequence[OutboundMessage], *, timeout_seconds: float) -> PublishResult:  # noqa: ARG002
        """Append the window, in order; a refused message withholds the later ones of its key."""
        await asyncio.sleep(0)
        result = PublishResult()
        withheld: set[OrderKey] = set()
        for index, message in enumerate(window):
            if not self._hub.is_available:
                result.unavailable = BrokerUnavailable("the memory broker is switched off")
                break
            key = order_key(message)
            if key in withheld:
                continue
            try:
                refusal = self._refusal_of(message)
                if refusal is None:
                    self._hub.append(message)
                    result.acknowledged.add(index)
                    continue
                result.refused[index] = refusal
            except TopologyError as error:
                result.configuration = error
            if key is not None:
                withheld.add(key)
        self._hub.wake()
        if result.configuration is not None and not result.acknowledged and not result.refused:
            raise result.configuration
        return result

    def _refusal_of(self, message: OutboundMessage) -> MessageRefused | None:
        if message.size_bytes > self._max_message_bytes:
            limit = self._max_message_bytes
            return MessageRefused("too_large", f"{message.size_bytes} bytes, the limit is {limit}")
        return self._hub.refusal_of(message)

    async def aclose(self) -> None:
        """Nothing is open."""
