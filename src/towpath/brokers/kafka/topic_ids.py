"""Which topic a name means: one that was deleted and made again has another id.

The client library asks for metadata in versions of the protocol that do not tell it. Brokers before
Kafka 2.8, and some others that speak its protocol, know no ids.
"""

import random
from collections.abc import Collection, Iterable, Mapping
from io import BytesIO
from typing import Final
from uuid import UUID

from aiokafka import errors as kafka
from aiokafka.client import AIOKafkaClient
from aiokafka.protocol.abstract import AbstractType
from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.types import Boolean, CompactArray, CompactString, Int16, Int32, Schema, TaggedFields

_NO_ID: Final = bytes(16)


class _Id(AbstractType[bytes]):  # type: ignore[misc]  # the library is not typed
    """16 bytes."""

    @classmethod
    def encode(cls, value: bytes) -> bytes:
        return value

    @classmethod
    def decode(cls, data: BytesIO) -> bytes:
        return data.read(16)


class _Metadata(Response):  # type: ignore[misc]
    API_KEY = 3
    API_VERSION = 10
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        (
            "brokers",
            CompactArray(
                ("node_id", Int32),
                ("host", CompactString()),
                ("port", Int32),
                ("rack", CompactString()),
                ("tags", TaggedFields),
            ),
        ),
        ("cluster_id", CompactString()),
        ("controller_id", Int32),
        (
            "topics",
            CompactArray(
                ("error_code", Int16),
                ("name", CompactString()),
                ("topic_id", _Id),
                ("is_internal", Boolean),
                (
                    "partitions",
                    CompactArray(
                        ("error_code", Int16),
                        ("partition", Int32),
                        ("leader", Int32),
                        ("leader_epoch", Int32),
                        ("replicas", CompactArray(Int32)),
                        ("isr", CompactArray(Int32)),
                        ("offline_replicas", CompactArray(Int32)),
                        ("tags", TaggedFields),
                    ),
                ),
                ("authorized_operations", Int32),
                ("tags", TaggedFields),
            ),
        ),
        ("authorized_operations", Int32),
        ("tags", TaggedFields),
    )


class _AskMetadata(RequestStruct):  # type: ignore[misc]
    FLEXIBLE_VERSION = True
    API_KEY = 3
    API_VERSION = 10
    RESPONSE_TYPE = _Metadata
    SCHEMA = Schema(
        ("topics", CompactArray(("topic_id", _Id), ("name", CompactString()), ("tags", TaggedFields))),
        ("allow_auto_topic_creation", Boolean),
        ("include_cluster_authorized_operations", Boolean),
        ("include_topic_authorized_operations", Boolean),
        ("tags", TaggedFields),
    )


class _MetadataOf(Request[_AskMetadata]):  # type: ignore[misc]
    API_KEY = 3

    def __init__(self, topics: Iterable[str]) -> None:
        self._topics = [(_NO_ID, topic, dict[int, bytes]()) for topic in topics]

    def build(self, request_struct_class: type[_AskMetadata]) -> _AskMetadata:
        return request_struct_class(self._topics, False, False, False, {})


async def topic_ids(client: AIOKafkaClient, topics: Collection[str]) -> Mapping[str, str]:
    """`cluster/id` of each topic that exists; empty where the broker knows no ids. Raises KafkaError."""
    request = _MetadataOf(topics)
    brokers = [broker.nodeId for broker in client.cluster.brokers()]
    for node in random.sample(brokers, len(brokers)):
        try:
            answer = await client.send(node, request)
        except NotImplementedError:  # the library's word for a version that the broker does not speak
            return dict.fromkeys(topics, "")
        except (kafka.NodeNotReadyError, kafka.KafkaConnectionError, kafka.RequestTimedOutError):
            continue
        return {
            name: "" if topic_id == _NO_ID else f"{answer.cluster_id}/{UUID(bytes=topic_id)}"
            for error_code, name, topic_id, *_ in answer.topics
            if not error_code
        }
    raise kafka.NodeNotReadyError("no broker tells which topics there are")


def is_another(noted: str, topic_id: str) -> bool:
    """Whether another topic of the same cluster was noted; notes from another cluster say nothing."""
    before, now = noted.split("/"), topic_id.split("/")
    return len(before) == len(now) == 2 and before[0] == now[0] and before[1] != now[1]
