"""What of a window may be published at this moment; the rest of it is left for later."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from towpath.relay.aside import Aside
from towpath.relay.options import RelayOptions
from towpath.relay.progress import Batch, Shards, boot_time
from towpath.store.outbox import SHARD

_UNCOVERED_SECONDS: Final = 0.2
"""How soon to look again at a shard whose lease was too short for a publish."""


class Admission:
    """Asks leases, memory and the window beside."""

    def __init__(self, shards: Shards, aside: Aside, options: RelayOptions) -> None:
        self._shards = shards
        self._aside = aside
        self._options = options

    def covered(self, batch: Batch) -> tuple[list[int], list[int]]:
        """Shards of a batch that are as they were read: with a lease that covers a publish, and without.

        What is being published beside is not covered for anything else. Nothing may be awaited between this
        and handing the messages to the broker's client.
        """
        now = boot_time()
        needed = self._options.publish_deadline + self._options.margin
        aside = self._aside.shards if batch is not self._aside.batch else ()
        covered: list[int] = []
        uncovered: list[int] = []
        for number, part in batch.parts.items():
            shard = self._shards.get(number)
            if shard is not None and shard.stamp == part.stamp:
                is_covered = shard.lease_until - now >= needed and number not in aside
                (covered if is_covered else uncovered).append(number)
        return covered, uncovered

    def admitted(self, batch: Batch) -> Batch | None:
        """The part of a batch that may be published now; what a lease does not cover is left for later."""
        covered, uncovered = self.covered(batch)
        if batch is not self._aside.batch:
            apart = [number for number in covered if self._shards.is_aside(number)]
            self.leave(batch, apart, boot_time())
            covered = [number for number in covered if number not in apart]
        if len(covered) == len(batch.parts):
            return batch
        self.leave(batch, uncovered, boot_time() + _UNCOVERED_SECONDS)
        return only(batch, covered) if covered else None

    def leave(self, batch: Batch, numbers: Iterable[int], retry_at: float) -> None:
        """Everything of these shards is published later."""
        for number in numbers:
            waiting = only(batch, [number])
            self._shards.settle(waiting, {number: range(len(waiting.rows))})
            shard = self._shards.get(number)
            if shard is not None:
                shard.retry_at = retry_at


def only(batch: Batch, numbers: list[int]) -> Batch:
    """The part of a batch that belongs to some shards."""
    wanted = set(numbers)
    indexes = [index for index, row in enumerate(batch.rows) if row[SHARD] in wanted]
    return batch.select(indexes, {number: batch.parts[number] for number in numbers})
