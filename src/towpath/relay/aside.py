"""A second way to the broker, for shards that it failed or kept waiting: they hold up nobody else.

Like the first it publishes one window at a time, but beside the publishing loop. No shard is on both.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine
from typing import Final

from towpath.brokers.ports import PublishResult
from towpath.relay.away import Away
from towpath.relay.progress import Batch, boot_time
from towpath.relay.publish import Sender

PATIENCE_SECONDS: Final = 1.0
"""Shards whose window took longer stay on this way."""


class Aside:
    """The window on its way, and the connection for it, made when it is first needed."""

    def __init__(self, make_sender: Callable[[], Sender], away: Away) -> None:
        self.away = away
        self._make_sender = make_sender
        self._sender: Sender | None = None
        self._task: asyncio.Task[PublishResult | None] | None = None
        self._began_at = 0.0
        self.batch: Batch | None = None
        """What is being published; to be replaced by that part of it which may be."""

    @property
    def sender(self) -> Sender:
        """Of this way alone."""
        if self._sender is None:
            self._sender = self._make_sender()
        return self._sender

    @property
    def shards(self) -> Collection[int]:
        """What is being published belongs to them."""
        return () if self.batch is None else self.batch.parts.keys()

    @property
    def is_busy(self) -> bool:
        """Whether the last window was not taken yet."""
        return self._task is not None

    @property
    def is_over(self) -> bool:
        """Whether there is something to take."""
        return self._task is not None and self._task.done()

    def start(
        self,
        batch: Batch,
        offer: Coroutine[object, object, PublishResult | None],
        done: Callable[[object], None],
    ) -> None:
        """Publish in the background; `done` is called at its end."""
        self.batch, self._began_at = batch, boot_time()
        self._task = asyncio.create_task(offer)
        self._task.add_done_callback(done)

    def take(self) -> tuple[Batch, PublishResult, bool] | None:
        """What came of the window, once, and whether that took long; None where there is nothing."""
        if self._task is None or not self._task.done():
            return None
        result, batch = self._task.result(), self.batch
        self._task = self.batch = None
        if result is None or batch is None:
            return None
        return batch, result, boot_time() - self._began_at > PATIENCE_SECONDS

    async def ended(self) -> None:
        """Wait for the window: at most until its deadline."""
        if self._task is not None:
            await asyncio.wait((self._task,))

    async def aclose(self) -> None:
        """End what is on its way, close the connection."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._sender is not None:
            await self._sender.aclose()
