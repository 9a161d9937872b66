"""Faults that only Kafka knows: leaders that move among three brokers, topics that change or go."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Final

from aiokafka.admin import AIOKafkaAdminClient, NewPartitions

from tests.acceptance.brokers import KafkaWire
from tests.acceptance.world import TOWPATH
from tests.faults.fault import Fault
from tests.faults.kafka_requests import ElectLeaders, Reassign
from tests.faults.world import MEMBERS, RELAYS, FaultWorld
from towpath.testing.services import KafkaCluster

OFFSETS: Final = "__consumer_offsets"
"""Whoever leads a partition of it coordinates the groups in it."""
_MOVES: Final = 5
_MOVE_SECONDS: Final = 0.7
_PATIENCE_SECONDS: Final = 90.0
_PLACES: Final = (
    "select partition, position, refused is not null and resume_from is null as is_waiting"
    " from towpath.group_offset where consumer_group = $1 and address = $2"
)


class OfKafka(Fault):
    """Acts on topics and brokers."""

    acts_on = frozenset({"broker", "broker proxy"})
    brokers = frozenset({"kafka"})
    touches = (*RELAYS, *MEMBERS)


class PartitionsAdded(OfKafka):
    """To the topic that everything is in."""

    async def begin(self, world: FaultWorld) -> None:
        async with _admin(world) as admin:
            await admin.create_partitions({world.steps: NewPartitions(7)})


class TopicDeleted(OfKafka):
    """With everything in it, and the group's offsets.

    A person makes it again, has sent again what the outbox holds, and says from where the group goes on. A
    member that was just starting has ended for the want of it, and whatever supervises it starts it again.
    """

    least_seconds = 5.0

    async def begin(self, world: FaultWorld) -> None:
        assert isinstance(world.broker, KafkaWire)
        world.heard_before += await world.broker.heard(world.steps)
        async with _admin(world) as admin:
            await admin.delete_topics([world.steps])
        world.broker.forget(world.steps)

    async def end(self, world: FaultWorld) -> None:
        places = await world.fetch(_PLACES, world.group, world.steps)
        before = {row["partition"]: row["position"] for row in places if row["position"] is not None}
        await world.attempt("apply", TOWPATH, "broker", "apply", "--app", "tests.faults.member:app")
        reason = ("-y", "--reason", "the topic was deleted")
        await world.attempt("republish", TOWPATH, "outbox", "republish", "--since", "1h", *reason)
        for name in MEMBERS:
            if world.has_ended(name):
                world.start(name)

        async def are_all_told() -> bool:
            places = await world.fetch(_PLACES, world.group, world.steps)
            if any(row["is_waiting"] for row in places):
                which = ("--group", world.group, "--topic", world.steps, "--to", "earliest")
                await world.attempt("word", TOWPATH, "worker", "offsets", *which, *reason)
            for row in places:
                if row["position"] != before.get(row["partition"]):
                    before.pop(row["partition"], None)  # it goes on from there
            return not before

        await world.until("every partition has its word", are_all_told, seconds=_PATIENCE_SECONDS, every=1.0)


class OfCluster(OfKafka):
    """Needs more than one broker."""

    needs_cluster = True


Choice = Callable[[AIOKafkaAdminClient, FaultWorld], Awaitable[int]]


async def leader(admin: AIOKafkaAdminClient, world: FaultWorld) -> int:
    """Of a partition of the topic that everything is in."""
    return (await _leaders(admin, world.steps))[0]


async def coordinator(admin: AIOKafkaAdminClient, world: FaultWorld) -> int:
    """Of the group."""
    return int(await admin.find_coordinator(world.group))


class OneLost(OfCluster):
    """SIGKILL of one of three brokers; it comes back with its data."""

    def __init__(self, choose: Choice) -> None:
        self._choose = choose
        self._lost = 0

    async def begin(self, world: FaultWorld) -> None:
        async with _admin(world) as admin:
            self._lost = await self._choose(admin, world)
        await asyncio.to_thread(_cluster(world).broker(self._lost).kill)

    async def end(self, world: FaultWorld) -> None:
        await asyncio.to_thread(_cluster(world).broker(self._lost).start)


class LeadersMoved(OfCluster):
    """From broker to broker, all of which live: those that led say that they do so no more."""

    def __init__(self, topic_of: Callable[[FaultWorld], str]) -> None:
        self._topic_of = topic_of

    async def begin(self, world: FaultWorld) -> None:
        topic = self._topic_of(world)
        moved = 0
        async with _admin(world) as admin:
            for _ in range(_MOVES):
                before = await _leaders(admin, topic)
                replicas = await _replicas(admin, topic)
                turned = {number: [*nodes[1:], nodes[0]] for number, nodes in replicas.items()}
                await admin._send_request(Reassign(topic, turned))
                await admin._send_request(ElectLeaders(topic, list(turned)))
                await asyncio.sleep(_MOVE_SECONDS)
                moved += before != await _leaders(admin, topic)
        self.is_missed = moved == 0


def _cluster(world: FaultWorld) -> KafkaCluster:
    assert world.servers.cluster is not None
    return world.servers.cluster


@asynccontextmanager
async def _admin(world: FaultWorld) -> AsyncIterator[AIOKafkaAdminClient]:
    admin = AIOKafkaAdminClient(bootstrap_servers=world.broker.url.removeprefix("kafka://"))
    await admin.start()
    try:
        yield admin
    finally:
        await admin.close()


async def _leaders(admin: AIOKafkaAdminClient, topic: str) -> Mapping[int, int]:
    (found,) = await admin.describe_topics([topic])
    return {each["partition"]: each["leader"] for each in found["partitions"]}


async def _replicas(admin: AIOKafkaAdminClient, topic: str) -> Mapping[int, list[int]]:
    (found,) = await admin.describe_topics([topic])
    return {each["partition"]: each["replicas"] for each in found["partitions"]}
