"""Messages as the frames of AMQP 0-9-1, written by hand: the client library takes fifteen times as long.

A publish is a method frame (exchange, routing key, `mandatory`), a header frame (size, properties,
headers) and the body in as many frames as it needs. Only the body may be split.

Source: https://www.rabbitmq.com/resources/specs/amqp0-9-1.pdf, sections 2.3 and 4.2.
"""

import struct
from typing import Final

from towpath.brokers.ports import OutboundMessage
from towpath.brokers.rabbitmq.headers import TableEncoder
from towpath.errors import MessageRefused

FRAME_OVERHEAD_BYTES: Final = 8
_SHORT_LIMIT_BYTES: Final = 255
_REMEMBERED_ROUTES: Final = 10_000

_METHOD, _HEADER, _BODY = 1, 2, 3
_FRAME_END: Final = b"\xce"
_frame_start: Final = struct.Struct(">BHI").pack
_header_start: Final = struct.Struct(">HHQH").pack
_timestamp: Final = struct.Struct(">Q").pack

_BASIC_PUBLISH: Final = struct.pack(">HHH", 60, 40, 0)
_MANDATORY: Final = b"\x01"
_PERSISTENT: Final = b"\x02"
_PROPERTIES: Final = 1 << 13 | 1 << 12 | 1 << 7 | 1 << 6 | 1 << 5
"""Headers, delivery mode, message id, timestamp, type, written in this order."""
_CONTENT_TYPE: Final = 1 << 15


class FrameEncoder:
    """Encodes messages for one channel. What repeats from message to message is encoded once."""

    def __init__(self, channel_number: int, frame_max_bytes: int, max_message_bytes: int) -> None:
        self._channel = channel_number
        self._frame_max_bytes = frame_max_bytes
        self._max_message_bytes = max_message_bytes
        self._table = TableEncoder()
        self._routes: dict[tuple[str, int, str], tuple[bytes, bytes]] = {}

    def encode(self, message: OutboundMessage, published_at: int) -> list[bytes]:
        """The frames of one message in pieces; `published_at` is in seconds since 1970.

        Raises MessageRefused for what the protocol cannot carry or the broker would not take.
        """
        try:
            return self._encode(message, published_at)
        except ValueError as error:
            raise MessageRefused("malformed", f"{type(error).__name__}: {error}") from error

    def _encode(self, message: OutboundMessage, published_at: int) -> list[bytes]:
        body = message.payload or b""
        route = self._routes.get((message.address, message.routing_slot, message.type))
        if route is None:
            route = self._add_route(message)
        method, type_ = route
        content_type = next((value for name, value in message.headers if name == "content-type"), None)
        flags, first = _PROPERTIES, b""
        if content_type is not None:
            flags, first = _PROPERTIES | _CONTENT_TYPE, _content_type(content_type)
        properties = b"".join(
            (
                _header_start(60, 0, len(body), flags),
                first,
                self._table.encode(message.headers, key=message.key, is_null=message.payload is None),
                _PERSISTENT,
                _short(str(message.message_id).encode()),
                _timestamp(published_at),
                type_,
            )
        )
        limit = self._max_message_bytes
        if len(body) + len(properties) > limit and message.size_bytes > limit:
            raise MessageRefused("too_large", f"{message.size_bytes} bytes, the limit is {limit}")
        if len(properties) + FRAME_OVERHEAD_BYTES > self._frame_max_bytes:
            detail = f"headers of {len(properties)} bytes, a frame holds {self._frame_max_bytes}"
            raise MessageRefused("too_large", detail)
        frames = [method, _frame_start(_HEADER, self._channel, len(properties)), properties, _FRAME_END]
        largest = self._frame_max_bytes - FRAME_OVERHEAD_BYTES
        for start in range(0, len(body), largest):
            part = body if len(body) <= largest else body[start : start + largest]
            frames += (_frame_start(_BODY, self._channel, len(part)), part, _FRAME_END)
        return frames

    def _add_route(self, message: OutboundMessage) -> tuple[bytes, bytes]:
        """The whole method frame, and the type as a property."""
        key = routing_key(message).encode()
        if len(key) > _SHORT_LIMIT_BYTES:
            raise MessageRefused("malformed", "the type is too long for a routing key")
        address = message.address.encode()
        if len(address) > _SHORT_LIMIT_BYTES:
            raise MessageRefused("malformed", "the address is too long for an exchange")
        payload = _BASIC_PUBLISH + _short(address) + _short(key) + _MANDATORY
        method = _frame_start(_METHOD, self._channel, len(payload)) + payload + _FRAME_END
        if len(self._routes) >= _REMEMBERED_ROUTES:  # types from unbounded names must not fill the memory
            self._routes.clear()
        route = (method, _short(message.type.encode()))
        self._routes[message.address, message.routing_slot, message.type] = route
        return route


def routing_key(message: OutboundMessage) -> str:
    """`<slot>.<type>`: lets a group bind everything, a type, or a share of the keys."""
    return f"{message.routing_slot}.{message.type}"


def _short(text: bytes) -> bytes:
    return bytes((len(text),)) + text


def _content_type(value: bytes) -> bytes:
    """As a property, which must be text."""
    text = value if value.isascii() else value.decode("utf-8", "replace").encode()
    if len(text) > _SHORT_LIMIT_BYTES:
        raise MessageRefused("malformed", f"a content type of {len(text)} bytes")
    return _short(text)
