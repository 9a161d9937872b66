"""The progress journal: append-only rows that say which windows are published."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import asyncpg

from towpath.errors import ConfigurationError
from towpath.store.outbox import Server
from towpath.store.snapshot import Snapshot
from towpath.store.statements import DEFAULT_SCHEMA, load


@dataclass(frozen=True, slots=True)
class Progress:
    """How far one shard is: the window (`base`, `upto`] is done up to `last_id`, wholly if that is None."""

    base: Snapshot
    upto: Snapshot
    last_id: int | None = None


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """Progress of several shards in one window; one row."""

    base: Snapshot
    upto: Snapshot
    epochs: Mapping[int, int]
    """The epoch each shard's lease is held under."""
    last_ids: Mapping[int, int | None]


@dataclass(frozen=True, slots=True)
class Appended:
    """What came of an append. `seq` is None when nothing was written."""

    seq: int | None
    held: frozenset[int]
    """The shards whose lease is still held; all of them and no `seq`: the server was replaced."""


class Journal:
    """The journal statements of one schema. Each method takes the connection to run on."""

    def __init__(self, schema: str = DEFAULT_SCHEMA) -> None:
        self._sql = load("relay", schema)

    async def load(self, connection: asyncpg.Connection[Any], shards: Sequence[int]) -> dict[int, Progress]:
        """Where each shard stands.

        Raises ConfigurationError when the rows were written under another cluster's transaction
        ids: this database was restored or copied, and going on could skip rows.
        """
        rows = await connection.fetch(self._sql["load_progress"], shards)
        if not all(row["is_ours"] for row in rows):
            raise ConfigurationError(
                "the relay's journal was written by another database cluster: this database was restored or "
                "copied logically, and going on could skip messages; no relay may run here before a starting "
                "point is set: towpath outbox rebase --to journal --dry-run"
            )
        return {
            row["shard"]: Progress(
                Snapshot(row["snapshot_from"]), Snapshot(row["snapshot_to"]), row["last_id"]
            )
            for row in rows
        }

    async def append(
        self, connection: asyncpg.Connection[Any], relay: UUID, entry: JournalEntry, server: Server
    ) -> Appended:
        """Write one row if every lease is held and the server is still the one read from.

        Atomic with whatever transaction is open on the connection; then the leases cannot be taken
        over before its end.
        """
        shards = sorted(entry.epochs)
        row = await connection.fetchrow(
            self._sql["append_progress"],
            relay,
            shards,
            [entry.epochs[shard] for shard in shards],
            [entry.last_ids[shard] for shard in shards],
            entry.base.text,
            entry.upto.text,
            server.started_at,
            server.timeline,
        )
        if row is None:
            raise RuntimeError("the journal statement returned no row")
        return Appended(row["seq"], frozenset(row["held"]))

    async def trim(self, connection: asyncpg.Connection[Any], seqs: Sequence[int]) -> None:
        """Delete rows that newer ones of the same writer supersede."""
        await connection.execute(self._sql["trim_journal"], seqs)

    async def sweep(self, connection: asyncpg.Connection[Any], upto_seq: int) -> None:
        """Delete the superseded rows of relays that are gone. Reads the whole journal."""
        await connection.execute(self._sql["sweep_journal"], upto_seq)
