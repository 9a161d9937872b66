"""Our headers in an AMQP table and back.

A table has each name once. So a header goes in as itself (text as a long string, other bytes as a byte
array) and, only where the table cannot hold what was given (a name that repeats, one beyond 128
bytes, or one of the three below), the whole list goes in again, in order, as an array
`[name, value, name, value, …]` under `towpath-headers`, which then counts alone.

`towpath-key` holds the key, `towpath-null` tells a missing payload from an empty one. What the broker
counts per delivery is no header of the message: a redelivery would look like another one.

Source: https://www.rabbitmq.com/amqp-0-9-1-errata#section_3 for the types in a table.
"""

import json
import struct
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

from towpath.brokers.ports import BrokerDeath, Headers

LIST: Final = "towpath-headers"
KEY: Final = "towpath-key"
NULL: Final = "towpath-null"
_TRANSPORT: Final = frozenset({LIST, KEY, NULL})
_COUNTERS: Final = frozenset({"x-delivery-count", "x-acquired-count"})
_DEATHS: Final = "x-death"
_DEATH_PREFIXES: Final = ("x-first-death-", "x-last-death-")
_DEATH_REASONS: Final = frozenset({"delivery_limit", "expired", "maxlen", "rejected"})
_NAME_LIMIT_BYTES: Final = 128
_REMEMBERED_NAMES: Final = 1000
_REMEMBERED_VALUE_BYTES: Final = 256

_LENGTH: Final = struct.Struct(">I").pack
_TEXT: Final = b"S"
_BYTES: Final = b"x"
_KEY_FIELD: Final = bytes([len(KEY)]) + KEY.encode() + _TEXT
_NULL_FIELD: Final = bytes([len(NULL)]) + NULL.encode() + b"t\x01"
_LIST_FIELD: Final = bytes([len(LIST)]) + LIST.encode() + b"A"


class TableEncoder:
    """Writes tables as bytes. A header with the value it had in the message before is not encoded again."""

    def __init__(self) -> None:
        self._fields: dict[str, tuple[bytes, bytes]] = {}
        """The last value of a name, and the two as a field; no bytes for a name that is no field's."""

    def encode(self, headers: Headers, *, key: str | None, is_null: bool) -> bytes:
        """The table of a message, its length in front. Raises ValueError for text that cannot be encoded."""
        fields = self._fields
        parts: list[bytes] = []
        is_complete = len({name for name, _ in headers}) == len(headers)
        for name, value in headers:
            field = fields.get(name)
            if field is None or field[0] != value:
                field = self._add(name, value)
            if not field[1]:
                is_complete = False
            parts.append(field[1])
        if not is_complete:
            firsts = {name: index for index, (name, _) in reversed(list(enumerate(headers)))}
            parts = [parts[index] for index in sorted(firsts.values())]
            listed = b"".join(_value(name.encode()) + _value(value) for name, value in headers)
            parts += (_LIST_FIELD, _LENGTH(len(listed)), listed)
        if key is not None:
            encoded = key.encode()
            parts += (_KEY_FIELD, _LENGTH(len(encoded)), encoded)
        if is_null:
            parts.append(_NULL_FIELD)
        table = b"".join(parts)
        return _LENGTH(len(table)) + table

    def _add(self, name: str, value: bytes) -> tuple[bytes, bytes]:
        encoded = name.encode()
        is_field = name not in _TRANSPORT and len(encoded) <= _NAME_LIMIT_BYTES
        field = (value, bytes([len(encoded)]) + encoded + _value(value) if is_field else b"")
        if len(value) <= _REMEMBERED_VALUE_BYTES:
            if len(self._fields) >= _REMEMBERED_NAMES:  # names from unbounded input must not fill the memory
                self._fields.clear()
            self._fields[name] = field
        return field


def decode_headers(table: Mapping[str, Any] | None) -> tuple[Headers, str | None, bool]:
    """Headers, key, and whether the payload is missing. Values other clients set become bytes."""
    if not table:
        return (), None, False
    key = table.get(KEY)
    listed = table.get(LIST)
    pairs: list[tuple[str, bytes]] = []
    if isinstance(listed, list):
        names = [part if isinstance(part, str) else str(part) for part in listed[::2]]
        pairs = [(name, _bytes(value)) for name, value in zip(names, listed[1::2], strict=False)]
    known = {name for name, _ in pairs}
    pairs += [
        (name, _bytes(value))
        for name, value in table.items()
        if name not in known and name not in _TRANSPORT and name not in _COUNTERS
    ]
    return (
        tuple(pairs),
        None if key is None else _bytes(key).decode("utf-8", "backslashreplace"),
        NULL in table,
    )


def decode_death(table: Mapping[str, Any] | None) -> BrokerDeath:
    """The last of the deaths the broker noted; a stranger may have written anything there."""
    deaths = (table or {}).get(_DEATHS)
    last = deaths[0] if isinstance(deaths, list) and deaths and isinstance(deaths[0], dict) else {}
    reason, queue, count = last.get("reason"), last.get("queue"), last.get("count")
    return BrokerDeath(
        reason if isinstance(reason, str) and reason in _DEATH_REASONS else "unknown",
        queue.replace("\0", "") if isinstance(queue, str) else None,
        count if isinstance(count, int) else 1,
    )


def without_death(headers: Headers) -> Headers:
    """The message's own headers, without those that tell of its death."""
    return tuple(
        (name, value) for name, value in headers if name != _DEATHS and not name.startswith(_DEATH_PREFIXES)
    )


def _value(value: bytes) -> bytes:
    kind = _TEXT if value.isascii() or _is_utf8(value) else _BYTES
    return kind + _LENGTH(len(value)) + value


def _is_utf8(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


def _bytes(value: object) -> bytes:
    match value:
        case bytes() | bytearray() | memoryview():
            return bytes(value)
        case str():
            return value.encode("utf-8", "surrogateescape")
        case None:
            return b""
        case bool():
            return b"true" if value else b"false"
        case datetime():
            return value.isoformat().encode()
        case list() | dict():
            return json.dumps(value, default=_json).encode()
        case _:
            return str(value).encode()


def _json(value: object) -> object:
    return _bytes(value).decode("utf-8", "backslashreplace")
