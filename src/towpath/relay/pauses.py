"""Where people have stopped publishing for now, as of the last heartbeat."""

from __future__ import annotations

from collections.abc import Iterable

from towpath.relay.hooks import RelayHooks
from towpath.store.pauses import EVERYTHING


class Pauses:
    """What a relay must not publish.

    Messages of a paused destination are parked behind a gate in their shard, so that everything else goes
    on; the database decides when that opens. While everything is paused nothing is read.
    """

    def __init__(self, hooks: RelayHooks) -> None:
        self._hooks = hooks
        self.destinations: frozenset[str] = frozenset()
        self.is_everything = False

    def told(self, names: Iterable[str]) -> None:
        """What the heartbeat found."""
        before, self.destinations = self.names, frozenset(names) - {EVERYTHING}
        self.is_everything = EVERYTHING in names
        if self.names != before:
            self._hooks.pauses_changed(self.names)
        self._hooks.pauses(len(self.destinations), is_everything=self.is_everything)

    @property
    def names(self) -> list[str]:
        """Destinations, and `*` while that is every one."""
        return [EVERYTHING] * self.is_everything + sorted(self.destinations)
