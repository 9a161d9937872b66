"""Slots: how many may run at once, all together and of each kind. Pure.

A message without a slot waits in its lane and is not claimed, so that it takes no place from others:
a handler with a low `concurrency` holds up nobody but itself. A transactional handler keeps a database
session for as long as it runs, so no more of them start than there are sessions. Work from the database
has slots of its own beside those of the broker's messages; what both want alike, a handler's own slots
and the sessions, is promised to the database in turn, or a backlog at the broker would keep it waiting.

A claim takes as long as many a handler. So that slots do not idle meanwhile, more messages are claimed than
there are slots, as many as will begin within a twentieth of a second going by how long handlers took of late;
they queue for a slot before they begin. All kinds alike, or those that are slow would find no slot beside
those that are quick; but of a kind with slots of its own no more than go by its own time.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Final

from towpath.handlers import Effect, Handler
from towpath.settings import WorkerSettings

_BATCHES: Final = 2
"""One batch of a handler runs while the next is collected."""
_AHEAD_SECONDS: Final = 0.05
_LEARNING_RATE: Final = 0.05


@dataclass(slots=True, eq=False)
class Limit:
    """So many at once."""

    size: int
    taken: int = 0
    """By what is claimed."""
    running: int = 0
    """Of these, what has begun."""
    is_promised: bool = False
    """The next one that frees is not for the broker's messages."""
    usual_seconds: float | None = None
    """How long handlers take of late that wait for something."""

    @property
    def is_full(self) -> bool:
        """Whether nothing is left."""
        return self.taken >= self.size

    @property
    def ahead(self) -> int:
        """How many may be claimed beyond its size."""
        if self.usual_seconds is None:
            return 0
        return int(self.size * min(1.0, _AHEAD_SECONDS / max(self.usual_seconds, 1e-6)))

    def took(self, seconds: float) -> None:
        """One is through."""
        usual = seconds if self.usual_seconds is None else self.usual_seconds
        self.usual_seconds = usual + (seconds - usual) * _LEARNING_RATE


class Slots:
    """The limits of one worker, and what is taken of them."""

    def __init__(
        self,
        handlers: Mapping[str, Handler],
        settings: WorkerSettings,
        *,
        wake: asyncio.Event,
        wake_due: asyncio.Event,
    ) -> None:
        self._wake = wake
        self._wake_due = wake_due
        self._worker = Limit(settings.concurrency)
        self._due = Limit(settings.due_concurrency)
        sessions = Limit(settings.sessions)
        self._own = {type_: tuple(_own(handler, sessions)) for type_, handler in handlers.items()}
        self._batches = {type_ for type_, handler in handlers.items() if handler.batch is not None}
        """They have room of their own, which must not become handlers that run one by one."""
        self._shared = {limit for limits in self._own.values() for limit in limits}
        """What broker and database both want."""
        self._queues: dict[str, deque[tuple[int, str, Callable[[], bool]]]] = {}
        """What was claimed ahead of its slot; a type with slots of its own has a queue of its own."""
        self._order = count()

    def obstacle(self, type_: str) -> Limit | None:
        """What one of the broker's messages would have to wait for; None: there is a slot."""
        for limit in self._own.get(type_, ()):
            if limit.taken >= (limit.size - 1 if limit.is_promised else limit.size + limit.ahead):
                return limit
        room = self._worker.size - self._worker.taken - self._borrowed
        is_full = room <= 0 and room + self._worker.ahead <= 0
        return self._worker if is_full and type_ not in self._batches else None

    def is_bounded(self, type_: str) -> bool:
        """Whether it has slots of its own."""
        return type_ in self._own and bool(self._own[type_])

    def enter(self, type_: str, begin: Callable[[], bool]) -> bool:
        """One of the broker's messages begins: now, or as soon as there is a slot, in the order of calls.

        `begin` says whether it did. False: it is called later.
        """
        queue_of = type_ if self._own.get(type_) else ""
        if queue_of not in self._queues and self._may_begin(type_):
            self._begin(type_, begin)
            return True
        self._queues.setdefault(queue_of, deque()).append((next(self._order), type_, begin))
        return False

    def enter_at_once(self, type_: str) -> None:
        """One has begun already, together with others that did not wait for anything."""
        for limit in (self._worker, *self._own.get(type_, ())):
            limit.running += 1

    def leave(self, type_: str) -> None:
        """It has ended."""
        for limit in (self._worker, *self._own.get(type_, ())):
            limit.running -= 1
        self._let_in()

    def took(self, type_: str, seconds: float) -> None:
        """A handler is through that waited for something."""
        for limit in (self._worker, *self._own.get(type_, ())):
            limit.took(seconds)

    def _may_begin(self, type_: str) -> bool:
        if self._worker.running >= self._worker.size - self._borrowed:
            return False
        return all(limit.running < limit.size for limit in self._own.get(type_, ()))

    def _begin(self, type_: str, begin: Callable[[], bool]) -> None:
        if begin():
            self.enter_at_once(type_)

    def _let_in(self) -> None:
        while self._queues:
            heads = [(queue[0], name) for name, queue in self._queues.items() if self._may_begin(queue[0][1])]
            if not heads:
                return
            (_, type_, begin), name = min(heads)
            self._queues[name].popleft()
            if not self._queues[name]:
                del self._queues[name]
            self._begin(type_, begin)

    def take(self, type_: str) -> None:
        """Take a slot that is there."""
        if type_ not in self._batches:
            self._worker.taken += 1
        for limit in self._own.get(type_, ()):
            limit.taken += 1

    def give_back(self, type_: str) -> None:
        """It ended, or could not start."""
        if type_ not in self._batches:
            self._worker.taken -= 1
        self._give_back_own(type_)

    @property
    def due_room(self) -> int:
        """How many more may start from the database: its own slots, and of the others what is not in use.

        It borrows half of those at most, so that long work from the database leaves room for new messages.
        """
        unused = max(0, self._worker.size - self._worker.taken)
        return self._due.size + min(unused, self._worker.size // 2) - self._due.taken

    @property
    def _borrowed(self) -> int:
        return max(0, self._due.taken - self._due.size)

    def has_due(self, type_: str) -> bool:
        """Whether there is a slot for work from the database."""
        return self.due_room > 0 and not any(limit.is_full for limit in self._own.get(type_, ()))

    def take_due(self, type_: str) -> None:
        """Take a slot that is there."""
        self._due.taken += 1
        for limit in self._own.get(type_, ()):
            limit.taken += 1
            limit.running += 1

    def give_back_due(self, type_: str) -> None:
        """It ended, or could not start."""
        self._due.taken -= 1
        for limit in self._own.get(type_, ()):
            limit.running -= 1
        self._let_in()
        self._give_back_own(type_)

    def _give_back_own(self, type_: str) -> None:
        for limit in self._own.get(type_, ()):
            limit.taken -= 1
            if limit.is_promised and not limit.is_full:
                self._wake_due.set()
        self._wake.set()

    def promise(self) -> set[Limit]:
        """Before a look at the database: promise it the next slot where none is left. What it may use now."""
        kept = {limit for limit in self._shared if limit.is_promised and not limit.is_full}
        for limit in self._shared:
            limit.is_promised = limit.is_promised or limit.is_full
        return kept

    def redeem(self, promised: set[Limit]) -> None:
        """After the look: what it did not use is for everybody again."""
        for limit in promised:
            limit.is_promised = False
        if promised:
            self._wake.set()

    def break_promises(self) -> None:
        """Nothing starts from the database for now."""
        self.redeem({limit for limit in self._shared if limit.is_promised})

    def full_types(self) -> list[str]:
        """Types of which nothing may start from the database now."""
        return [type_ for type_ in self._own if not self.has_due(type_)]


def _own(handler: Handler, sessions: Limit) -> Iterator[Limit]:
    if handler.batch is not None:
        yield Limit(_BATCHES * handler.batch.max_size)
        return
    if handler.concurrency is not None:
        yield Limit(handler.concurrency)
    if handler.effect is Effect.TRANSACTIONAL:
        yield sessions


def setting_problems(handlers: Mapping[str, Handler], settings: WorkerSettings) -> list[str]:
    """Handlers that these settings do not suit, one line each."""
    return [problem for handler in handlers.values() for problem in _problems(handler, settings)]


def _problems(handler: Handler, settings: WorkerSettings) -> Iterator[str]:
    is_transactional = handler.effect is Effect.TRANSACTIONAL
    if is_transactional and handler.concurrency is not None and handler.concurrency > settings.sessions:
        yield (
            f"{handler.name}: concurrency={handler.concurrency} needs as many database sessions, "
            f"TOWPATH_WORKER__SESSIONS is {settings.sessions}: raise it, or lower the concurrency"
        )
    if handler.batch is not None and handler.batch.max_wait >= settings.quiet:
        yield (
            f"{handler.name}: max_wait={handler.batch.max_wait.total_seconds():g}s must be less than "
            f"TOWPATH_WORKER__QUIET, {settings.quiet.total_seconds():g}s: lower it, or raise that"
        )
