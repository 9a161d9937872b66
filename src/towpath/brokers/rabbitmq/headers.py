"""Our headers in an AMQP table and back.

A table has each name once and the client sorts it. So a header goes in as itself (text as a long
string, other bytes as a byte array) and, only where the table cannot hold what was given (a name
that repeats, one beyond 128 bytes, or one of the three below), the whole list goes in again, in order,
as an array `[name, value, name, value, …]` under `towpath-headers`, which then counts alone.

`towpath-key` holds the key, `towpath-null` tells a missing payload from an empty one.
"""

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

from towpath.brokers.ports import Headers

LIST: Final = "towpath-headers"
KEY: Final = "towpath-key"
NULL: Final = "towpath-null"
_TRANSPORT: Final = frozenset({LIST, KEY, NULL})
_NAME_LIMIT_BYTES: Final = 128
_ENTRY_OVERHEAD_BYTES: Final = 6
_PAIR_OVERHEAD_BYTES: Final = 10


def encode_headers(headers: Headers, *, key: str | None, is_null: bool) -> dict[str, Any]:
    """The table for a message."""
    table: dict[str, Any] = {}
    is_complete = True
    for name, value in headers:
        if name in table or name in _TRANSPORT or len(name.encode()) > _NAME_LIMIT_BYTES:
            is_complete = False
        else:
            table[name] = _field(value)
    if not is_complete:
        table[LIST] = [part for name, value in headers for part in (name, _field(value))]
    if key is not None:
        table[KEY] = key
    if is_null:
        table[NULL] = True
    return table


def encoded_size_bytes(headers: Headers, key: str | None) -> int:
    """At most what the table takes on the wire."""
    sizes = [len(name.encode()) for name, _ in headers]
    content = sum(sizes) + sum(len(value) for _, value in headers)
    names = {name for name, _ in headers}
    fits_table = len(names) == len(headers) and _TRANSPORT.isdisjoint(names)
    if not fits_table or max(sizes, default=0) > _NAME_LIMIT_BYTES:
        content = 2 * content + _PAIR_OVERHEAD_BYTES * len(headers)
    return content + _ENTRY_OVERHEAD_BYTES * len(headers) + len((key or "").encode()) + 64


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
        (name, _bytes(value)) for name, value in table.items() if name not in known and name not in _TRANSPORT
    ]
    return (
        tuple(pairs),
        None if key is None else _bytes(key).decode("utf-8", "backslashreplace"),
        NULL in table,
    )


def _field(value: bytes) -> str | bytearray:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return bytearray(value)


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
