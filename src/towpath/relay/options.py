"""How a relay runs: the settings as numbers, plus what only the engine decides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from towpath.backoff import RetryPolicy
from towpath.errors import SettingsError
from towpath.store.installed import SHARDS_PER_BROKER

if TYPE_CHECKING:
    from towpath.settings import RelaySettings, WakeupMode

CANARY_EVERY_SECONDS: Final = 60.0
BACKOFF: Final = RetryPolicy(base="100ms", cap="3s")


@dataclass(frozen=True, slots=True)
class RelayOptions:
    """Times are seconds, sizes bytes."""

    poll_min: float = 0.005
    """Poll interval while rows come."""
    poll_max: float = 0.25
    """Poll interval when idle and not notified."""
    poll_asleep: float = 1.0
    """Poll interval when idle and notified."""
    wakeup: WakeupMode = "auto"
    window_rows: int = 2000
    """Most rows published at once."""
    window_bytes: int = 8_000_000
    """Most payload bytes published at once; one larger message goes alone."""
    lease: float = 30.0
    renew_every: float = 5.0
    publish_deadline: float = 15.0
    margin: float = 1.0
    """How far two clocks may run apart during one lease, and the time a close may take."""
    publish_attempts: int = 3
    """Tries of a message the broker refuses before it goes to the catalog."""
    retention: float = 21600.0
    """How long sent rows stay in the outbox at least."""
    broker_number: int = 0
    """Which broker's shards this engine relays."""
    listed_keys: int = 500_000
    """Most keys of one shard listed at once, 16 bytes each; twice as many are held in all."""
    backoff: RetryPolicy = BACKOFF
    """Waits while broker or database are away, and between tries of a refused message."""
    journal_every: float = 10.0
    """How old a shard's journal row may become while only the snapshot moves."""
    environment: str = ""
    """Where this database is published from; empty: the address in its URL."""
    canary_every: float = 0.0
    """Interval of canaries; 0 is none."""
    scheduled_poll: float = 0.5
    """Longest time between two looks for delayed events."""
    moved_rows: int = 1000
    """Most delayed events moved into the outbox at once."""

    def __post_init__(self) -> None:
        if self.publish_deadline + self.margin + self.renew_every > self.lease:
            raise SettingsError("publish_deadline + margin + renew_every must fit into the lease")

    @property
    def shards(self) -> range:
        """The shards of this engine's broker."""
        first = self.broker_number * SHARDS_PER_BROKER
        return range(first, first + SHARDS_PER_BROKER)

    @property
    def held_bytes(self) -> int:
        """Most bytes kept for publishing again; beyond that a shard is read again instead."""
        return 4 * self.window_bytes

    @classmethod
    def of(cls, settings: RelaySettings) -> RelayOptions:
        """The options of a deployable."""
        return cls(
            poll_min=settings.poll_min.total_seconds(),
            poll_max=settings.poll_max.total_seconds(),
            wakeup=settings.wakeup,
            window_rows=settings.window_rows,
            window_bytes=settings.window_bytes,
            lease=settings.lease.total_seconds(),
            renew_every=settings.renew_every.total_seconds(),
            publish_deadline=settings.publish_deadline.total_seconds(),
            margin=settings.margin.total_seconds(),
            publish_attempts=settings.publish_attempts,
            environment=settings.environment,
            broker_number=settings.broker_number,
            canary_every=CANARY_EVERY_SECONDS if settings.canaries else 0.0,
            retention=settings.retention.total_seconds(),
        )
