"""Clearing the ring: slots whose rows are sent and old are truncated, at no one's expense.

Every relay looks at the ring; the one that owns its broker's first shard clears it. Ownership spares
work only: a slot is checked under its lock by the database, so several may try at once.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from typing import Any, Final

import asyncpg

from towpath.crashpoints import CrashPoint, crash_point
from towpath.errors import ConfigurationError, StoreUnavailable
from towpath.relay.hooks import RelayHooks
from towpath.relay.link import Link, link_errors
from towpath.relay.options import RelayOptions
from towpath.relay.progress import Shards, boot_time
from towpath.store.retention import START, Reason, Retention, Ring, Slot

RETENTION: Final[Mapping[str, str]] = {"lock_timeout": "5ms", "synchronous_commit": "off"}
"""Session settings: a commit that waits for a standby would hold the lock meanwhile. A truncation is
flushed in any case, with every journal row it relied on before it; a lost DELETE is repeated."""

_PASS_SECONDS: Final = 300.0
"""Longest interval of looking at the ring; twenty looks a rotation where that is shorter."""
_TRIES: Final = 10
"""Of taking a lock at once, between the polls that hold one for a few milliseconds."""
HOLD_SECONDS: Final = 0.05
"""Longest hold of a slot's lock. Where that is too short for long, sent rows are deleted instead."""
_DELETE_ROWS: Final = 1000
_RESERVED_ROTATIONS: Final = 2.25
"""The slot written to, the next one, and some time in which to clear the oldest."""


def longest_retention(slot_count: int, rotate_seconds: float) -> float:
    """Seconds that rows may be kept at most, for a slot to be cleared before it is needed again."""
    return (slot_count - _RESERVED_ROTATIONS) * rotate_seconds


class Clearing:
    """The retention loop of one relay, on a connection of its own."""

    def __init__(
        self,
        link: Link,
        store: Retention,
        shards: Shards,
        options: RelayOptions,
        hooks: RelayHooks,
        *,
        hold_seconds: float = HOLD_SECONDS,
    ) -> None:
        self._link = link
        self._store = store
        self._shards = shards
        self._options = options
        self._hooks = hooks
        self._hold_seconds = hold_seconds
        self._blocked: dict[int, Reason] = {}
        self._cursors: dict[tuple[int, int], tuple[int, int]] = {}
        """How far single rows are deleted, by slot and shard: what was deleted is not walked over again."""

    async def run(self) -> None:
        """Look at the ring now and then, until cancelled.

        Raises ConfigurationError when the retention is longer than the ring. A database that is
        away is reported by the other loops and tried again here.
        """
        while True:
            wait = _PASS_SECONDS
            try:
                with link_errors():
                    wait = min(wait, await self.look() / 20)
            except StoreUnavailable:
                self._link.drop()
                wait = self._options.renew_every
            await asyncio.sleep(wait * random.uniform(0.5, 1.0))

    async def look(self) -> float:
        """One look at every slot; returns the rotation in seconds."""
        connection = await self._link.connection()
        ring = await self._store.survey(connection)
        longest = longest_retention(len(ring.slots), ring.rotate_seconds)
        if self._options.retention > longest:
            raise ConfigurationError(
                f"a retention of {self._options.retention:g} s leaves no time to clear a slot of the outbox: "
                f"{len(ring.slots)} slots of {ring.rotate_seconds} s each allow {longest:g} s at most: "
                "set TOWPATH_RELAY__RETENTION"
            )
        if self._shards.get(self._options.shards.start) is None:
            for slot in ring.slots:
                self._settled(slot.number)
        else:
            for slot in ring.slots:
                if slot.is_empty:
                    self._settled(slot.number)
                else:
                    await self._tend(connection, ring, slot)
            ring = await self._store.survey(connection)
        self._hooks.ring(sum(slot.is_empty for slot in ring.slots), len(self._blocked))
        return float(ring.rotate_seconds)

    def close(self) -> None:
        """Close the connection."""
        self._link.drop()

    async def _tend(self, connection: asyncpg.Connection[Any], ring: Ring, slot: Slot) -> None:
        """Clear the slot, or note what keeps it and delete what it need not keep."""
        began = boot_time()
        holders: list[str] = []
        unsent: list[int] = []
        try:
            reason, unsent = await self._clear(connection, slot.number)
            if reason is None:
                crash_point(CrashPoint.CLEARED_SLOT)
                self._settled(slot.number)
                self._hooks.slot_cleared(slot.number, slot.size, boot_time() - began)
                return
            is_overdue = await self._thin(connection, ring, slot)
            if reason == "locked":
                holders = await self._store.holders(connection, slot.number)
        except asyncpg.InsufficientPrivilegeError:
            # Publishing goes on: a ring that fills up is better than a relay that stands still.
            reason, is_overdue = "denied", True
        if reason in ("current", "young") and not is_overdue:
            self._settled(slot.number)
        elif self._blocked.get(slot.number) != reason:
            self._blocked[slot.number] = reason
            self._hooks.slot_blocked(slot.number, reason, unsent, holders)

    def _settled(self, slot: int) -> None:
        self._blocked.pop(slot, None)
        for key in [key for key in self._cursors if key[0] == slot]:
            del self._cursors[key]

    async def _clear(self, connection: asyncpg.Connection[Any], slot: int) -> tuple[Reason | None, list[int]]:
        """Truncate the slot; else why not, and the shards with rows that are not sent."""
        retention = self._options.retention
        verdict = await self._store.verdict(connection, slot, retention)
        reason = verdict.reason
        if reason is not None:
            return reason, list(verdict.unsent)
        for _ in range(_TRIES):
            crash_point(CrashPoint.CLEARING_SLOT)
            reason = await self._store.clear(connection, slot, retention, hold_seconds=self._hold_seconds)
            if reason != "locked":
                break
            await asyncio.sleep(random.uniform(0.005, 0.03))
        return reason, []

    async def _thin(self, connection: asyncpg.Connection[Any], ring: Ring, slot: Slot) -> bool:
        """Delete sent rows one by one where the slot could have been cleared a rotation ago.

        A row waits for the end of its slot's turn, at most a rotation, and for the retention; a
        rotation later the slot counts as blocked. Returns whether it does.
        """
        if not any(key[0] == slot.number for key in self._cursors):
            age = await self._store.oldest_age(connection, slot.number)
            if age is None or age <= self._options.retention + 2 * ring.rotate_seconds:
                return False
        began, deleted = boot_time(), 0
        for shard in await self._store.shards(connection):
            found = _DELETE_ROWS
            while found == _DELETE_ROWS:
                batch = await self._store.delete_sent(
                    connection,
                    slot.number,
                    shard,
                    self._options.retention,
                    limit=_DELETE_ROWS,
                    after=self._cursors.get((slot.number, shard), START),
                )
                self._cursors[slot.number, shard] = batch.cursor
                found, deleted = batch.found, deleted + batch.count
        if deleted:
            self._hooks.slot_thinned(slot.number, deleted, boot_time() - began)
        return True
