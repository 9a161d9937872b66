"""Tells metrics what the database knows of the relay's broker, whatever the relay itself believes.

Every relay does it, so that the figures are there as long as one lives: aggregate with `max`, not `sum`.
"""

from __future__ import annotations

import asyncio
import random
from typing import Final

from towpath.errors import StoreUnavailable
from towpath.relay.hooks import RelayHooks
from towpath.relay.link import Link, link_errors
from towpath.relay.options import RelayOptions
from towpath.relay.progress import Shards, boot_time
from towpath.store.backlog import BacklogStore

_EVERY_SECONDS: Final = 15.0


class CensusLoop:
    """Looks every 15 seconds, on a connection of its own: a statement that waits holds up nothing else."""

    def __init__(
        self, link: Link, store: BacklogStore, shards: Shards, options: RelayOptions, hooks: RelayHooks
    ) -> None:
        self._link = link
        self._store = store
        self._shards = shards
        self._numbers = options.shards
        self._hooks = hooks
        self._oldest_xid = 0
        self._seen_at = boot_time()

    async def run(self) -> None:
        """Count until cancelled. A database that is away is reported by the other loops."""
        while True:
            self._hooks.journal_lag(self._shards.journal_lag(boot_time()))
            try:
                with link_errors():
                    await self.look()
            except StoreUnavailable:
                self._link.drop()
            await asyncio.sleep(_EVERY_SECONDS * random.uniform(0.75, 1.25))

    async def look(self) -> None:
        """Once. Raises StoreUnavailable and the driver's errors."""
        backlog = await self._store.take(await self._link.connection(), self._numbers)
        now = boot_time()
        if backlog.oldest_xid != self._oldest_xid or not backlog.has_open_transaction:
            self._oldest_xid, self._seen_at = backlog.oldest_xid, now
        self._hooks.backlog(backlog, max(now - self._seen_at, backlog.horizon_seconds))

    def close(self) -> None:
        """Close the connection."""
        self._link.drop()
