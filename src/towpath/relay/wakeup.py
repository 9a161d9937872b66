"""Sleeping longer than a poll interval: LISTEN, proven by a probe, and asking producers to NOTIFY.

Polling is the truth and this a hint. Producers notify only while a relay asks for it, which it does
about once a second and only when idle. The order is: ask, then poll once more, then sleep; so a row
whose INSERT did not notify yet is found by that poll, or was still uncommitted then and is found by
the next.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, Final
from uuid import uuid4

import asyncpg

from towpath.errors import ConfigurationError, SchemaMismatch, StoreUnavailable
from towpath.relay.hooks import RelayHooks
from towpath.relay.link import Link, link_errors
from towpath.relay.options import RelayOptions
from towpath.relay.progress import Shards, boot_time
from towpath.store.wakeup import WakeupStore

MAY_PREPARE: Final = "max_prepared_transactions is not 0, and PREPARE TRANSACTION fails after NOTIFY"
HEARS_NOTHING: Final = "LISTEN hears nothing, is there a pooler that is not for sessions?"
PROOF_SECONDS: Final = 3.0
_AGAIN_SECONDS: Final = 30.0
"""How soon to look again whether LISTEN has become possible."""
_ASK_SECONDS: Final = 1.0
_OVERLAP_SECONDS: Final = 0.25
"""How long before its end the request is repeated, so that it never lapses."""


class Gate:
    """Since when, and until when, producers notify without a gap. Times are on the boot-time clock."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._until = 0.0

    def asked(self, sent_at: float, answered_at: float, seconds_left: float) -> None:
        """The database said how long it lasts, at some time between sending and answer."""
        if self._since is None or answered_at > self._until:
            self._since = answered_at
        self._until = sent_at + seconds_left

    def lapse(self) -> None:
        """It cannot be relied on any more."""
        self._since = None

    def covers(self, polled_at: float, now: float) -> bool:
        """Whether what a poll that began then did not see will be notified, open transactions apart."""
        return self._since is not None and self._since <= polled_at and now < self._until


class Wakeup:
    """The listening connection of one relay."""

    def __init__(
        self,
        link: Link,
        probe: Link,
        store: WakeupStore,
        shards: Shards,
        options: RelayOptions,
        hooks: RelayHooks,
    ) -> None:
        self._link = link
        self._probe = probe
        self._store = store
        self._shards = shards
        self._options = options
        self._hooks = hooks
        self._gate = Gate()
        self._is_idle = False
        self._stirred = asyncio.Event()
        self._token = ""
        self._proof = asyncio.Event()
        self._is_heard = False
        self._rests_until = 0.0
        self.obstacle: str | None = "not connected yet" if options.wakeup != "poll" else "so it was set"
        """Why it only polls; None while notifications arrive."""
        self.problem: ConfigurationError | None = None
        """Set where notifications were demanded and do not arrive."""

    def covers(self, polled_at: float) -> bool:
        """Whether the reader may sleep for long after a poll that began then and saw nothing."""
        return self._gate.covers(polled_at, boot_time())

    def set_idle(self, is_idle: bool) -> None:
        """What the reader does: only while it is idle are producers asked to notify."""
        if is_idle != self._is_idle:
            self._is_idle = is_idle
            self._stirred.set()

    def take_heard(self) -> bool:
        """Whether there was a notification since the last call."""
        is_heard, self._is_heard = self._is_heard, False
        return is_heard

    def rest(self, seconds: float) -> None:
        """Notifications wake the reader only after that time."""
        self._rests_until = boot_time() + seconds

    async def run(self) -> None:
        """Listen until cancelled. Raises SchemaMismatch."""
        if self._options.wakeup == "poll":
            return
        failures = 0
        while True:
            try:
                with link_errors():
                    connection = await self._link.connection()
                    obstacle = await self._listen(connection)
                    wait = _AGAIN_SECONDS
                    if obstacle is None:
                        failures = 0
                        self._report(None)
                        await self._ask(connection)
                        raise StoreUnavailable("the listening connection was lost")
            except SchemaMismatch:
                raise
            except ConfigurationError as error:
                obstacle, wait = str(error), _AGAIN_SECONDS
            except StoreUnavailable as error:
                failures += 1
                obstacle, wait = str(error), self._options.backoff.delay(failures).total_seconds()
            self.close()
            self._report(obstacle)
            await asyncio.sleep(wait)

    def close(self) -> None:
        """Close the connection; the reader polls."""
        self._gate.lapse()
        self._link.drop()
        self._shards.changed.set()

    def _report(self, obstacle: str | None) -> None:
        is_demanded = self._options.wakeup == "notify"
        if obstacle != self.obstacle:
            self._hooks.wakeup_changed(obstacle, is_demanded=is_demanded)
        self.obstacle = obstacle
        self.problem = (
            ConfigurationError(f"TOWPATH_RELAY__WAKEUP=notify, but the relay can only poll: {obstacle}")
            if is_demanded and obstacle is not None
            else None
        )

    async def _listen(self, connection: asyncpg.Connection[Any]) -> str | None:
        """Listen and prove it; returns what is in the way."""
        if self._options.wakeup == "auto" and await self._store.may_prepare(connection):
            return MAY_PREPARE
        connection.add_termination_listener(self._lost)
        await connection.add_listener(self._store.channel, self._heard)
        self._token = uuid4().hex
        self._proof.clear()
        try:
            # From another connection: through a transaction pooler a backend hears itself.
            await self._store.notify(await self._probe.connection(), self._token)
            self._shards.own_writes += 1
        finally:
            self._probe.drop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PROOF_SECONDS):
                await self._proof.wait()
                return None
        return HEARS_NOTHING

    async def _ask(self, connection: asyncpg.Connection[Any]) -> None:
        """Ask producers to notify for as long as the reader is idle; returns when the connection is lost."""
        last_id: int | None = None
        while not connection.is_closed():
            self._stirred.clear()
            pause: float | None = None
            if self._is_idle:
                sent_at = boot_time()
                asleep = await self._store.stay_asleep(connection, last_id)
                self._shards.own_writes += 1
                last_id, pause = asleep.last_id, _ASK_SECONDS
                if asleep.seconds_left is None:
                    self._gate.lapse()
                else:
                    self._gate.asked(sent_at, boot_time(), asleep.seconds_left)
                    pause = max(0.05, min(_ASK_SECONDS, asleep.seconds_left - _OVERLAP_SECONDS))
            else:
                self._gate.lapse()
                if last_id is not None:
                    await self._store.be_awake(connection)
                    self._shards.own_writes += 1
                last_id = None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._stirred.wait()

    def _lost(self, _connection: object) -> None:
        self._gate.lapse()
        self._stirred.set()

    def _heard(self, _connection: object, _pid: int, _channel: str, payload: object) -> None:
        if payload == self._token:
            self._proof.set()
        if payload or self._is_heard:  # a probe, of this relay or another; or the reader is told already
            return
        self._is_heard = True
        self._gate.lapse()  # whoever finds the row takes the request back
        wait = self._rests_until - boot_time()
        if wait <= 0:
            self._shards.changed.set()
        else:
            asyncio.get_running_loop().call_later(wait, self._shards.changed.set)
