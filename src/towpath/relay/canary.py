"""Canaries: proof of delivery for every shard that does not rest on what reading is built on.

A window's snapshot says what was published; a mistake there would also hide it from everything that is
computed from it. A canary is confirmed by its message id, once the broker has acknowledged just that.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Iterable
from typing import Final
from uuid import UUID

from towpath.errors import StoreUnavailable
from towpath.relay.hooks import RelayHooks
from towpath.relay.link import Link, link_errors
from towpath.relay.options import RelayOptions
from towpath.relay.pauses import Pauses
from towpath.relay.progress import Batch, Shards
from towpath.store.canary import CanaryStore, is_canary
from towpath.store.outbox import MESSAGE_ID

_GIVEN_UP_AFTER: Final = 10
"""Intervals after which another one is written."""


class Canaries:
    """Writes one per owned shard and interval, notes which came, measures what was not proved."""

    def __init__(
        self,
        link: Link,
        store: CanaryStore,
        shards: Shards,
        pauses: Pauses,
        options: RelayOptions,
        hooks: RelayHooks,
    ) -> None:
        self._link = link
        self._store = store
        self._shards = shards
        self._pauses = pauses
        self._options = options
        self._hooks = hooks
        self._every = options.canary_every
        self._confirmed: list[UUID] = []
        self._has_confirmed = asyncio.Event()

    def published(self, batch: Batch, acknowledged: Iterable[int]) -> None:
        """Take in what the broker has acknowledged."""
        rows = batch.rows
        came = [rows[index][MESSAGE_ID] for index in acknowledged if is_canary(rows[index])]
        if came and self._every:
            self._confirmed += came
            self._has_confirmed.set()

    async def run(self) -> None:
        """Until cancelled; ends at once where canaries are switched off."""
        if not self._every:
            return
        loop = asyncio.get_running_loop()
        next_at = loop.time() + self._every * random.uniform(0.2, 1.0)
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(next_at):
                    await self._has_confirmed.wait()
            self._has_confirmed.clear()
            try:
                with link_errors():
                    await self._confirm()
                    if loop.time() >= next_at:
                        next_at = loop.time() + self._every
                        await self.write()
            except StoreUnavailable:  # other loops report it
                self._link.drop()
                await asyncio.sleep(self._options.renew_every)
                if self._confirmed:
                    self._has_confirmed.set()

    async def write(self) -> None:
        """One round. Raises StoreUnavailable and the driver's errors."""
        connection = await self._link.connection()
        numbers = [shard.number for shard in self._shards]
        if numbers and not self._pauses.is_everything:
            missing = await self._store.write(
                connection,
                numbers,
                every_seconds=self._every / 2,
                give_up_seconds=self._every * _GIVEN_UP_AFTER,
            )
            self._shards.own_writes += 1
            for shard, message_id in missing.items():
                self._hooks.canary_missing(shard, message_id)
        age = await self._store.age(connection, self._options.shards)
        if age is not None:
            self._hooks.canary(age)

    async def _confirm(self) -> None:
        came = self._confirmed[:]
        if came:
            await self._store.confirm(await self._link.connection(), came)
            self._shards.own_writes += 1
            del self._confirmed[: len(came)]

    def close(self) -> None:
        """Close the connection."""
        self._link.drop()
