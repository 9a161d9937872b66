"""Two requests of Kafka's protocol that its client library does not have."""

from collections.abc import Mapping, Sequence
from typing import Final

from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.types import (
    Array,
    CompactArray,
    CompactString,
    Int8,
    Int16,
    Int32,
    Schema,
    String,
    TaggedFields,
)

_TIMEOUT_MS: Final = 10_000
_PREFERRED: Final = 0


class _Reassigned(Response):
    API_KEY = 45
    API_VERSION = 0
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        ("error_code", Int16),
        ("error_message", CompactString()),
        (
            "topics",
            CompactArray(
                ("topic", CompactString()),
                (
                    "partitions",
                    CompactArray(
                        ("partition", Int32),
                        ("error_code", Int16),
                        ("error_message", CompactString()),
                        ("tags", TaggedFields),
                    ),
                ),
                ("tags", TaggedFields),
            ),
        ),
        ("tags", TaggedFields),
    )


class _Reassign(RequestStruct):
    FLEXIBLE_VERSION = True
    API_KEY = 45
    API_VERSION = 0
    RESPONSE_TYPE = _Reassigned
    SCHEMA = Schema(
        ("timeout_ms", Int32),
        (
            "topics",
            CompactArray(
                ("topic", CompactString()),
                (
                    "partitions",
                    CompactArray(
                        ("partition", Int32), ("replicas", CompactArray(Int32)), ("tags", TaggedFields)
                    ),
                ),
                ("tags", TaggedFields),
            ),
        ),
        ("tags", TaggedFields),
    )


class Reassign(Request[_Reassign]):
    """Put the partitions of a topic on these brokers; the first of each is the preferred leader."""

    API_KEY = 45

    def __init__(self, topic: str, replicas: Mapping[int, Sequence[int]]) -> None:
        self._topics = [(topic, [(number, nodes, {}) for number, nodes in replicas.items()], {})]

    def build(self, request_struct_class: type[_Reassign]) -> _Reassign:
        return request_struct_class(_TIMEOUT_MS, self._topics, {})


class _Elected(Response):
    API_KEY = 43
    API_VERSION = 1
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        ("error_code", Int16),
        (
            "topics",
            Array(
                ("topic", String()),
                (
                    "partitions",
                    Array(("partition", Int32), ("error_code", Int16), ("error_message", String())),
                ),
            ),
        ),
    )


class _Elect(RequestStruct):
    API_KEY = 43
    API_VERSION = 1
    RESPONSE_TYPE = _Elected
    SCHEMA = Schema(
        ("election_type", Int8),
        ("topics", Array(("topic", String()), ("partitions", Array(Int32)))),
        ("timeout_ms", Int32),
    )


class ElectLeaders(Request[_Elect]):
    """Let the preferred brokers lead."""

    API_KEY = 43

    def __init__(self, topic: str, partitions: Sequence[int]) -> None:
        self._topics = [(topic, partitions)]

    def build(self, request_struct_class: type[_Elect]) -> _Elect:
        return request_struct_class(_PREFERRED, self._topics, _TIMEOUT_MS)
