"""What a relay says about itself: for health endpoints and tests."""

from __future__ import annotations

from dataclasses import asdict, dataclass


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
    problems: list[str]
    """What keeps it from being ready, one line each."""

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)
