"""Creates and checks exchanges and queues."""

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Final

import aiormq
from aiormq import exceptions as amqp

from towpath.brokers.ports import Bounds, GroupTopology
from towpath.brokers.rabbitmq.config import RabbitConfig
from towpath.brokers.rabbitmq.connection import Link
from towpath.brokers.rabbitmq.errors import CLIENT_ERRORS, describe, is_cancelled_from_outside, translate
from towpath.brokers.rabbitmq.topology import QueueSpec, Topology, group_queues, topology_of
from towpath.errors import BrokerUnavailable, ConfigurationError, TopologyError, UsageError

_OLDEST: Final = (3, 10)
_Declare = Callable[[aiormq.Channel], Awaitable[object]]


class RabbitAdmin:
    """The admin port. `partitions` has no meaning here: a group's queues are set by `queues_per_group`."""

    def __init__(self, config: RabbitConfig) -> None:
        self._config = config
        self._link: Link | None = None

    async def apply(
        self,
        addresses: Sequence[str],
        groups: Sequence[GroupTopology],
        *,
        partitions: int,  # noqa: ARG002
    ) -> list[str]:
        """Create what is missing. Raises TopologyError where something has other arguments."""
        topology = topology_of(addresses, groups, self._config.queues_per_group)
        created = []
        for exchange in topology.exchanges:
            if not await self._exchange_exists(exchange):
                created.append(f"created exchange {exchange}")
            await self._declare_exchange(exchange)
        for queue in topology.queues:
            if not await self._queue_exists(queue.name):
                created.append(f"created queue {queue.name} bound to {queue.exchange}")
            await self._declare_queue(queue)
        return created

    async def check(self, addresses: Sequence[str], groups: Sequence[GroupTopology]) -> list[str]:
        """One line for each exchange or queue that is missing or has other arguments."""
        topology = topology_of(addresses, groups, self._config.queues_per_group)
        return [*await self._check_exchanges(topology), *await self._check_queues(topology)]

    async def _check_exchanges(self, topology: Topology) -> list[str]:
        problems = []
        for exchange in topology.exchanges:
            if not await self._exchange_exists(exchange):
                problems.append(f"RabbitMQ exchange {exchange} does not exist")
                continue
            try:
                await self._declare_exchange(exchange)
            except TopologyError as error:
                problems.append(str(error))
        return problems

    async def _check_queues(self, topology: Topology) -> list[str]:
        problems = []
        for queue in topology.queues:
            if not await self._queue_exists(queue.name):
                problems.append(f"RabbitMQ queue {queue.name} does not exist")
                continue
            try:
                await self._declare_queue(queue, is_binding=False)
            except TopologyError as error:
                problems.append(str(error))
        return problems

    async def _exchange_exists(self, name: str) -> bool:
        return await self._exists(lambda channel: channel.exchange_declare(name, passive=True))

    async def _queue_exists(self, name: str) -> bool:
        return await self._exists(lambda channel: channel.queue_declare(name, passive=True))

    async def _exists(self, declare: _Declare) -> bool:
        try:
            await self._on_channel(declare)
        except amqp.ChannelNotFoundEntity:
            return False
        except CLIENT_ERRORS as error:
            raise translate(error) from error
        return True

    async def _declare_exchange(self, name: str) -> None:
        try:
            await self._on_channel(
                lambda channel: channel.exchange_declare(name, exchange_type="topic", durable=True)
            )
        except amqp.ChannelPreconditionFailed as error:
            raise TopologyError(
                f"RabbitMQ exchange {name} exists as something else: {describe(error)}; delete it or choose "
                "another address"
            ) from error
        except CLIENT_ERRORS as error:
            raise translate(error) from error

    async def _declare_queue(self, queue: QueueSpec, *, is_binding: bool = True) -> None:
        async def declare(channel: aiormq.Channel) -> None:
            await channel.queue_declare(queue.name, durable=True, arguments=dict(queue.arguments))
            for key in queue.binding_keys if is_binding else ():
                await channel.queue_bind(queue.name, queue.exchange, routing_key=key)

        try:
            await self._on_channel(declare)
        except amqp.ChannelPreconditionFailed as error:
            raise TopologyError(
                f"RabbitMQ queue {queue.name} exists with other arguments: {describe(error)}; drain and "
                "delete it, then apply again"
            ) from error
        except CLIENT_ERRORS as error:
            raise translate(error) from error

    async def server(self) -> str:
        """Version and cluster."""
        link = await self._connected()
        version = link.version or "0"
        if tuple(map(int, re.findall(r"\d+", version)[:2])) < _OLDEST:
            raise ConfigurationError(
                f"RabbitMQ {version} is too old for quorum queues with a delivery limit: "
                f"upgrade it to {'.'.join(map(str, _OLDEST))} or newer"
            )
        return f"RabbitMQ {version}, cluster {link.cluster_name or 'without name'}"

    async def _connected(self) -> Link:
        if self._link is None or not self._link.is_open:
            self._link = await Link.open(self._config)
        return self._link

    async def _on_channel(self, declare: _Declare) -> None:
        """Run on a channel of its own, since the broker closes it for a refusal."""
        link = await self._connected()
        try:
            async with asyncio.timeout(self._config.connect_timeout_seconds):
                channel = await link.channel(confirms=False)
                await declare(channel)
                await channel.close()
        except asyncio.CancelledError as error:
            if is_cancelled_from_outside():
                raise
            raise BrokerUnavailable("RabbitMQ: the connection broke") from error

    async def bounds(self, address: str, since: datetime | None = None) -> Mapping[int, Bounds]:  # noqa: ARG002
        """None: a queue has no offsets."""
        return {}

    async def kept_for(self, address: str) -> timedelta | None:  # noqa: ARG002
        """A queue keeps what was not acknowledged, and nothing else."""
        return None

    async def change_queues(self, group: GroupTopology, before: int) -> None:
        """Bind the new queues, then take the old bindings and queues away."""
        old = [queue for each in group.addresses for queue in group_queues(group.group, each, before)]
        new = {
            queue.name: queue
            for each in group.addresses
            for queue in group_queues(group.group, each, self._config.queues_per_group)
        }
        for queue in old:
            await self._ensure_unused(queue.name)
        for queue in new.values():
            await self._declare_queue(queue)
        for queue in old:
            await self._let_go(queue, new.get(queue.name))

    async def _ensure_unused(self, name: str) -> None:
        found = aiormq.spec.Queue.DeclareOk(message_count=0, consumer_count=0)

        async def look(channel: aiormq.Channel) -> None:
            nonlocal found
            found = await channel.queue_declare(name, passive=True)

        await self._exists(look)
        if found.consumer_count:
            raise UsageError(f"somebody reads from the queue {name}: stop every member of the group first")
        if found.message_count:
            raise UsageError(
                f"{found.message_count} messages wait in the queue {name}: stop the relays, let the group "
                "read to the end with the queues it has, then stop it"
            )

    async def _let_go(self, old: QueueSpec, new: QueueSpec | None) -> None:
        async def act(channel: aiormq.Channel) -> None:
            if new is None:
                await channel.queue_delete(old.name)  # of one that is gone it says so, too
            else:
                for key in set(old.binding_keys).difference(new.binding_keys):
                    await channel.queue_unbind(old.name, old.exchange, routing_key=key)

        try:
            await self._on_channel(act)
        except CLIENT_ERRORS as error:
            raise translate(error) from error

    async def aclose(self) -> None:
        """Close; bounded."""
        link, self._link = self._link, None
        if link is not None:
            await link.aclose()
