"""Tables and frames of AMQP: what strangers send becomes headers, what we send comes back."""

import asyncio
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

from aiokafka import ConsumerRecord, TopicPartition
from hypothesis import example, given
from hypothesis import strategies as st
from pamqp import decode, encode, frame
from pamqp.body import ContentBody
from pamqp.commands import Basic
from pamqp.header import ContentHeader

from towpath.brokers.intake import Intake
from towpath.brokers.kafka.assignments import Assignments
from towpath.brokers.ports import Headers, OutboundMessage
from towpath.brokers.rabbitmq.frames import FrameEncoder
from towpath.brokers.rabbitmq.headers import TableEncoder, decode_death, decode_headers
from towpath.errors import MessageRefused

FRAME_MAX_BYTES = 4096
MAX_MESSAGE_BYTES = 50_000
NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=30) | st.sampled_from(
    ["towpath-headers", "towpath-key", "towpath-null", "x-death", "x-delivery-count", "x-first-death-queue"]
)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False, width=32),
    st.binary(max_size=40),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=40),
    st.datetimes(min_value=datetime(1970, 1, 2), max_value=datetime(2100, 1, 1), timezones=st.just(UTC)),  # noqa: DTZ001
    st.decimals(-1000, 1000, places=2),
)
WRITABLE = SCALARS.filter(lambda value: not isinstance(value, bytes))
"""What the library writes as well as reads."""
FIELDS = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)
TABLES = st.dictionaries(NAMES, FIELDS, max_size=6)
WIRE_NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=140)
HEADERS = st.lists(st.tuples(WIRE_NAMES, st.binary(max_size=60)), max_size=6).map(tuple)


def _read(
    encoder: TableEncoder, headers: Headers, key: str | None, *, is_null: bool
) -> tuple[Headers, str | None, bool]:
    _, table = decode.field_table(encoder.encode(headers, key=key, is_null=is_null))
    return decode_headers(table)


@given(table=TABLES)
@example({"towpath-headers": ["a"], "towpath-key": None, "towpath-null": False})
@example({"towpath-headers": [[], {}, None, 7], "a": Decimal("1.10")})
@example({"x-death": [{"reason": ["x"], "queue": 7, "count": True}]})
def test_any_table_is_headers_that_survive_the_way_back(table: dict[str, Any]) -> None:
    """X6, R17: a message of a stranger can be stored and sent again as it was understood."""
    headers, key, is_null = decode_headers(table)
    assert all(isinstance(name, str) and isinstance(value, bytes) for name, value in headers)
    assert dict(_read(TableEncoder(), headers, key, is_null=is_null)[0]) == dict(headers)
    assert _read(TableEncoder(), headers, key, is_null=is_null)[1:] == (key, is_null)


@given(table=TABLES | st.none())
def test_any_table_tells_of_a_death_in_known_words(table: dict[str, Any] | None) -> None:
    """D6"""
    death = decode_death(table)
    assert death.reason in {"delivery_limit", "expired", "maxlen", "rejected", "unknown"}
    assert death.queue is None or "\0" not in death.queue


@given(table=st.dictionaries(st.text("abc-", min_size=1, max_size=20), WRITABLE, max_size=6))
def test_a_table_as_the_library_writes_it_is_understood(table: dict[str, Any]) -> None:
    _, found = decode.field_table(encode.field_table(table))
    headers, key, is_null = decode_headers(found)
    assert {name for name, _ in headers} == table.keys()
    assert (key, is_null) == (None, False)


@given(messages=st.lists(st.tuples(HEADERS, st.none() | st.text(max_size=20), st.booleans()), max_size=4))
def test_what_an_encoder_remembers_changes_no_message(
    messages: list[tuple[Headers, str | None, bool]],
) -> None:
    """R17"""
    encoder = TableEncoder()
    for headers, key, is_null in messages:
        try:
            expected = TableEncoder().encode(headers, key=key, is_null=is_null)
        except ValueError:
            continue
        assert encoder.encode(headers, key=key, is_null=is_null) == expected


@given(
    headers=HEADERS,
    payload=st.none() | st.binary(max_size=60) | st.integers(4000, 60_000).map(bytes),
    key=st.none() | st.text(max_size=30),
    type_=st.text(max_size=300),
    address=st.text(st.characters(exclude_categories=["Cs"]), max_size=300),
)
@example((("content-type", b"\xff" * 100),), b"", None, "t", "a")
@example((("content-type", b"x" * 256),), b"", None, "t", "a")
@example((("a" * 200, b"b" * 4000),), b"x", "k", "t", "a")
@example((), b"x", "\ud800", "t", "a")
def test_any_message_is_frames_the_library_reads_or_refused(
    headers: Headers, payload: bytes | None, key: str | None, type_: str, address: str
) -> None:
    """R17, R25: nothing that would make the broker close the connection is written."""
    message = OutboundMessage(UUID(int=1), 1, address, type_, key, 63, headers, payload)
    try:
        data = b"".join(FrameEncoder(7, FRAME_MAX_BYTES, MAX_MESSAGE_BYTES).encode(message, 1_700_000_000))
    except MessageRefused:
        return
    frames: list[Any] = []
    while data:
        length, channel, decoded = frame.unmarshal(data)
        assert (length <= FRAME_MAX_BYTES, channel) == (True, 7)
        frames.append(decoded)
        data = data[length:]
    publish, header, *bodies = frames
    assert isinstance(publish, Basic.Publish)
    assert isinstance(header, ContentHeader)
    assert (publish.exchange, publish.routing_key, publish.mandatory) == (address, f"63.{type_}", True)
    assert b"".join(each.value for each in bodies if isinstance(each, ContentBody)) == (payload or b"")
    found, found_key, is_null = decode_headers(header.properties.headers)
    assert (sorted(found), found_key, is_null) == (sorted(headers), key, payload is None)


@given(
    key=st.none() | st.binary(max_size=20),
    value=st.none() | st.binary(max_size=20),
    headers=st.lists(st.tuples(st.text(max_size=10), st.none() | st.binary(max_size=20)), max_size=5),
    timestamp=st.integers(-1, 253_402_300_799_999),
)
@example(b"\xff", None, [("a", None), ("a", b"")], -1)
def test_any_kafka_record_is_a_delivery(
    key: bytes | None, value: bytes | None, headers: list[tuple[str, bytes | None]], timestamp: int
) -> None:
    """R17, X6, C11: names repeat, values are bytes, and a key that is no UTF-8 stays one key."""
    intake = Intake(10, 1000)
    assignments = Assignments(intake)
    assignments.assign([TopicPartition("t", 0)])
    assignments.place(assignments.unplaced[0], 0, committed=None)
    assignments.arrive(ConsumerRecord("t", 0, 5, timestamp, 0, key, value, None, 0, 0, tuple(headers)))
    (delivery,) = asyncio.run(intake.take(10, timeout_seconds=1))
    assert delivery.value == value
    assert delivery.headers == tuple((name, each or b"") for name, each in headers)
    assert (delivery.key is None) == (key is None)
    assert delivery.key is None or isinstance(delivery.key.encode(), bytes)
    assert delivery.timestamp is None or delivery.timestamp.tzinfo is UTC
