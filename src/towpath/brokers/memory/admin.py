"""Creates and checks addresses of a hub."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta

from towpath.brokers.memory.hub import Hub
from towpath.brokers.ports import Bounds, GroupTopology, dead_letter_address
from towpath.errors import UsageError


def _needed(addresses: Sequence[str], groups: Sequence[GroupTopology]) -> Iterator[str]:
    yield from addresses
    for group in groups:
        for address in group.addresses:
            yield address
            yield dead_letter_address(group.group, address)


class MemoryAdmin:
    """The admin port over a hub."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub

    async def apply(
        self, addresses: Sequence[str], groups: Sequence[GroupTopology], *, partitions: int
    ) -> list[str]:
        """Create what is missing."""
        return [
            f"created address {address} with {partitions} partitions"
            for address in dict.fromkeys(_needed(addresses, groups))
            if self._hub.create(address, partitions)
        ]

    async def server(self) -> str:
        """This process."""
        return "in memory"

    async def check(self, addresses: Sequence[str], groups: Sequence[GroupTopology]) -> list[str]:
        """Say what is missing."""
        missing = [
            each for each in dict.fromkeys(_needed(addresses, groups)) if each not in self._hub.addresses
        ]
        return [f"address {address} does not exist" for address in missing]

    async def bounds(self, address: str, since: datetime | None = None) -> Mapping[int, Bounds]:  # noqa: ARG002
        """None: a hub's groups have no offsets that could be lost."""
        return {}

    async def kept_for(self, address: str) -> timedelta | None:  # noqa: ARG002
        """As long as the process lives."""
        return None

    async def change_queues(self, group: GroupTopology, before: int) -> None:  # noqa: ARG002
        """There are none."""
        raise UsageError("groups have no queues at the memory broker")

    async def aclose(self) -> None:
        """Nothing is open."""
