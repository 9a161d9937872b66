"""Frames written by hand say what the library's own decoder reads."""

import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pamqp import frame
from pamqp.body import ContentBody
from pamqp.commands import Basic
from pamqp.header import ContentHeader

from towpath.brokers.ports import Headers, OutboundMessage
from towpath.brokers.rabbitmq.frames import FrameEncoder
from towpath.errors import MessageRefused

CHANNEL = 7
FRAME_MAX_BYTES = 4096
MAX_MESSAGE_BYTES = 50_000


def _message(
    payload: bytes | None = b"{}",
    *,
    headers: Headers = (),
    type_: str = "order.placed",
    key: str | None = "k",
) -> OutboundMessage:
    return OutboundMessage(uuid.uuid4(), 1, "orders", type_, key, 5, headers, payload)


def _encode(message: OutboundMessage) -> bytes:
    encoder = FrameEncoder(CHANNEL, FRAME_MAX_BYTES, MAX_MESSAGE_BYTES)
    return b"".join(encoder.encode(message, 1_700_000_000))


def _decode(data: bytes) -> list[object]:
    frames: list[object] = []
    while data:
        length, channel, decoded = frame.unmarshal(data)
        assert channel == CHANNEL
        assert length <= FRAME_MAX_BYTES
        frames.append(decoded)
        data = data[length:]
    return frames


@given(st.integers(0, 3 * FRAME_MAX_BYTES) | st.sampled_from([4087, 4088, 4089, 8176, 8177]))
def test_a_body_is_split_into_frames(size: int) -> None:
    """R17: none is larger than was agreed on, and together they are the body."""
    message = _message(b"x" * size)
    publish, header, *bodies = _decode(_encode(message))
    assert isinstance(publish, Basic.Publish)
    assert isinstance(header, ContentHeader)
    assert header.body_size == size
    assert b"".join(each.value for each in bodies if isinstance(each, ContentBody)) == message.payload


@pytest.mark.parametrize("content_type", [None, "application/json", "text/ü"])
def test_the_library_reads_every_property(content_type: str | None) -> None:
    """R9, R17: mandatory, persistent, and what other clients look for."""
    headers = () if content_type is None else (("content-type", content_type.encode()),)
    message = _message(headers=(*headers, ("ce_id", b"1")))
    publish, header, _ = _decode(_encode(message))
    assert isinstance(publish, Basic.Publish)
    assert (publish.exchange, publish.routing_key, publish.mandatory) == ("orders", "5.order.placed", True)
    assert isinstance(header, ContentHeader)
    properties = header.properties
    assert properties.content_type == content_type
    assert properties.delivery_mode == 2
    assert properties.message_id == str(message.message_id)
    assert properties.message_type == "order.placed"
    assert properties.timestamp is not None
    assert properties.timestamp.timestamp() == 1_700_000_000
    assert properties.headers is not None
    assert properties.headers["ce_id"] == "1"


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (_message(b"x" * (MAX_MESSAGE_BYTES + 1)), "too_large"),
        (_message(headers=(("big", b"x" * FRAME_MAX_BYTES),)), "too_large"),
        (_message(type_="t" * 254), "malformed"),
        (_message(key="\ud800"), "malformed"),
        (_message(headers=(("content-type", b"x" * 256),)), "malformed"),
    ],
)
def test_what_the_protocol_cannot_carry_is_refused(message: OutboundMessage, reason: str) -> None:
    """R25: before it closes a channel."""
    with pytest.raises(MessageRefused) as refused:
        _encode(message)
    assert refused.value.reason == reason


def test_headers_may_fill_a_frame() -> None:
    """R25: the limit is exact."""
    for size in range(FRAME_MAX_BYTES - 200, FRAME_MAX_BYTES):
        try:
            data = _encode(_message(headers=(("big", b"x" * size),)))
        except MessageRefused:
            assert size > FRAME_MAX_BYTES - 190
            return
        _, header_size, _ = frame.frame_parts(data[data.index(b"\xce") + 1 :])
        assert header_size == CHANNEL
        _decode(data)
    pytest.fail("nothing was refused")
