"""What a consumer's health endpoints say."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from towpath.brokers.ports import Subscriber
from towpath.consumer.membership import BEAT, DATABASE
from towpath.errors import BrokerUnavailable, LeaseLost, SchemaMismatch, StoreUnavailable, TowpathError
from towpath.failures import problem_of
from towpath.handlers import Handler
from towpath.settings import WorkerSettings

_STALL_SECONDS: Final = 60.0
"""A loop is stuck that is overdue for this long."""


@dataclass(slots=True)
class Health:
    """What the health endpoints say about a consumer."""

    group: str = ""
    seen_seconds: float = 15.0
    """A lease that was not renewed for this long tells that the database is away: three beats."""
    round_seconds: Mapping[str, float] = field(default_factory=dict)
    """How long a round of a loop may take by the settings; nothing for a loop that is not here."""
    progressed_at: dict[str, float] = field(default_factory=dict)
    is_draining: bool = False
    subscriber: Subscriber | None = None
    error: TowpathError | None = None
    """Why it could not begin, or begin again."""
    outdated: SchemaMismatch | None = None
    """Why the schema cannot be worked with any more."""
    paused: Sequence[str] = ()
    """Types of which nothing is started until a person resumes it; `*`: every one."""

    def note(self, loop: str) -> None:
        """A loop came round."""
        self.progressed_at[loop] = time.monotonic()

    def note_paused(self, types: Sequence[str]) -> None:
        """Pauses began or ended."""
        self.paused = types

    def stuck_loops(self) -> list[str]:
        """Loops that stopped coming round. Where it drains they have ended, but for the heartbeat."""
        now = time.monotonic()
        is_ending = self.is_draining or self.outdated is not None
        return sorted(
            name
            for name, at in self.progressed_at.items()
            if name != DATABASE
            and not (is_ending and name != BEAT)
            and now - at > _STALL_SECONDS + self.round_seconds.get(name, 0.0)
        )

    @property
    def is_ready(self) -> bool:
        """Whether messages arrive and may be claimed: joined, beating, not draining, no partition refused."""
        return not self.problems

    @property
    def problems(self) -> list[str]:
        """What keeps it from being ready, one line each: what it is, and what to do."""
        problems = ["draining: it takes nothing new and ends"] if self.is_draining else []
        if self.outdated is not None:
            problems.append(f"schema: {problem_of(self.outdated)}; it drains and ends")
        if self.error is not None:
            problems.append(f"{_culprit(self.error)}: {problem_of(self.error)}")
        elif self.subscriber is None:
            problems.append("starting: it has not joined its group yet")
        else:
            if not self.is_broker_connected:
                problems.append(f"broker: nothing can arrive: {BrokerUnavailable.advice}")
            if not self.is_database_seen:
                problems.append(f"database: the lease is not renewed: {StoreUnavailable.advice}")
        if refused := self.refused_partitions:
            problems.append(
                f"partitions: {', '.join(refused)} wait for a word where to go on: "
                f"towpath worker offsets --group {self.group}"
            )
        return problems

    @property
    def refused_partitions(self) -> list[str]:
        """Partitions that are not read until a person says where to go on."""
        marks = {} if self.subscriber is None else self.subscriber.marks
        return sorted(name for name, mark in marks.items() if mark.refusal is not None)

    @property
    def is_broker_connected(self) -> bool:
        """Whether messages can arrive."""
        return self.subscriber is not None and self.subscriber.is_connected

    @property
    def is_database_seen(self) -> bool:
        """Whether the lease was renewed of late."""
        seen_at = self.progressed_at.get(DATABASE)
        return seen_at is not None and time.monotonic() - seen_at < self.seen_seconds


def round_seconds(handlers: Mapping[str, Handler], settings: WorkerSettings) -> dict[str, float]:
    """How long a round of a loop may take by the settings: its sleep, and the calls it waits for."""
    beat, reap = settings.beat_every.total_seconds(), settings.reap_every.total_seconds()
    asking = [each.timeout.total_seconds() for each in handlers.values() if each.reconcile is not None]
    return {
        BEAT: 3 * beat,
        "bookmarks": beat,
        "due": 1.25 * settings.due_poll_max.total_seconds(),
        "reap": 1.5 * reap,
        "reconcile": 1.5 * reap + max(asking, default=0.0),
    }


def _culprit(error: TowpathError) -> str:
    return {BrokerUnavailable: "broker", LeaseLost: "lease"}.get(type(error), "database")
