"""Header names on the wire, and headers as a `json` column.

In Python headers are pairs of name and bytes: names may repeat, the order counts. In the database
they are a JSON array of `["name", "text"]`, or `["name", {"b64": "…"}]` where the value is not text
that Postgres can store.
"""

import json
from base64 import b64decode, b64encode
from binascii import Error as Base64Error
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Final, TypeAlias, cast

import msgspec

from towpath.errors import DecodeError, InvalidMessage
from towpath.messages.limits import HEADERS_LIMIT_BYTES, check_header_name

Headers: TypeAlias = tuple[tuple[str, bytes], ...]
HeadersInput: TypeAlias = Mapping[str, str | bytes] | Iterable[tuple[str, str | bytes]]

CE_SPECVERSION: Final = "ce_specversion"
CE_ID: Final = "ce_id"
CE_TYPE: Final = "ce_type"
CE_SOURCE: Final = "ce_source"
CE_TIME: Final = "ce_time"
CONTENT_TYPE: Final = "content-type"
SEQUENCE: Final = "towpath-sequence"
BODY: Final = "towpath-body"
KIND: Final = "towpath-kind"
INSTALLATION: Final = "towpath-installation"
REPUBLISHED: Final = "towpath-republished"
"""Stored first where an operator sends a message again: the audit row; `ce_time` follows it."""
CAUSED_BY: Final = "towpath-caused-by"
"""Of what a handler emits or submits: the message that it handled."""
TRACEPARENT: Final = "traceparent"
TRACESTATE: Final = "tracestate"

CE_PREFIX: Final = "ce_"
OWN_PREFIX: Final = "towpath-"

_encode = msgspec.json.Encoder().encode
_decoder: Final = msgspec.json.Decoder(list[tuple[str, str | dict[str, str]]])


@lru_cache(maxsize=512)  # messages of one producer all have the same few names
def reserved_name(name: str) -> str | None:
    """The name in lower case where towpath writes this header itself, else None."""
    lower = name.lower()
    is_ours = lower.startswith((CE_PREFIX, OWN_PREFIX)) or lower == CONTENT_TYPE
    return lower if is_ours else None


def is_reserved(name: str) -> bool:
    """Whether towpath writes this header itself."""
    return reserved_name(name) is not None


def check_headers(given: HeadersInput | None) -> Headers:
    """A caller's headers as pairs of bytes; text becomes UTF-8.

    Raises InvalidMessage for reserved or malformed names, other values than str and bytes, and
    more than 16,384 bytes in all: RabbitMQ wants all headers of a message in one frame.
    """
    if not given:
        return ()
    pairs: Iterable[tuple[str, str | bytes]] = (
        cast("Mapping[str, str | bytes]", given).items() if isinstance(given, Mapping) else given
    )
    checked = tuple([(_caller_name(name), _caller_value(name, value)) for name, value in pairs])
    size = sum(len(name) + len(value) for name, value in checked)
    if size > HEADERS_LIMIT_BYTES:
        raise InvalidMessage(
            f"headers of {size} bytes are refused: the limit is {HEADERS_LIMIT_BYTES} in all"
        )
    return checked


def _caller_name(name: str) -> str:
    if is_reserved(check_header_name(name)):
        raise InvalidMessage(f"the header {name!r} is refused: ce_*, towpath-* and content-type are ours")
    return name


def _caller_value(name: str, value: object) -> bytes:
    if isinstance(value, bytes):
        return bytes(value)
    if not isinstance(value, str):
        kind = type(value).__name__
        raise InvalidMessage(f"the header {name!r} is refused: its value is {kind}, not str or bytes")
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        raise InvalidMessage(f"the header {name!r} is refused: its value is not UTF-8 text") from error


def _value_to_json(value: bytes) -> str | dict[str, str]:
    try:
        text = value.decode()
    except UnicodeDecodeError:
        text = "\0"
    return {"b64": b64encode(value).decode("ascii")} if "\0" in text else text


def dump_headers(headers: Headers) -> str:
    """The headers as text for a `json` column."""
    if not headers:
        return "[]"
    pairs = [(name, _value_to_json(value)) for name, value in headers]
    try:
        return _encode(pairs).decode()
    except UnicodeEncodeError:  # a foreign name that was not UTF-8 on the wire
        return json.dumps(pairs)


def load_headers(text: str | None) -> Headers:
    """The headers from a `json` column. Raises DecodeError `malformed_header`."""
    if text is None or text == "[]":
        return ()
    try:
        pairs = _decoder.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        pairs = _load_slowly(text)
    try:
        return tuple(
            [
                (name, value.encode() if isinstance(value, str) else b64decode(value["b64"], validate=True))
                for name, value in pairs
            ]
        )
    except (KeyError, ValueError, Base64Error) as error:
        raise DecodeError("malformed_header", f"not a header value: {error}") from error


def _load_slowly(text: str) -> list[tuple[str, str | dict[str, str]]]:
    """What only the lenient parser reads: names with lone surrogates, kept escaped for the wire."""
    try:
        pairs = msgspec.convert(json.loads(text), list[tuple[str, str | dict[str, str]]])
    except (ValueError, RecursionError) as error:
        raise DecodeError("malformed_header", f"not a JSON array of name and value: {error}") from error
    return [(name.encode(errors="backslashreplace").decode(), value) for name, value in pairs]
