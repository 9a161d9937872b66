"""What the relay knows of its shards: leases, how far each is done, what waits to be sent again.

A shard's memory carries a stamp. Whatever was read or sent under an older stamp is dropped when it
comes back: that is how a lost lease, a reload and a failure discard what is in the pipeline.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from towpath.brokers.ports import OutboundMessage
from towpath.errors import MessageRefused
from towpath.store.journal import Progress
from towpath.store.outbox import ID, SHARD, Row
from towpath.store.parking import Gate, Gated


def boot_time() -> float:
    """Seconds on a clock that also runs while the machine or this process is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(frozen=True, slots=True)
class Part:
    """One shard's share of a batch."""

    done: Progress
    """How far the shard is once all its messages in the batch, maybe none, are settled."""
    stamp: int


@dataclass(slots=True)
class Batch:
    """Rows read for some shards, in id order, with the messages made of them."""

    rows: Sequence[Row]
    messages: list[OutboundMessage]
    parts: dict[int, Part]
    refused: dict[int, MessageRefused] = field(default_factory=dict)
    """Rows no message can be made of, by index; their messages are never sent."""
    parked: dict[int, Gate] = field(default_factory=dict)
    """Rows that wait behind a gate, by index; not sent now."""

    def select(self, indexes: Sequence[int], parts: dict[int, Part]) -> Batch:
        """Some of the messages, with the parts given."""
        refused = {at: self.refused[index] for at, index in enumerate(indexes) if index in self.refused}
        parked = {at: self.parked[index] for at, index in enumerate(indexes) if index in self.parked}
        rows, messages = self.rows, self.messages
        return Batch(
            [rows[index] for index in indexes], [messages[index] for index in indexes], parts, refused, parked
        )

    @property
    def is_offered(self) -> bool:
        """Whether the broker is asked at all."""
        return len(self.refused.keys() | self.parked.keys()) < len(self.messages)

    @property
    def size_bytes(self) -> int:
        """Bytes of its payloads."""
        return sum(len(message.payload) for message in self.messages if message.payload)

    @staticmethod
    def merged(batches: Sequence[Batch]) -> Batch:
        """Batches of different shards as one."""
        if len(batches) == 1:
            return batches[0]
        merged = Batch([], [], {})
        rows: list[Row] = []
        for batch in batches:
            merged.refused.update({len(rows) + index: refusal for index, refusal in batch.refused.items()})
            rows.extend(batch.rows)
            merged.messages.extend(batch.messages)
            merged.parts.update(batch.parts)
        merged.rows = rows
        return merged


@dataclass(slots=True, eq=False)
class Shard:
    """One leased shard."""

    number: int
    epoch: int
    lease_until: float
    """On the boot-time clock, counted from before the renewal was sent."""
    stamp: int
    done: Progress | None = None
    """None until loaded from the journal."""
    journaled: Progress | None = None
    journaled_at: float = 0.0
    journal_seq: int = 0
    """The number of the row that says so; 0: written by another relay, or before memory was dropped."""
    dirty_since: float | None = None
    """When `done` first moved over messages since `journaled`; None: it has not."""
    writes_then: int = 0
    """`Shards.own_writes` when it was journaled."""
    is_leaving: bool = False
    """To be released to another relay."""
    held: Batch | None = None
    """Messages that must be settled before anything else of the shard is read."""
    retry_at: float = 0.0
    failures: int = 0
    """Publishes in a row in which the broker failed this shard."""
    is_aside: bool = False
    """Published beside the others, since the broker failed it or kept it waiting."""
    tries: dict[int, int] = field(default_factory=dict)
    """Refusals by outbox id."""
    gated: Gated = field(default_factory=Gated)
    """Whether keys of it, or the shard itself, wait for a person's decision."""


class Shards:
    """The shards this relay holds, for one event loop. Times are on the boot-time clock."""

    def __init__(self, *, held_bytes: int) -> None:
        self._shards: dict[int, Shard] = {}
        self._held_bytes = held_bytes
        self._last_stamp = 0
        self.own_writes = 0
        """Transactions by which this relay itself moved the snapshot."""
        self.changed = asyncio.Event()
        """Set when a shard became readable or is to be released."""

    def __iter__(self) -> Iterator[Shard]:
        return iter(list(self._shards.values()))

    def __len__(self) -> int:
        return len(self._shards)

    def __contains__(self, shard: Shard) -> bool:
        return self._shards.get(shard.number) is shard

    def get(self, number: int) -> Shard | None:
        """The shard if it is held."""
        return self._shards.get(number)

    def _stamp(self) -> int:
        self._last_stamp += 1
        return self._last_stamp

    def acquire(self, number: int, epoch: int, lease_until: float) -> None:
        """A lease was taken; its progress is loaded before anything is read."""
        self._shards[number] = Shard(number, epoch, lease_until, self._stamp())
        self.changed.set()

    def leave(self, shard: Shard, *, is_leaving: bool) -> None:
        """Ask for its release at the next quiet moment, or take that back.

        What is in flight still counts; nothing more is read meanwhile.
        """
        if shard.is_leaving == is_leaving:
            return
        shard.is_leaving = is_leaving
        if not is_leaving:  # reading begins anew, from what is settled
            shard.stamp = self._stamp()
            if shard.held is not None:
                shard.held.parts = {
                    number: Part(part.done, shard.stamp) for number, part in shard.held.parts.items()
                }
        self.changed.set()

    def remove(self, number: int) -> None:
        """The lease is gone: everything known of the shard is dropped."""
        self._shards.pop(number, None)

    def forget(self) -> None:
        """Drop all memory of progress but keep the leases: the database may be behind it."""
        for shard in self:
            self.acquire(shard.number, shard.epoch, shard.lease_until)

    def loaded(self, progress: Mapping[int, Progress], gated: Mapping[int, Gated]) -> None:
        """Progress and gates came from the database."""
        for number, done in progress.items():
            shard = self._shards.get(number)
            if shard is not None and shard.done is None:
                shard.done = shard.journaled = done
                shard.gated = gated[number]
                shard.stamp = self._stamp()

    def gate(self, number: int, gated: Gated) -> None:
        """Gates of the shard were closed or removed; nothing more of a blocked shard is sent."""
        shard = self._shards.get(number)
        if shard is None:
            return
        if shard.gated.is_blocked != gated.is_blocked:
            shard.held = None  # read again afterwards, from `done`
            shard.stamp = self._stamp()
            self.changed.set()
        shard.gated = gated

    def doubt_gates(self, number: int) -> None:
        """What would have closed a gate was not answered: look before anything of the shard is sent."""
        shard = self._shards.get(number)
        if shard is not None:
            shard.gated = replace(shard.gated, has_gates=True)

    def readable(self, now: float) -> list[Shard]:
        """Shards whose next rows may be read: loaded, nothing held back, neither blocked nor leaving."""
        return [
            shard
            for shard in self
            if shard.done is not None
            and shard.held is None
            and now >= shard.retry_at
            and not shard.is_leaving
            and not shard.gated.is_blocked
        ]

    def tries_of(self, row: Row) -> int:
        """Count one more try of a refused message."""
        shard = self._shards.get(row[SHARD])
        if shard is None:
            return 1
        tries = shard.tries[row[ID]] = shard.tries.get(row[ID], 0) + 1
        return tries

    def is_current(self, number: int, part: Part) -> bool:
        """Whether what was read under the part's stamp is still worth anything."""
        shard = self._shards.get(number)
        return shard is not None and shard.stamp == part.stamp

    def is_moved_by_others(self, shard: Shard) -> bool:
        """Whether the shard's cut moved further than this relay's own transactions explain.

        Else an idle relay's journal rows would call for the next ones for ever.
        """
        if shard.done is None or shard.journaled is None or shard.done == shard.journaled:
            return False
        moved = shard.done.upto.xmax - shard.journaled.upto.xmax
        return moved > self.own_writes - shard.writes_then

    def settle(self, batch: Batch, left: Mapping[int, Sequence[int]]) -> None:
        """Advance every shard of the batch up to its first unsettled message.

        `left` lists the indexes still unsettled by shard, in order; they are held for another try.
        """
        has_rows = bool(batch.rows)
        for number, part in batch.parts.items():
            shard = self._shards.get(number)
            if shard is None or shard.stamp != part.stamp:
                continue
            indexes = left.get(number)
            if indexes:
                shard.done = progress_before(part, batch.rows[indexes[0]][ID])
                self._hold(shard, batch.select(indexes, {}), part)
            else:
                shard.done = part.done
                if shard.held is not None:
                    shard.held = None
                    self.changed.set()
                if shard.tries or shard.failures:
                    shard.tries.clear()
                    shard.failures = 0
            if has_rows and shard.dirty_since is None:
                shard.dirty_since = boot_time()

    def _hold(self, shard: Shard, messages: Batch, part: Part) -> None:
        shard.stamp = self._stamp()
        held = sum(other.held.size_bytes for other in self if other.held is not None and other is not shard)
        if held + messages.size_bytes > self._held_bytes:
            shard.held = None  # read again later, from `done`
        else:
            messages.parts = {shard.number: Part(part.done, shard.stamp)}
            shard.held = messages

    def is_aside(self, number: int) -> bool:
        """Whether the shard is published beside the others."""
        shard = self._shards.get(number)
        return shard is not None and shard.is_aside

    def due(self, now: float, *, row_limit: int, byte_limit: int, are_aside: bool = False) -> Batch | None:
        """Held messages whose time has come, of as many shards as fit; None when there are none.

        Either of the shards that are published beside the others, or of the others.
        """
        found: list[Batch] = []
        rows = size = 0
        for shard in self:
            held = shard.held
            if held is None or shard.retry_at > now or shard.is_aside != are_aside:
                continue
            rows, size = rows + len(held.rows), size + held.size_bytes
            if found and (rows > row_limit or size > byte_limit):
                break
            found.append(held)
        return Batch.merged(found) if found else None

    def next_retry(self, *, are_aside: bool = False) -> float:
        """When the earliest shard with held messages may try again; infinity where there is none."""
        held = (shard for shard in self if shard.held is not None and shard.is_aside == are_aside)
        return min((shard.retry_at for shard in held), default=math.inf)

    def journal_lag(self, now: float) -> float:
        """Seconds for which progress over messages has not been written down; a crash repeats those."""
        return max((now - shard.dirty_since for shard in self if shard.dirty_since is not None), default=0.0)

    @property
    def held_count(self) -> int:
        """Messages waiting for another try."""
        return sum(len(shard.held.rows) for shard in self if shard.held is not None)


def progress_before(part: Part, first_id: int) -> Progress:
    """How far a shard is when everything before the message with that id is settled."""
    return Progress(part.done.base, part.done.upto, first_id - 1)


def shards_of(rows: Iterable[Row]) -> set[int]:
    """The shards some rows belong to."""
    return {row[SHARD] for row in rows}
