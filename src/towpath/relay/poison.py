"""Messages the broker will not take: out of the way, in one transaction with the progress past them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import asyncpg

from towpath.errors import StoreUnavailable
from towpath.relay.hooks import RelayHooks
from towpath.relay.journaling import JournalWriter
from towpath.relay.progress import Batch, Shards, progress_before
from towpath.relay.publish import GivenUp, Verdicts, is_copy, is_pointer
from towpath.store.outbox import ID, SHARD, Row, Server
from towpath.store.parking import Gate, Gated, Parking
from towpath.store.unpublished import Unpublished


class Poison:
    """Puts given-up messages aside, and what must not overtake them.

    A message with a body goes to the dead-letter catalog; where its destination says so, a gate
    holds up its key or its shard until a person decides about it. A dead letter's copy is noted on
    its row: it never becomes a dead letter itself. The message of a submitted task, which has no
    body, is only skipped: its row is still there, and the reaper runs it; so nothing waits for it.
    """

    def __init__(
        self, journal: JournalWriter, store: Unpublished, parking: Parking, shards: Shards, hooks: RelayHooks
    ) -> None:
        self._journal = journal
        self._store = store
        self._parking = parking
        self._shards = shards
        self._hooks = hooks
        self.count = 0

    async def put_aside(self, batch: Batch, verdicts: Verdicts, server: Server) -> dict[int, Gated]:
        """Write catalog rows, gates, parked rows and journal, one transaction per shard.

        Returns what gates the shards have now. A lost lease drops the shard. Where the database is
        away, the shard's messages are moved to those to be published again. Raises MemoryStale as
        the journal does.
        """
        refused: dict[int, list[GivenUp]] = defaultdict(list)
        parked: dict[int, list[int]] = defaultdict(list)
        for given_up in verdicts.refused:
            refused[batch.rows[given_up.index][SHARD]].append(given_up)
        for index in verdicts.parked:
            parked[batch.rows[index][SHARD]].append(index)
        gated: dict[int, Gated] = {}
        for number in refused.keys() | parked.keys():
            try:
                state = await self._put_aside_in_shard(
                    batch, number, refused[number], parked[number], verdicts, server
                )
            except StoreUnavailable as error:
                self._hooks.store_unavailable(error, 0.0)
                self._shards.doubt_gates(number)
                verdicts.give_back(number, [*parked[number], *(each.index for each in refused[number])])
                continue
            if state is not None:
                gated[number] = state
                self.report(batch, refused[number])
        return gated

    async def _put_aside_in_shard(
        self,
        batch: Batch,
        number: int,
        refused: Sequence[GivenUp],
        parked: Sequence[int],
        verdicts: Verdicts,
        server: Server,
    ) -> Gated | None:
        shard = self._shards.get(number)
        part = batch.parts[number]
        if shard is None or shard.stamp != part.stamp:
            return None
        left = verdicts.left.get(number)
        done = progress_before(part, batch.rows[left[0]][ID]) if left else part.done
        behind: dict[Gate, list[Row]] = defaultdict(list)
        for index in parked:
            gate = verdicts.parked[index]
            if gate.sequence != batch.rows[index][ID]:  # else read again: it is in the catalog already
                behind[gate].append(batch.rows[index])
        async with self._journal.fenced(shard, done, server) as connection:
            if connection is None:
                return None
            for given_up in refused:
                await self.bury(connection, batch, given_up)
                if given_up.policy != "park":
                    await self._parking.close(connection, batch.rows[given_up.index], given_up.policy)
            if behind:
                await self._parking.park(connection, behind)
            return (await self._parking.state(connection, [number], server))[number]

    async def bury(self, connection: asyncpg.Connection[Any], batch: Batch, given_up: GivenUp) -> None:
        """Put one message where it belongs, in the transaction that is open."""
        row, message = batch.rows[given_up.index], batch.messages[given_up.index]
        if is_copy(row):
            await self._store.mark_copy(connection, row, given_up.refusal)
        elif not is_pointer(row):
            await self._store.bury(connection, row, message, given_up.refusal, given_up.tries)

    def report(self, batch: Batch, refused: Sequence[GivenUp]) -> None:
        """Count messages put aside, and tell."""
        for given_up in refused:
            self.count += 1
            row, message = batch.rows[given_up.index], batch.messages[given_up.index]
            is_buried = not is_copy(row) and not is_pointer(row)
            self._hooks.put_aside(
                message, given_up.refusal, given_up.tries, given_up.policy, is_buried=is_buried
            )
