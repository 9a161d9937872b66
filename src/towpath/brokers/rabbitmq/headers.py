"""Our headers in an AMQP table and back.

A table has each name once and the client sorts it. So a header goes in as itself (text as a long
string, other bytes as a byte array) and, only where the table cannot hold what was given (a name
that repeats, one beyond 128 bytes, or one of the three below), the whole list goes in again, in order,
as an array `[name, value, name, value, …]` under `towpath-headers`, which then counts alone.

`towpath-key` holds the key, `towpath-null` tells a missing payload from an empty one. What the broker
counts per delivery is no header of the message: a redelivery would look like another one.
"""

import json
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
