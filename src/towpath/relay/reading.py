"""The reading loop: database sessions, loading progress, polling at an adaptive pace."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping

from towpath.errors import SchemaMismatch, StoreUnavailable
from towpath.relay.away import Away
from towpath.relay.directory import Directory
from towpath.relay.hooks import RelayHooks
from towpath.relay.link import Link, link_errors
from towpath.relay.mover import Mover
from towpath.relay.options import RelayOptions
from towpath.relay.outbound import Outbound
from towpath.relay.pauses import Pauses
from towpath.relay.progress import Batch, Shards, boot_time
from towpath.relay.reader import MemoryStale, Reader, check_not_ahead
from towpath.relay.wakeup import Wakeup
from towpath.relay.window import Pace
from towpath.store.canary import is_canary
from towpath.store.journal import Journal
from towpath.store.outbox import OnPoison, OutboxReader, Server
from towpath.store.parking import Parking


class Reading:
    """Fills a queue with batches. One session is one connection: when it ends, all memory goes."""

    def __init__(
        self,
        link: Link,
        schema: str,
        journal: Journal,
        parking: Parking,
        shards: Shards,
        pauses: Pauses,
        directory: Directory,
        away: Away,
        wakeup: Wakeup,
        mover: Mover,
        options: RelayOptions,
        hooks: RelayHooks,
    ) -> None:
        self._link = link
        self._schema = schema
        self._journal = journal
        self._parking = parking
        self._shards = shards
        self._pauses = pauses
        self._directory = directory
        self._away = away
        self._wakeup = wakeup
        self._mover = mover
        self._options = options
        self._hooks = hooks
        self._store: OutboxReader | None = None
        self._reader: Reader | None = None
        self._failures = 0
        self._pace = Pace(options.poll_min, options.poll_max, options.poll_asleep, options.window_rows)
        self.batches: asyncio.Queue[Batch] = asyncio.Queue(1)
        self.ticked_at = boot_time()
        self.asking_since: float | None = None
        """When it asked the database what has no answer yet."""
        self.error: BaseException | None = None

    @property
    def policies(self) -> Mapping[str, OnPoison]:
        """What waits for a refused message, by destination."""
        return self._directory.policies

    @property
    def outbound(self) -> Outbound | None:
        """What makes messages in the present session."""
        return None if self._reader is None else self._reader.outbound

    @property
    def server(self) -> Server | None:
        """The server of the present session; None between sessions."""
        return None if self._reader is None else self._reader.server

    async def run(self) -> None:
        """Read until cancelled.

        Raises ConfigurationError when the schema is missing or its journal is not this database's.
        """
        while True:
            began_at = self.ticked_at = self.asking_since = boot_time()
            try:
                with link_errors():
                    wait = await self._step()
                self._failures = 0
                self.error = None
            except MemoryStale as stale:
                self.forget(str(stale))
                continue
            except StoreUnavailable as error:
                self.asking_since = None
                self._failures += 1
                wait = self._options.backoff.delay(self._failures).total_seconds()
                self._hooks.store_unavailable(error, wait)
                self.forget("the connection was lost")
                self.error = error
                await asyncio.sleep(wait)
                continue
            finally:
                self.asking_since = None
            if (left := began_at + wait - boot_time()) > 0:
                await self._wait(left)

    def give_up(self) -> None:
        """Wait no longer for an answer on this connection."""
        self._link.drop()

    def forget(self, reason: str) -> None:
        """End the session and drop all memory; the next step begins with the journal."""
        self._hooks.reloaded(reason)
        self._reader = None
        self._link.drop()
        self._shards.forget()

    async def _wait(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._shards.changed.wait()

    async def _step(self) -> float:
        """Read once and hand the batch on; returns the seconds to wait."""
        self._shards.changed.clear()
        was_notified = self._wakeup.take_heard()
        reader = await self._session()
        await self._load()
        now = boot_time()
        batch = None
        may_read = now >= self._away.until and not self._pauses.is_everything
        if may_read and (shards := self._shards.readable(now)):
            looks_too = self._pace.is_idle and self._mover.is_waiting
            batch = await reader.read(shards, now, looks_too=looks_too)
            if looks_too and reader.outlook is not None:
                self._mover.told(reader.outlook)
        if batch is None:
            self._wakeup.set_idle(False)
            return min(max(self._away.until - now, 0.0) or self._options.poll_max, self._options.poll_max)
        # A round of canaries is sent at once, and is no reason to expect more.
        row_count = 0 if all(map(is_canary, batch.rows)) else len(batch.rows)
        wait = self._pace.after(row_count, now, is_notified=self._wakeup.covers(now))
        self._wakeup.set_idle(self._pace.is_idle)
        is_for_others = was_notified and not batch.rows
        self._wakeup.rest(self._options.poll_max if is_for_others else self._options.poll_min)
        if batch.rows or self._moves(batch):
            self.asking_since = None
            await self.batches.put(batch)
        return 0.0 if reader.has_open_window else wait

    def _moves(self, batch: Batch) -> bool:
        """Whether a batch without rows says anything new."""
        for number, part in batch.parts.items():
            shard = self._shards.get(number)
            if shard is None or shard.done is None or shard.done.last_id is not None:
                return True
            if shard.done.upto != part.done.upto:
                return True
        return False

    async def _session(self) -> Reader:
        """The reader on the open connection; on a new one, everything begins anew."""
        reader = self._reader
        connection = await self._link.connection()
        if reader is None:
            self._shards.forget()
            store = self._store = OutboxReader(connection, self._schema)
            await store.prepare()
            server, _ = await store.server()
            outbound = Outbound(await store.installation(), self._directory.addresses)
            reader = self._reader = Reader(store, server, outbound, self._options)
        reader.outbound.readdress(self._directory.addresses)
        return reader

    async def _load(self) -> None:
        """Read where shards stand that were taken since, and what waits in them."""
        numbers = [shard.number for shard in self._shards if shard.done is None]
        if not numbers or self._store is None:
            return
        connection = await self._link.connection()
        progress = await self._journal.load(connection, numbers)
        missing = sorted(set(numbers) - set(progress))
        if missing:
            raise SchemaMismatch(f"the journal has no row for the shards {missing}: it was edited by hand")
        server, now = await self._store.server()
        check_not_ahead(list(progress.values()), now)
        gated = await self._parking.state(connection, numbers, server)
        if len(gated) < len(numbers):
            raise MemoryStale("the server was replaced while progress was loaded")
        self._shards.loaded(progress, gated)
