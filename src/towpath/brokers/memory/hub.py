"""The shared state behind `memory://NAME`: logs by address and partition, groups with committed offsets."""

import asyncio
import weakref
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Protocol

from towpath.brokers.ports import Headers, OutboundMessage
from towpath.errors import MessageRefused, TopologyError

DEFAULT_PARTITIONS = 4

Refusal = Callable[[OutboundMessage], MessageRefused | None]
PartitionId = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Record:
    """One message in a log; its offset is its index."""

    key: str | None
    headers: Headers
    value: bytes | None
    published_at: datetime


class Member(Protocol):
    """What a group calls on its subscribers."""

    @property
    def addresses(self) -> tuple[str, ...]: ...

    async def revoke(self) -> None:
        """End the work of every partition held, commit, and hold none."""
        ...

    def assign(self, partitions: list[PartitionId]) -> None: ...

    def wake(self) -> None: ...


@dataclass(slots=True)
class Group:
    """Members of one consumer group and how far each partition is committed."""

    members: list[Member] = field(default_factory=list)
    committed: dict[PartitionId, int] = field(default_factory=dict)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Hub:
    """One named in-memory broker. Tests reach it to inject failures and to look at the logs."""

    def __init__(self) -> None:
        self._logs: dict[str, list[list[Record]]] = {}
        self._groups: dict[str, Group] = {}
        self._refusal: Refusal | None = None
        self._arrivals = 0
        self.is_available = True
        """Set it to False to make the broker unreachable: publishing fails and nothing arrives."""
        self.is_strict = False
        """Whether an address must be created before it is used, as on the real brokers."""

    def refuse(self, refusal: Refusal | None) -> None:
        """From now on refuse the messages for which `refusal` returns an error; None ends it."""
        self._refusal = refusal

    def restore(self) -> None:
        """Make the broker reachable again and wake its subscribers."""
        self.is_available = True
        self._wake_all()

    @property
    def addresses(self) -> frozenset[str]:
        """The addresses that exist."""
        return frozenset(self._logs)

    def create(self, address: str, partitions: int = DEFAULT_PARTITIONS) -> bool:
        """Create an address; False when it was there already, which stays as it is."""
        if address in self._logs:
            return False
        self._logs[address] = [[] for _ in range(partitions)]
        return True

    def partitions(self, address: str) -> list[PartitionId]:
        """The partitions of an address. Raises TopologyError where the hub is strict and it is missing."""
        if address not in self._logs:
            if self.is_strict:
                raise TopologyError(f"address {address!r} does not exist: create it (towpath broker apply)")
            self.create(address)
        return [(address, number) for number in range(len(self._logs[address]))]

    def refusal_of(self, message: OutboundMessage) -> MessageRefused | None:
        """The injected refusal of a message, if there is one."""
        return None if self._refusal is None else self._refusal(message)

    def append(self, message: OutboundMessage) -> None:
        """Write one message at the end of its partition."""
        partitions = self.partitions(message.address)
        spread_by = message.message_id.bytes if message.key is None else message.key.encode()
        log = self._logs[message.address][zlib.crc32(spread_by) % len(partitions)]
        log.append(Record(message.key, message.headers, message.payload, datetime.now(UTC)))

    def log(self, partition: PartitionId) -> list[Record]:
        """The records of one partition; do not change it."""
        address, number = partition
        return self._logs[address][number]

    def records(self, address: str) -> list[Record]:
        """Everything ever published to an address, partition by partition."""
        return [record for log in self._logs.get(address, []) for record in log]

    def group(self, name: str) -> Group:
        """The group of that name, made when it is first asked for."""
        return self._groups.setdefault(name, Group())

    async def join(self, name: str, member: Member) -> None:
        """Add a member and share the partitions anew."""
        group = self.group(name)
        async with group.lock:
            group.members.append(member)
            await self._rebalance(group)

    async def leave(self, name: str, member: Member) -> None:
        """Take a member out and share its partitions among the others."""
        group = self.group(name)
        async with group.lock:
            if member in group.members:
                group.members.remove(member)
                await self._rebalance(group)

    async def _rebalance(self, group: Group) -> None:
        """Eager, as on Kafka: everybody gives everything back, then each gets a share."""
        async with asyncio.TaskGroup() as tasks:
            for member in group.members:
                tasks.create_task(member.revoke())
        shares: dict[int, list[PartitionId]] = {id(member): [] for member in group.members}
        addresses = dict.fromkeys(address for member in group.members for address in member.addresses)
        for address in addresses:
            interested = [member for member in group.members if address in member.addresses]
            for partition in self.partitions(address):
                shares[id(interested[partition[1] % len(interested)])].append(partition)
        for member in group.members:
            member.assign(shares[id(member)])

    def wake(self) -> None:
        """Tell every subscriber that something may have arrived."""
        self._wake_all()

    def _wake_all(self) -> None:
        for group in self._groups.values():
            for member in group.members:
                member.wake()


_hubs: weakref.WeakValueDictionary[str, Hub] = weakref.WeakValueDictionary()
"""Hubs by name, as long as a broker, publisher or subscriber refers to them: that is what a name is for."""


def hub_named(name: str) -> Hub:
    """The hub of that name in this process."""
    hub = _hubs.get(name)
    if hub is None:
        hub = _hubs[name] = Hub()
    return hub
