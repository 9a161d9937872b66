"""What is known of destinations, as of the last heartbeat."""

from __future__ import annotations

from collections.abc import Mapping

from towpath.store.outbox import Destinations, OnPoison


class Directory:
    """Where messages go at the broker, and what waits for one that it refuses."""

    def __init__(self) -> None:
        self._known = Destinations({}, {})

    def told(self, known: Destinations) -> None:
        """What the heartbeat found."""
        if known != self._known:
            self._known = known

    @property
    def addresses(self) -> Mapping[str, str]:
        """By destination; one that is missing is its own. The same mapping until something changes."""
        return self._known.addresses

    @property
    def policies(self) -> Mapping[str, OnPoison]:
        """By destination; for one that is missing nothing waits."""
        return self._known.policies
