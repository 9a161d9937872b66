"""What a relay says about itself: for health endpoints and tests."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(slots=True)
class Figures:
    """What was measured last: of the relay's broker, the database and this relay. None: not yet."""

    pending_count: int | None = None
    """Committed rows that the journal does not call sent, counted up to 10,000; none behind a gate."""
    oldest_unsent_seconds: float | None = None
    """Age of the oldest of them; 0 when there is none."""
    unowned_shard_count: int | None = None
    """Shards that no relay holds."""
    oldest_transaction_seconds: float | None = None
    """How long the vacuum horizon has been held by one transaction, as far as this relay may see."""
    seen_at: float | None = None
    """When the figures above were read, every 15 seconds, on the boot-time clock."""
    slots_free_count: int | None = None
    """Empty slots of the outbox ring."""
    slots_blocked_count: int | None = None
    """Slots that are due to be cleared and cannot be; the owner of the first shard knows."""
    window_rows: int | None = None
    """Rows of the window published last."""
    publish_latency_seconds: float | None = None
    """From the insert of its first row to the broker's answer."""

    def as_dict(self, now: float, journal_lag_seconds: float) -> dict[str, object]:
        """For JSON, at a moment of the boot-time clock."""
        found = asdict(self) | {"journal_lag_seconds": journal_lag_seconds}
        seen_at = found.pop("seen_at")
        found["seen_ago_seconds"] = None if seen_at is None else now - seen_at
        return {name: round(value, 3) if isinstance(value, float) else value for name, value in found.items()}


@dataclass(frozen=True, slots=True)
class RelayStatus:
    """A moment of one relay."""

    relay: str
    stuck_loops: list[str]
    """Loops that stopped coming round; empty while it is alive."""
    is_ready: bool
    """It can publish: database, broker and leases are usable and it is not draining."""
    is_draining: bool
    shards: list[int]
    """Shards it holds a lease of."""
    shard_count: int
    """Shards there are for its broker."""
    published_count: int
    """Messages acknowledged by the broker since the start."""
    put_aside_count: int
    """Messages that could not be published."""
    held_count: int
    """Messages waiting for another try."""
    gate_count: int
    """Keys and shards that wait for a person's decision about a refused message, at the last look."""
    blocked_shards: list[int]
    """Shards of which nothing is sent until then."""
    paused: list[str]
    """Destinations that nothing is published to until a person resumes it; `*`: every one."""
    wakeup: str
    """How it hears of new rows while it is idle: `notify`, or `poll:` and why."""
    figures: dict[str, object]
    """The last `Figures`, and for how long this relay has published without writing its progress down."""
    problems: list[str]
    """What keeps it from being ready, one line each."""

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)
