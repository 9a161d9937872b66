"""Leases: renewed on their own connection, whatever publishing does; a fair share among live relays."""

from __future__ import annotations

import asyncio
from typing import Final
from uuid import UUID

from towpath.errors import SchemaMismatch, StoreUnavailable
from towpath.relay.directory import Directory
from towpath.relay.hooks import RelayHooks
from towpath.relay.link import Link, link_errors
from towpath.relay.options import RelayOptions
from towpath.relay.pauses import Pauses
from towpath.relay.progress import Shards, boot_time
from towpath.store.leases import Leases

_HUNGRY_SECONDS: Final = 1.0
"""Beat interval while fewer shards are held than the fair share."""


def fair_share(shard_count: int, living: int, place: int) -> int:
    """How many shards the relay at `place` among `living` should hold; shares add up to all."""
    each, rest = divmod(shard_count, max(living, 1))
    return each + (place < rest)


class Heartbeat:
    """Keeps one relay's leases and lets it take or give up shards."""

    def __init__(
        self,
        relay: UUID,
        host: str,
        link: Link,
        leases: Leases,
        shards: Shards,
        pauses: Pauses,
        directory: Directory,
        options: RelayOptions,
        hooks: RelayHooks,
    ) -> None:
        self._relay = relay
        self._host = host
        self._link = link
        self._leases = leases
        self._shards = shards
        self._pauses = pauses
        self._directory = directory
        self._options = options
        self._hooks = hooks
        self.beat_at = boot_time()
        """When the last beat succeeded, on the boot-time clock."""
        self.ticked_at = self.beat_at
        """When it last tried."""
        self.failed_at = float("-inf")
        """When one last failed."""
        self.error: BaseException | None = None
        self.outdated: SchemaMismatch | None = None

    async def run(self, stop: asyncio.Event) -> None:
        """Beat until cancelled. A database that is away is tried again every second.

        Where the schema is not one that this library works with, now or after a change, `stop` is set and
        `outdated` says why.
        """
        while True:
            wait = self._options.renew_every
            self.ticked_at = boot_time()
            try:
                is_satisfied = await self.beat()
                self.error = None
                if not is_satisfied:
                    wait = min(wait, _HUNGRY_SECONDS)
            except StoreUnavailable as error:
                self._link.drop()
                wait = min(wait, _HUNGRY_SECONDS)
                self.failed_at = boot_time()
                if self.error is None:
                    self._hooks.store_unavailable(error, wait)
                self.error = error
            except SchemaMismatch as error:
                self.outdated = self.error = error
                stop.set()
            await asyncio.sleep(wait)

    async def beat(self) -> bool:
        """Renew, then move towards the fair share; returns whether it is held."""
        options, shards = self._options, self._shards
        with link_errors():
            connection = await self._link.connection()
            await self._leases.ensure_installed(connection)
            # Whoever is late by then is not counted: others look every second when the leases end.
            patience = options.lease - options.renew_every
            beat = await self._leases.beat(
                connection, self._relay, self._host, patience, options.broker_number
            )
            self._pauses.told(beat.paused)  # before there is a shard that anything could be published of
            self._directory.told(beat.destinations)
            sent_at = boot_time()
            journaled = {shard.number: shard.journal_seq for shard in shards if shard.journal_seq}
            renewed = await self._leases.renew(connection, self._relay, options.lease, journaled)
            orphans = self._take_in(renewed, sent_at + options.lease)
            if orphans:  # a release that did not get through
                await self._leases.release(connection, self._relay, orphans)
            wanted = fair_share(len(options.shards), beat.living, beat.place)
            owned = sorted(shards, key=lambda shard: shard.number)
            for position, shard in enumerate(owned):
                shards.leave(shard, is_leaving=position >= wanted)
            if len(owned) < wanted:
                sent_at = boot_time()
                taken = await self._leases.take(
                    connection,
                    self._relay,
                    lease_seconds=options.lease,
                    margin_seconds=options.margin,
                    count=wanted - len(owned),
                    shards=options.shards,
                )
                for number, epoch in taken.items():
                    shards.acquire(number, epoch, sent_at + options.lease)
                if taken:
                    self._hooks.lease_acquired(taken, len(shards))
        shards.own_writes += 2
        self.beat_at = boot_time()
        return len(shards) >= wanted

    def _take_in(self, renewed: dict[int, int], lease_until: float) -> dict[int, int]:
        """Prolong what was renewed and drop the rest; returns what was renewed and is not wanted."""
        lost = []
        for shard in self._shards:
            if renewed.get(shard.number) == shard.epoch:
                shard.lease_until = lease_until
            else:
                self._shards.remove(shard.number)
                lost.append(shard.number)
        if lost:
            self._hooks.lease_lost(lost, len(self._shards))
        return {number: epoch for number, epoch in renewed.items() if self._shards.get(number) is None}

    async def leave(self) -> None:
        """Release every shard and stop counting among the living. Raises StoreUnavailable."""
        for shard in self._shards:
            self._shards.remove(shard.number)
        with link_errors():
            connection = await self._link.connection()
            await self._leases.leave(connection, self._relay)

    def close(self) -> None:
        """Close the connection."""
        self._link.drop()
