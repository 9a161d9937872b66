"""One attempt of this worker at a message, from its claim to its durable outcome."""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum, auto
from typing import Protocol

import msgspec

from towpath.consumer.lanes import Received
from towpath.store.work import Work
from towpath.telemetry.tracing import ProcessSpan


class Phase(Enum):
    """How far a run is, and who may interrupt it."""

    QUEUED = auto()
    """It is claimed; its handler has not begun."""
    HANDLING = auto()
    """The handler runs: it may be cancelled."""
    SETTLING = auto()
    """The outcome is on its way to the database: let it try its token."""
    CANCELLED = auto()
    """Somebody asked to cancel the task: it ends CANCELLED."""
    HANDED_BACK = auto()
    """The worker gives it up unspent."""


class Owner(Protocol):
    """Who started runs, and goes on when they are over."""

    def handled(self, runs: Sequence["Run"]) -> None:
        """Their handlers are through: others may start while they are settled."""
        ...

    def settled(self, runs: Sequence["Run"]) -> None:
        """Their outcome is durable: the broker's messages may be acknowledged."""
        ...

    def unsettled(self, run: "Run") -> None:
        """It has no outcome of this member's: ask again."""
        ...

    def ended(self, runs: Sequence["Run"]) -> None:
        """They run no more, whatever came of them."""
        ...


class Run(msgspec.Struct, eq=False):
    """Identity, not value."""

    work: Work
    owner: Owner
    received: Received | None
    """None: the database started it."""
    started_at: float
    """Monotonic, when it was claimed."""
    phase: Phase = Phase.QUEUED
    task: "asyncio.Task[None] | None" = None
    """Runs it, perhaps with others that have not begun or only have to be settled."""
    withdraw: "Callable[[Run], None] | None" = None
    """Takes it out of its batch, where it is in one."""
    span: ProcessSpan | None = None
    began_at: float = 0.0
    """Monotonic, when its handler began."""

    def cancel(self) -> None:
        """Its handler may be cancelled now, to end CANCELLED; one that settles is left alone."""
        if self.phase in (Phase.QUEUED, Phase.HANDLING):
            self._interrupt(Phase.CANCELLED)

    def hand_back(self) -> bool:
        """Whether its handler is given up unspent; False while it settles."""
        if self.phase is Phase.SETTLING:
            return False
        self._interrupt(Phase.HANDED_BACK)
        return True

    def _interrupt(self, phase: Phase) -> None:
        self.phase = phase
        if self.withdraw is not None:
            self.withdraw(self)
        elif self.began_at and self.task is not None:  # else the task is with another message of the wave
            self.task.cancel()


def by_owner(runs: Iterable[Run]) -> Iterator[tuple[Owner, list[Run]]]:
    """Each owner with its own: a batch holds messages from the broker beside some from the database."""
    found: dict[Owner, list[Run]] = {}
    for run in runs:
        found.setdefault(run.owner, []).append(run)
    yield from found.items()
