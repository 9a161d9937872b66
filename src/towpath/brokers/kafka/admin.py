"""Creates and checks Kafka topics."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka import errors as kafka
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType

from towpath.brokers.kafka.config import KafkaConfig
from towpath.brokers.kafka.connection import connection_error
from towpath.brokers.kafka.errors import describe, translate
from towpath.brokers.ports import Bounds, GroupTopology, dead_letter_address
from towpath.errors import ConfigurationError, TopologyError, UsageError

_CLOSE_SECONDS: Final = 3.0
_VISIBLE_POLLS: Final = 100
_VISIBLE_POLL_SECONDS: Final = 0.05
_CLIENT_ERRORS: Final = (kafka.KafkaError, OSError, TimeoutError)


def needed_topics(addresses: Sequence[str], groups: Sequence[GroupTopology]) -> list[str]:
    """Every topic that these addresses and groups use, once each."""

    def topics() -> Iterator[str]:
        yield from addresses
        for group in groups:
            for address in group.addresses:
                yield address
                yield dead_letter_address(group.group, address)

    return list(dict.fromkeys(topics()))


class KafkaAdmin:
    """The admin port. A topic's partition count and replication stay as they are once it exists."""

    def __init__(self, config: KafkaConfig) -> None:
        self._config = config
        self._client: AIOKafkaAdminClient | None = None

    async def apply(
        self, addresses: Sequence[str], groups: Sequence[GroupTopology], *, partitions: int
    ) -> list[str]:
        """Create the topics that are missing, each with `partitions` partitions."""
        existing = await self._topics()
        missing = [topic for topic in needed_topics(addresses, groups) if topic not in existing]
        created = await self.create(missing, partitions)
        for _ in range(_VISIBLE_POLLS):
            if await self._topics() >= set(missing):
                break
            await asyncio.sleep(_VISIBLE_POLL_SECONDS)  # the controller knows, the brokers are being told
        return created

    async def create(self, topics: Sequence[str], partitions: int) -> list[str]:
        """Create these topics; one that somebody else creates at the same moment is fine."""
        if not topics:
            return []
        client = await self._connected()
        new = [self._new_topic(topic, partitions) for topic in topics]
        try:
            response = await client.create_topics(new)
        except _CLIENT_ERRORS as error:
            raise translate(error) from error
        created = []
        for topic, code, *reason in response.topic_errors:
            error_class = kafka.for_code(code)
            if error_class is kafka.NoError:
                created.append(f"created topic {topic} with {partitions} partitions")
            elif error_class is not kafka.TopicAlreadyExistsError:
                self._raise(topic, error_class(*[each for each in reason if each]))
        return created

    def _new_topic(self, name: str, partitions: int) -> NewTopic:
        topic = NewTopic(name, partitions, 1)
        # Its constructor does not know that -1 asks the broker for its default.
        topic.replication_factor = self._config.replication_factor
        return topic

    @staticmethod
    def _raise(topic: str, error: kafka.KafkaError) -> None:
        ours = translate(error)
        if isinstance(ours, ConfigurationError):
            raise TopologyError(f"cannot create Kafka topic {topic!r}: {describe(error)}") from error
        raise ours from error

    async def check(self, addresses: Sequence[str], groups: Sequence[GroupTopology]) -> list[str]:
        """One line for each topic that does not exist or may not be seen."""
        existing = await self._topics()
        return [
            f"Kafka topic {topic} does not exist"
            for topic in needed_topics(addresses, groups)
            if topic not in existing
        ]

    async def server(self) -> str:
        """The cluster and how many brokers it has; Kafka does not tell clients its version."""
        found = await self._described()
        return f"Kafka cluster {found.get('cluster_id') or 'without id'}, brokers: {len(found['brokers'])}"

    async def cluster(self) -> str | None:
        """The cluster's id, which no other has. Raises BrokerUnavailable or ConfigurationError."""
        return (await self._described()).get("cluster_id") or None

    async def _described(self) -> dict[str, Any]:
        client = await self._connected()
        try:
            found: dict[str, Any] = await client.describe_cluster()
        except _CLIENT_ERRORS as error:
            raise translate(error) from error
        return found

    async def bounds(self, address: str, since: datetime | None = None) -> Mapping[int, Bounds]:
        """First and next offset of each partition, and the first since an instant."""
        numbers = await self._partitions(address)
        partitions = [TopicPartition(address, number) for number in numbers]
        consumer = AIOKafkaConsumer(**self._config.client, enable_auto_commit=False)
        try:
            async with asyncio.timeout(self._config.request_timeout_seconds):
                await consumer.start()
                consumer.assign(partitions)
                first = await consumer.beginning_offsets(partitions)
                end = await consumer.end_offsets(partitions)
                found = await _offsets_since(consumer, partitions, since)
        except _CLIENT_ERRORS as error:
            raise await connection_error(self._config, error) from error
        finally:
            await consumer.stop()
        return {
            each.partition: Bounds(
                first[each], end[each], None if since is None else found.get(each, end[each])
            )
            for each in partitions
        }

    async def _partitions(self, address: str) -> list[int]:
        client = await self._connected()
        try:
            (found,) = await client.describe_topics([address])
        except _CLIENT_ERRORS as error:
            raise translate(error) from error
        if found["error_code"]:
            raise TopologyError(f"Kafka topic {address!r} does not exist or may not be seen")
        return sorted(int(each["partition"]) for each in found["partitions"])

    async def kept_for(self, address: str) -> timedelta | None:
        """The topic's retention; for ever where it is without bound or compacted alone."""
        client = await self._connected()
        wanted = ConfigResource(ConfigResourceType.TOPIC, address)
        try:
            (response,) = await client.describe_configs([wanted])
        except _CLIENT_ERRORS as error:
            raise translate(error) from error
        error_code, *_, entries = response.resources[0]
        if error_code:
            return None  # `check` tells what is missing
        values = {entry[0]: entry[1] for entry in entries}
        milliseconds = int(values.get("retention.ms") or -1)
        is_deleting = "delete" in (values.get("cleanup.policy") or "delete")
        if milliseconds < 0 or not is_deleting:
            return timedelta.max
        return timedelta(milliseconds=min(milliseconds, 10**14))

    async def _topics(self) -> set[str]:
        client = await self._connected()
        try:
            return set(await client.list_topics())
        except _CLIENT_ERRORS as error:
            raise translate(error) from error

    async def _connected(self) -> AIOKafkaAdminClient:
        if self._client is None:
            client = AIOKafkaAdminClient(**self._config.client)
            try:
                async with asyncio.timeout(self._config.request_timeout_seconds):
                    await client.start()
            except _CLIENT_ERRORS as error:
                await client.close()
                raise await connection_error(self._config, error) from error
            self._client = client
        return self._client

    async def change_queues(self, group: GroupTopology, before: int) -> None:  # noqa: ARG002
        """None: members share partitions."""
        raise UsageError("groups have no queues at Kafka")

    async def aclose(self) -> None:
        """Close; bounded."""
        client, self._client = self._client, None
        if client is not None:
            try:
                async with asyncio.timeout(_CLOSE_SECONDS):
                    await client.close()
            except _CLIENT_ERRORS:
                return  # nothing is lost: an admin connection holds no state


async def _offsets_since(
    consumer: AIOKafkaConsumer, partitions: Sequence[TopicPartition], since: datetime | None
) -> dict[TopicPartition, int]:
    if since is None:
        return {}
    found = await consumer.offsets_for_times(dict.fromkeys(partitions, int(since.timestamp() * 1000)))
    return {each: int(place.offset) for each, place in found.items() if place is not None}
