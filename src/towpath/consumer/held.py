"""The broker's messages that a worker holds: their lanes, their slots, and how each of them leaves."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from towpath.brokers.ports import Subscriber
from towpath.consumer.lanes import Lanes, Received
from towpath.consumer.slots import Limit, Slots


@dataclass(slots=True, eq=False)
class Suspect:
    """The head of a lane whose worker died, maybe by it."""

    received: Received
    start: int
    """The number of starts the next one is."""


class Held:
    """What one worker received and has not acknowledged. Every change wakes whoever starts the next."""

    def __init__(self, subscriber: Subscriber, slots: Slots, wake: asyncio.Event) -> None:
        self._subscriber = subscriber
        self._slots = slots
        self._wake = wake
        self.lanes = Lanes()
        self.suspects: list[Suspect] = []

    def release(self, which: Callable[[Received], bool] = lambda _: True) -> None:
        """Give those that wait back to the broker."""
        queued = self.lanes.remove(which)
        leaving = [suspect.received for suspect in self.suspects if which(suspect.received)]
        self.suspects = [suspect for suspect in self.suspects if suspect.received not in leaving]
        for received in leaving:
            self.lanes.finish(received)
        self._subscriber.release([received.delivery for received in (*queued, *leaving)])

    def release_when_older(self, received_before: float) -> None:
        """Give all back where one has waited since before that instant."""
        waiting = (*self.lanes, *(suspect.received for suspect in self.suspects))
        if any(received.received_at < received_before for received in waiting):
            self.release()

    def is_current(self, received: Received) -> bool:
        """Whether it is still this member's."""
        return self._subscriber.is_current(received.delivery)

    def take_heads(self, limit: int) -> list[Received]:
        """Heads of ready lanes for which there are slots, with their slots taken."""
        return self.lanes.take(limit, self.take_slot)

    def take_slot(self, received: Received) -> Limit | None:
        """None: it has a slot now; else what it has to wait for."""
        obstacle = self._slots.obstacle(received.work.type)
        if obstacle is None:
            self._slots.take(received.work.type)
            received.slot = received.work.type
        return obstacle

    def leave_slot(self, received: Received) -> None:
        """Others may start in its place; nothing where it has none."""
        type_, received.slot = received.slot, None
        if type_ is not None:
            self._slots.give_back(type_)

    def suspect(self, received: Received, start: int) -> None:
        """It waits until it may be taken over, without a slot."""
        self.suspects.append(Suspect(received, start))
        self.leave_slot(received)

    def hold(self, received: Received, seconds: float) -> None:
        """It could not start: it stays the head of its lane, which rests."""
        self.leave_slot(received)
        if not received.is_acknowledged:  # else the database holds it
            self.lanes.hold(received, time.monotonic() + seconds)

    def give_way(self, received: Received, seconds: float) -> None:
        """Another of its lane runs, which may have to come by another partition: those are asked next."""
        self.leave_slot(received)
        self.lanes.give_way(received, time.monotonic() + seconds)

    def drop(self, received: Received) -> None:
        """It is not this member's any more."""
        self.leave_slot(received)
        self.lanes.finish(received)

    def finish(self, all_received: Sequence[Received]) -> None:
        """Their outcome is durable: acknowledge, and let their lanes go on."""
        for received in all_received:
            self.leave_slot(received)
        self.acknowledge([received for received in all_received if not received.is_acknowledged])

    def acknowledge(self, all_received: Sequence[Received]) -> None:
        """The database has them, or their outcome. Those that run keep their slots."""
        self._subscriber.acknowledge([received.delivery for received in all_received])
        for received in all_received:
            self.lanes.finish(received)
        self._wake.set()
