"""Lanes: within one, messages run one after another; different lanes run side by side. Pure, no clock."""

import heapq
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from itertools import count

import msgspec

from towpath.brokers.ports import Delivery
from towpath.errors import DecodeError
from towpath.store.work import Work


class Received(msgspec.Struct, eq=False):
    """A delivery and the work it asks for. Identity, not value."""

    work: Work
    delivery: Delivery
    undecodable: DecodeError | None = None
    received_at: float = msgspec.field(default_factory=time.monotonic)
    is_acknowledged: bool = False
    """Its broker message is gone; its lane went on."""
    lane: "Lane | None" = None
    slot: str | None = None
    """The type under which it has a slot."""
    is_postponed: bool = False
    """It is claimed to wait in the database, since its handler is paused."""


class Lane(msgspec.Struct, eq=False):
    """Messages of one key, partition, or a single message where nothing is ordered."""

    id: Hashable
    waiting: deque[Received] = msgspec.field(default_factory=deque)
    running: Received | None = None


class Lanes:
    """Which message may start next. A lane is ready, running, held for a while, or gone."""

    def __init__(self) -> None:
        self._lanes: dict[Hashable, Lane] = {}
        self._ready: deque[Lane] = deque()
        self._blocked: dict[Hashable, deque[Lane]] = {}
        """By what their heads wait for."""
        self._held: list[tuple[float, int, Lane]] = []
        self._tie = count()
        self._waiting_count = 0

    def __len__(self) -> int:
        """Messages that wait for their turn."""
        return self._waiting_count

    @property
    def ready_count(self) -> int:
        """Lanes whose head may start now."""
        return len(self._ready)

    def add(self, received: Received) -> None:
        """Behind what its lane holds already."""
        work = received.work
        is_alone = work.lane is None or received.delivery.death is not None
        lane_id: Hashable = received if is_alone else (work.source, work.lane)
        lane = self._lanes.get(lane_id)
        if lane is None:
            lane = self._lanes[lane_id] = Lane(lane_id)
            self._ready.append(lane)
        received.lane = lane
        lane.waiting.append(received)
        self._waiting_count += 1

    def take(
        self, limit: int, admit: Callable[[Received], Hashable | None] = lambda _: None
    ) -> list[Received]:
        """Heads of at most `limit` ready lanes, which run from now on until `finish` or `hold`.

        A head that `admit` names an obstacle for waits, in the order of arrival, with the others that
        wait for the same; None lets it start.
        """
        heads: list[Received] = []
        for obstacle, blocked in list(self._blocked.items()):
            while blocked and len(heads) < limit:
                if not self._take(blocked, heads, admit, known=obstacle):
                    break
            if not blocked:
                del self._blocked[obstacle]
        while self._ready and len(heads) < limit:
            self._take(self._ready, heads, admit)
        return heads

    def _take(
        self,
        lanes: deque[Lane],
        heads: list[Received],
        admit: Callable[[Received], Hashable | None],
        known: Hashable | None = None,
    ) -> bool:
        """Start the head of the first lane, or put the lane elsewhere. False: it stays where it is."""
        lane = lanes[0]
        obstacle = admit(lane.waiting[0]) if lane.waiting else None
        if obstacle is not None and obstacle == known:
            return False
        lanes.popleft()
        if obstacle is not None:
            self._blocked.setdefault(obstacle, deque()).append(lane)
        elif lane.waiting:
            lane.running = lane.waiting.popleft()
            heads.append(lane.running)
            self._waiting_count -= 1
        else:
            self._lanes.pop(lane.id, None)
        return True

    def finish(self, received: Received) -> None:
        """The head is done; its lane's next may start."""
        lane = _lane(received)
        lane.running = None
        if lane.waiting:
            self._ready.append(lane)
        else:
            self._lanes.pop(lane.id, None)

    def is_running(self, received: Received) -> bool:
        """Whether it is its lane's head and runs."""
        return _lane(received).running is received

    def make_way(self, received: Received) -> None:
        """Finish the head unless that was done already, or it was held."""
        if self.is_running(received):
            self.finish(received)

    def hold(self, received: Received, until: float) -> None:
        """The head could not start: it stays the head, and its lane rests until the given instant."""
        lane = _lane(received)
        lane.running = None
        lane.waiting.appendleft(received)
        self._waiting_count += 1
        heapq.heappush(self._held, (until, next(self._tie), lane))

    def give_way(self, received: Received, until: float) -> None:
        """Hold the head, and let the first message of another partition be the head in its place.

        What is waited for may be in there: a key that comes by several partitions has no order between them.
        """
        self.hold(received, until)
        waiting = _lane(received).waiting
        partition = received.delivery.partition
        for place, other in enumerate(waiting):
            if other.delivery.partition != partition:
                del waiting[place]
                waiting.appendleft(other)
                return

    def release_due(self, now: float) -> float | None:
        """Make rested lanes ready again. Returns the next instant one is due, None when none rests."""
        while self._held and self._held[0][0] <= now:
            _, _, lane = heapq.heappop(self._held)
            if lane.waiting:
                self._ready.append(lane)
            else:
                self._lanes.pop(lane.id, None)
        return self._held[0][0] if self._held else None

    def remove(self, predicate: Callable[[Received], bool]) -> list[Received]:
        """Take waiting messages out, in order; running ones are not touched."""
        removed: list[Received] = []
        for lane in self._lanes.values():
            kept: deque[Received] = deque()
            for received in lane.waiting:
                (removed if predicate(received) else kept).append(received)
            lane.waiting = kept
        self._waiting_count -= len(removed)
        return removed

    def __iter__(self) -> Iterator[Received]:
        """Everything that waits."""
        return (received for lane in self._lanes.values() for received in lane.waiting)


def _lane(received: Received) -> Lane:
    if received.lane is None:
        raise ValueError("this message was never added")
    return received.lane
