"""Delayed events: moved into the outbox when they are due, by every relay, each step by one of them."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

from towpath.crashpoints import CrashPoint, crash_point
from towpath.errors import StoreUnavailable
from towpath.relay.hooks import RelayHooks
from towpath.relay.link import Link, link_errors
from towpath.relay.options import RelayOptions
from towpath.relay.progress import boot_time
from towpath.store.scheduled import Outlook, Place, ScheduledStore

_ADVANCE_SECONDS: Final = 1.0
"""How often progress follows what is written for later, so that looking stays cheap."""
_SWEEP_SECONDS: Final = 600.0
"""How often deleting begins at the front again: for rows that came late and rows of dead relays."""
_RACED_SECONDS: Final = 0.01
_DELETE_ROWS: Final = 1000


class Mover:
    """Wakes at the next due time, at the latest after `scheduled_poll`. One per relay.

    Looks itself, but where it was told meanwhile what an idle reader's poll saw.
    Never early: the due time is compared with the database's clock by the statement that moves.
    Late by less than `scheduled_poll` where the event was written shortly before it is due.
    """

    def __init__(self, link: Link, store: ScheduledStore, options: RelayOptions, hooks: RelayHooks) -> None:
        self._link = link
        self._store = store
        self._options = options
        self._hooks = hooks
        self._failures = 0
        self._told: Outlook | None = None
        self._was_told = asyncio.Event()
        self.is_waiting = False
        """Nothing is due, and another look now is as good as its own later."""
        self._advanced_at = 0.0
        self._swept_at = 0.0
        self._is_dirty = True
        self._forgotten = Place()
        self._trimmed = 0
        self.moved_count = 0
        """Events moved since the start."""
        self.ticked_at = boot_time()
        self.asking_since: float | None = None
        """When the present step began; None between two."""
        self.error: BaseException | None = None

    async def run(self) -> None:
        """Move until cancelled.

        Raises ConfigurationError when the schema is missing or its progress is not this database's.
        """
        while True:
            self.ticked_at = self.asking_since = boot_time()
            try:
                with link_errors():
                    wait = await self.step()
                self.is_waiting = wait > 0
                self._failures = 0
                self.error = None
            except StoreUnavailable as error:
                self._link.drop()
                self._failures += 1
                wait = self._options.backoff.delay(self._failures).total_seconds()
                if self.error is None:
                    self._hooks.store_unavailable(error, wait)
                self.error = error
            self.asking_since = None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await self._was_told.wait()
            self.is_waiting = False

    def told(self, outlook: Outlook) -> None:
        """Somebody else looked."""
        self._told = outlook
        self._was_told.set()

    def give_up(self) -> None:
        """Wait no longer for an answer on this connection."""
        self._link.drop()

    def close(self) -> None:
        """Close the connection; a step that is on its way happens wholly or not at all."""
        self._link.drop()

    async def step(self) -> float:
        """Look, move what is due, delete what was moved; returns the seconds to wait.

        Raises StoreUnavailable and the driver's errors.
        """
        self._was_told.clear()
        connection = await self._link.connection()
        outlook, self._told = self._told, None
        if outlook is None:
            outlook = await self._store.look(connection)
        now = boot_time()
        if outlook.is_due or (outlook.is_behind and now - self._advanced_at >= _ADVANCE_SECONDS):
            moved = await self._store.move(connection, self._options.moved_rows)
            if moved is None:
                return _RACED_SECONDS
            self._advanced_at = now
            if moved:
                self.moved_count += moved
                self._is_dirty = True
                crash_point(CrashPoint.MOVED_DUE)
            return 0.0
        if await self._clean(now):
            return 0.0
        wait = self._options.scheduled_poll
        return wait if outlook.next_seconds is None else min(wait, outlook.next_seconds)

    async def _clean(self, now: float) -> bool:
        """Delete one batch of what was moved; whether there may be more."""
        if now - self._swept_at >= _SWEEP_SECONDS:
            self._swept_at = now
            self._forgotten = Place()
            self._is_dirty = True
        if not self._is_dirty:
            return False
        connection = await self._link.connection()
        count, self._forgotten = await self._store.forget_moved(connection, self._forgotten, _DELETE_ROWS)
        self._is_dirty = count == _DELETE_ROWS
        self._trimmed = await self._store.trim(connection, self._trimmed, _DELETE_ROWS)
        return self._is_dirty
