"""Writing progress down: one journal row per settled window, fenced by the leases; trimming."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final
from uuid import UUID

import asyncpg

from towpath.crashpoints import CrashPoint, crash_point
from towpath.relay.hooks import RelayHooks
from towpath.relay.link import Link, link_errors
from towpath.relay.progress import Shard, Shards, boot_time
from towpath.relay.reader import MemoryStale
from towpath.store.journal import Appended, Journal, JournalEntry, Progress
from towpath.store.leases import Leases
from towpath.store.outbox import Server

_TRIM_AT: Final = 500


class Superseded:
    """Which of this relay's journal rows nothing refers to any more."""

    def __init__(self) -> None:
        self._newest: dict[int, int] = {}
        self._references: dict[int, int] = {}
        self.seqs: list[int] = []
        self.newest: int | None = None

    def written(self, seq: int, shards: Iterable[int]) -> None:
        """A row was written: it is now the newest of these shards."""
        numbers = list(shards)
        self._references[seq] = len(numbers)
        self.newest = seq
        for number in numbers:
            old = self._newest.get(number)
            self._newest[number] = seq
            if old is None:
                continue
            self._references[old] -= 1
            if not self._references[old]:
                del self._references[old]
                self.seqs.append(old)

    def lost(self, shard: int) -> None:
        """Another relay goes on with the shard; its last row stays until somebody sweeps."""
        self._newest.pop(shard, None)


class JournalWriter:
    """The journal of one relay, on a connection of its own."""

    def __init__(
        self,
        relay: UUID,
        link: Link,
        journal: Journal,
        leases: Leases,
        shards: Shards,
        hooks: RelayHooks,
    ) -> None:
        self._relay = relay
        self._link = link
        self._journal = journal
        self._leases = leases
        self._shards = shards
        self._hooks = hooks
        self._superseded = Superseded()
        self._is_swept = False

    def due(self, unchanged_for: float | None = None) -> list[Shard]:
        """Shards to be written down: see `flush`."""
        now = boot_time()
        return [
            shard
            for shard in self._shards
            if shard.dirty_since is not None
            or (
                unchanged_for is not None
                and now - shard.journaled_at >= unchanged_for
                and self._shards.is_moved_by_others(shard)
            )
        ]

    async def flush(self, server: Server, *, unchanged_for: float | None = None) -> None:
        """Write down the progress of every shard that sent something since its last row.

        With `unchanged_for` also of those whose snapshot moved and whose row is that many seconds
        old. Shards whose lease is gone are dropped. Raises StoreUnavailable (progress stays to be
        written) and MemoryStale when this is not the server that was read from.
        """
        due = self.due(unchanged_for)
        while due:
            for group in _by_window(due):
                await self._append(group, server)
            due = [shard for shard in due if shard in self._shards and shard.dirty_since is not None]
        if len(self._superseded.seqs) >= _TRIM_AT:
            await self.trim()
        if not self._is_swept and self._superseded.newest is not None:
            with link_errors():
                await self._journal.sweep(await self._link.connection(), self._superseded.newest)
            self._is_swept = True

    async def _append(self, group: Sequence[Shard], server: Server) -> None:
        done = {
            shard.number: shard.done for shard in group if shard.done is not None and shard in self._shards
        }
        if not done:
            return
        entry = entry_of(done, {shard.number: shard.epoch for shard in group})
        with link_errors():
            appended = await self.append(await self._link.connection(), entry, server)
        self.appended(group, done, appended)

    async def append(
        self, connection: asyncpg.Connection[Any], entry: JournalEntry, server: Server
    ) -> Appended:
        """One fenced row; inside a transaction it holds off a takeover until its end."""
        self._shards.own_writes += 1
        return await self._journal.append(connection, self._relay, entry, server)

    def appended(self, group: Sequence[Shard], done: dict[int, Progress], appended: Appended) -> None:
        """Take in what came of an append. Raises MemoryStale when the server is another one."""
        now = boot_time()
        if appended.seq is None:
            lost = [shard for shard in group if shard.number not in appended.held]
            if not lost:
                raise MemoryStale("the journal is on another server than the one read from")
            self.drop(lost)
            return
        for shard in group:
            progress = done.get(shard.number)
            if progress is None or shard not in self._shards:
                continue
            shard.journaled, shard.journaled_at = progress, now
            shard.journal_seq = appended.seq
            shard.writes_then = self._shards.own_writes - 1
            if shard.dirty_since is not None:
                shard.dirty_since = None if shard.done is progress else now
        self._superseded.written(appended.seq, done)
        is_partial = any(progress.last_id is not None for progress in done.values())
        crash_point(CrashPoint.JOURNALED_PARTIAL if is_partial else CrashPoint.JOURNALED)

    @asynccontextmanager
    async def fenced(
        self, shard: Shard, done: Progress, server: Server
    ) -> AsyncIterator[asyncpg.Connection[Any] | None]:
        """One transaction that writes the shard's progress and whatever else is done on the connection.

        None: the lease is gone and the shard is dropped. Raises StoreUnavailable, then nothing was
        written, and MemoryStale as `appended` does.
        """
        entry = entry_of({shard.number: done}, {shard.number: shard.epoch})
        with link_errors():
            connection = await self._link.connection()
            transaction = connection.transaction()
            await transaction.start()
            try:
                appended = await self.append(connection, entry, server)
                yield None if appended.seq is None else connection
                await transaction.commit()
            except BaseException:
                self.drop_connection()  # rolls back, whatever state the connection is in
                raise
        self.appended([shard], {shard.number: done}, appended)

    def drop(self, lost: Sequence[Shard]) -> None:
        """The leases of these shards are gone."""
        for shard in lost:
            if shard in self._shards:
                self._shards.remove(shard.number)
            self._superseded.lost(shard.number)
        self._hooks.lease_lost((shard.number for shard in lost), len(self._shards))

    async def release(self, epochs: dict[int, int]) -> None:
        """Give up shards of which nothing is in flight. Raises StoreUnavailable: the next beat does it."""
        for number in epochs:
            self._shards.remove(number)
            self._superseded.lost(number)
        crash_point(CrashPoint.JOURNALED_BEFORE_RELEASE)
        with link_errors():
            await self._leases.release(await self._link.connection(), self._relay, epochs)

    async def trim(self) -> None:
        """Delete this relay's superseded rows. Raises StoreUnavailable; trying again is harmless."""
        seqs = self._superseded.seqs
        if seqs:
            with link_errors():
                await self._journal.trim(await self._link.connection(), seqs)
            self._superseded.seqs = []

    async def connection(self) -> asyncpg.Connection[Any]:
        """The journal's connection, for what is read beside an append."""
        return await self._link.connection()

    def drop_connection(self) -> None:
        """It may be broken."""
        self._link.drop()


def entry_of(done: dict[int, Progress], epochs: dict[int, int]) -> JournalEntry:
    """One row for shards in the same window."""
    window = next(iter(done.values()))
    return JournalEntry(
        window.base,
        window.upto,
        {number: epochs[number] for number in done},
        {number: progress.last_id for number, progress in done.items()},
    )


def _by_window(shards: Iterable[Shard]) -> list[list[Shard]]:
    groups: dict[tuple[str, str], list[Shard]] = {}
    for shard in shards:
        if shard.done is not None:
            groups.setdefault((shard.done.base.text, shard.done.upto.text), []).append(shard)
    return list(groups.values())
