"""Reading the outbox: the window poll, key lists of large windows, and their rows.

Every method runs one statement in autocommit on the connection given, which must be a read-only
connection of the relay's own to a primary, with the planner pinned.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

import asyncpg

from towpath.errors import SchemaMismatch, StoreUnavailable
from towpath.store.scheduled import Outlook, outlook_of
from towpath.store.snapshot import Snapshot
from towpath.store.statements import DEFAULT_SCHEMA, load

Row: TypeAlias = Sequence[Any]
"""One row by position: id, shard, message_id, kind, destination, type, key, content_type, headers,
payload, created_at, key_hash, and one more that only this module reads."""

ID: Final = 0
SHARD: Final = 1
MESSAGE_ID: Final = 2
KIND: Final = 3
DESTINATION: Final = 4
TYPE: Final = 5
KEY: Final = 6
CONTENT_TYPE: Final = 7
HEADERS: Final = 8
PAYLOAD: Final = 9
CREATED_AT: Final = 10
"""Microseconds since 2000-01-01 UTC, as Postgres keeps it: a datetime per row is dear."""

OnPoison: TypeAlias = Literal["park", "park_key", "block"]
"""What waits when a message cannot be published: nothing, later messages of its key, its whole shard."""

_NO_OUTLOOK: Final = "null::text as headers"
"""In the poll's own row, where there is room for what `look` sees."""
_KEY: Final = struct.Struct("!QQ")


@dataclass(frozen=True, slots=True)
class Server:
    """What a snapshot in memory is worth only together with."""

    started_at: str
    timeline: str
    backend: str
    """Changes behind a pooler that hides reconnects."""


@dataclass(frozen=True, slots=True)
class Poll:
    """What one poll saw."""

    upto: Snapshot
    """The end of the window read."""
    now: Snapshot
    """The statement's own snapshot."""
    server: Server
    rows: Sequence[Row]
    """In id order; of use only when not `is_truncated`."""
    is_truncated: bool
    """The window is larger than the row or byte limit: list its keys instead."""
    outlook: Outlook | None
    """When there is a delayed event to move, where that was asked for."""


@dataclass(frozen=True, slots=True)
class Destinations:
    """What is said about destinations; one that is missing is its own address, its policy `park`."""

    addresses: Mapping[str, str]
    policies: Mapping[str, OnPoison]


@dataclass(slots=True)
class KeyRanges:
    """Listed keys as the fetch statement takes them: per shard and transaction one range of ids."""

    shards: list[int] = field(default_factory=list)
    xids: list[int] = field(default_factory=list)
    first_ids: list[int] = field(default_factory=list)
    last_ids: list[int] = field(default_factory=list)
    count: int = 0

    def add(self, shard: int, keys: Iterator[tuple[int, int]]) -> int:
        """Put in keys of one shard, which come in id order; returns the last id, 0 for none."""
        places: dict[int, int] = {}
        id_ = 0
        for xid, id_ in keys:
            self.count += 1
            place = places.get(xid)
            if place is None:
                places[xid] = len(self.xids)
                self.shards.append(shard)
                self.xids.append(xid)
                self.first_ids.append(id_)
                self.last_ids.append(id_)
            else:
                self.last_ids[place] = id_
        return id_


class KeyList:
    """Keys of one shard in id order, 16 bytes each, consumed from the front."""

    __slots__ = ("_packed", "_position")

    def __init__(self, packed: bytes) -> None:
        self._packed = memoryview(packed)
        self._position = 0

    def __len__(self) -> int:
        return (len(self._packed) - self._position) // _KEY.size

    def first(self, count: int) -> Iterator[tuple[int, int]]:
        """The next (xid, id) pairs, at most `count`, without consuming them."""
        end = min(self._position + count * _KEY.size, len(self._packed))
        return _KEY.iter_unpack(self._packed[self._position : end])

    def consume_up_to(self, last_id: int) -> None:
        """Drop every key with an id of at most `last_id`."""
        position, packed = self._position, self._packed
        while position < len(packed) and _KEY.unpack_from(packed, position)[1] <= last_id:
            position += _KEY.size
        self._position = position


class OutboxReader:
    """The read statements of one schema on one connection."""

    def __init__(self, connection: asyncpg.Connection[Any], schema: str = DEFAULT_SCHEMA) -> None:
        self._connection = connection
        self._sql = load("relay", schema)
        self._poll = {False: self._sql["poll"], True: poll_and_look(schema)}

    async def prepare(self) -> None:
        """Set up the connection: timestamps come as integers."""
        await self._connection.set_type_codec(
            "timestamptz", schema="pg_catalog", format="tuple", encoder=_as_tuple, decoder=_from_tuple
        )

    async def server(self) -> tuple[Server, Snapshot]:
        """Which server this is, and its present snapshot. Raises StoreUnavailable on a standby."""
        row = await self._connection.fetchrow(self._sql["server"])
        if row is None or row["timeline"] is None:
            raise _standby()
        return Server(row["started_at"], row["timeline"], row["backend"]), Snapshot(row["snapshot"])

    async def poll(
        self,
        shards: Sequence[int],
        base: Snapshot,
        upto: Snapshot | None,
        *,
        row_limit: int,
        byte_limit: int,
        looks_too: bool = False,
    ) -> Poll:
        """The rows of `shards` visible in the window's end and not in `base`.

        The end is `upto`, an earlier snapshot of the same server, or this statement's own snapshot.
        With `looks_too` the same statement looks for delayed events. Raises StoreUnavailable on a standby,
        and what `outlook_of` does.
        """
        xmax, in_progress = base.bounds
        first, *rows = await self._connection.fetch(
            self._poll[looks_too],
            xmax,
            shards,
            in_progress,
            upto.text if upto else None,
            row_limit + 1,
            byte_limit,
        )
        if first["key"] is None:
            raise _standby()
        return Poll(
            Snapshot(first["destination"]),
            Snapshot(first["kind"]),
            Server(first["type"], first["key"], first["content_type"]),
            rows,
            len(rows) > row_limit or not all(row["fits"] for row in rows),
            outlook_of(json.loads(first["headers"] or "null")) if looks_too else None,
        )

    async def list_keys(
        self, after_ids: Mapping[int, int], base: Snapshot, upto: Snapshot, *, limit: int
    ) -> dict[int, KeyList]:
        """Keys of shards in a window, for each shard after an id and at most `limit`."""
        xmax, in_progress = base.bounds
        rows = await self._connection.fetch(
            self._sql["list_keys"],
            list(after_ids),
            xmax,
            in_progress,
            upto.text,
            list(after_ids.values()),
            limit,
        )
        return {row["shard"]: KeyList(row["keys"]) for row in rows}

    async def fetch(self, keys: KeyRanges, *, byte_limit: int) -> Sequence[Row]:
        """Rows of listed keys in id order: a prefix that keeps to the byte limit, at least one row."""
        rows: Sequence[Row] = await self._connection.fetch(
            self._sql["fetch_keys"],
            keys.shards,
            f"{{{','.join(map(str, keys.xids))}}}",
            keys.first_ids,
            keys.last_ids,
            byte_limit,
        )
        return rows

    async def installation(self) -> str:
        """The id of this installation, fixed when the schema was made."""
        value: str | None = await self._connection.fetchval(self._sql["installation"])
        if value is None:
            raise SchemaMismatch("towpath.meta has no installation_id: run towpath db upgrade")
        return value


def poll_and_look(schema: str = DEFAULT_SCHEMA) -> str:
    """The poll of a relay with nothing to do, which spares the mover of delayed events a statement."""
    poll, look = load("relay", schema)["poll"], load("scheduled", schema)["look"]
    return poll.replace(_NO_OUTLOOK, f"(select row_to_json(l)::text from (\n{look}\n) l) as headers")


def _standby() -> StoreUnavailable:
    return StoreUnavailable("the database is a standby: the relay needs the primary")


def _as_tuple(microseconds: int) -> tuple[int]:
    return (microseconds,)


def _from_tuple(given: tuple[int]) -> int:
    return given[0]
