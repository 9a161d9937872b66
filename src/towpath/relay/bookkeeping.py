"""When progress is written down: beside publishing, for the windows of a short time together.

A row costs about as much for one message as for a thousand, and where windows are small there would be
hundreds a second. A window that would make more than one full window published and not written down
does not wait: while it is published, what was before it is written.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Final

from towpath.errors import StoreUnavailable
from towpath.relay.hooks import RelayHooks
from towpath.relay.journaling import JournalWriter
from towpath.relay.options import RelayOptions
from towpath.relay.progress import boot_time
from towpath.relay.reader import MemoryStale
from towpath.relay.reading import Reading

_APART_SECONDS: Final = 0.05
"""From one row to the next, unless many messages wait for it."""


class Bookkeeping:
    """Writes the progress of one relay down in a task beside its publishing."""

    def __init__(
        self,
        reading: Reading,
        journal: JournalWriter,
        options: RelayOptions,
        hooks: RelayHooks,
        tick: Callable[[], None],
    ) -> None:
        self._reading = reading
        self._journal = journal
        self._options = options
        self._hooks = hooks
        self._tick = tick
        self._task: asyncio.Task[None] | None = None
        self._is_urgent = asyncio.Event()
        self._message_count = 0
        self._wrote_at = 0.0

    def expect(self, message_count: int) -> None:
        """So many messages are about to be published."""
        if self._message_count + message_count > self._options.window_rows:
            self._is_urgent.set()

    async def published(self, message_count: int) -> None:
        """So many messages were, maybe none: see to it that this is written down."""
        self._message_count += message_count
        is_waiting = self._task is not None and not self._task.done() and not self._is_urgent.is_set()
        if not is_waiting and self._journal.due(self._options.journal_every):
            await self.written()
            self._is_urgent.clear()
            self._task = asyncio.create_task(self._write_soon())

    async def written(self) -> None:
        """Wait until what was begun is written, for nothing else may run on the journal's connection."""
        self._is_urgent.set()
        task, self._task = self._task, None
        if task is not None:
            await task

    async def write(self) -> None:
        """Write everything down, however long the database is away."""
        await self.written()
        await self._flush()

    async def aclose(self) -> None:
        """End what runs in the background."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _write_soon(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._wrote_at + _APART_SECONDS - boot_time()):
                await self._is_urgent.wait()
        self._is_urgent.set()
        self._message_count, self._wrote_at = 0, boot_time()
        await self._flush()

    async def _flush(self) -> None:
        failures = 0
        while (server := self._reading.server) is not None:
            try:
                await self._journal.flush(server, unchanged_for=self._options.journal_every)
            except MemoryStale as stale:
                self._reading.forget(str(stale))
            except StoreUnavailable as error:
                self._journal.drop_connection()
                failures += 1
                wait = self._options.backoff.delay(failures).total_seconds()
                self._hooks.store_unavailable(error, wait)
                self._tick()
                await asyncio.sleep(wait)
            else:
                return
