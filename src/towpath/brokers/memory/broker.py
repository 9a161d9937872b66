"""`memory://NAME`: publishers and subscribers of one process that share a hub by its name."""

from collections.abc import Mapping
from types import MappingProxyType

from towpath.brokers.memory.admin import MemoryAdmin
from towpath.brokers.memory.hub import Hub, hub_named
from towpath.brokers.memory.publisher import MemoryPublisher
from towpath.brokers.memory.subscriber import MemorySubscriber
from towpath.brokers.ports import Subscription
from towpath.errors import ConfigurationError

_KNOWN_OPTIONS = frozenset({"max_message_bytes", "strict"})


class MemoryBroker:
    """Makes publishers, subscribers and an admin of one hub.

    Options: `max_message_bytes` (1,000,000) and `strict` (addresses must be created first; false).
    """

    def __init__(self, url: str, options: Mapping[str, object] = MappingProxyType({})) -> None:
        unknown = sorted(set(options) - _KNOWN_OPTIONS)
        if unknown:
            raise ConfigurationError(f"unknown option of the memory broker: {', '.join(unknown)}")
        self._hub = hub_named(url.partition("://")[2].strip("/"))
        self._max_message_bytes = int(str(options.get("max_message_bytes", 1_000_000)))
        self._hub.is_strict = self._hub.is_strict or options.get("strict") in (True, "true", "1")

    @property
    def hub(self) -> Hub:
        """The shared state, for tests: logs and failure injection."""
        return self._hub

    @property
    def max_message_bytes(self) -> int:
        """Messages above this are refused as `too_large`."""
        return self._max_message_bytes

    @property
    def labels(self) -> Mapping[str, str | int]:
        """`memory`."""
        return {"system": "memory"}

    @property
    def queues_per_group(self) -> None:
        """None."""

    def publisher(self) -> MemoryPublisher:
        """A publisher into the hub."""
        return MemoryPublisher(self._hub, self._max_message_bytes)

    def subscriber(self, subscription: Subscription) -> MemorySubscriber:
        """One member of a consumer group."""
        return MemorySubscriber(self._hub, subscription)

    def admin(self) -> MemoryAdmin:
        """Creates addresses."""
        return MemoryAdmin(self._hub)
