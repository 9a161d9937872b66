"""Statements without an answer: on a connection that died silently, while the database answers on new ones.

Reads may take long, so their own timeout is long too. A heartbeat is short: when one fails and a later one
succeeds, a read that has waited since before then will wait in vain.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final, Protocol

from towpath.relay.heartbeat import Heartbeat
from towpath.relay.progress import boot_time

_LOOK_SECONDS: Final = 1.0
_WAITING_SECONDS: Final = 5.0
"""Nothing that was asked less long ago is given up."""


class Asker(Protocol):
    """A loop that asks the database."""

    asking_since: float | None
    """When it asked what has no answer yet, on the boot-time clock."""

    def give_up(self) -> None:
        """Drop the connection: what waits for an answer on it fails."""
        ...


class Stranded:
    """Gives up what was found waiting in vain twice: answers of a database that thaws may be on their way."""

    def __init__(self, heartbeat: Heartbeat, askers: Sequence[Asker]) -> None:
        self._heartbeat = heartbeat
        self._askers = askers
        self._suspected: dict[int, float] = {}

    async def run(self) -> None:
        """Look every second, until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            self.look(boot_time())

    def look(self, now: float) -> None:
        """Once."""
        failed_at, before, self._suspected = self._heartbeat.failed_at, self._suspected, {}
        if self._heartbeat.beat_at <= failed_at:
            return
        for number, asker in enumerate(self._askers):
            since = asker.asking_since
            if since is None or since >= failed_at or now - since < _WAITING_SECONDS:
                continue
            if before.get(number) == since:
                asker.give_up()
            else:
                self._suspected[number] = since
