"""Publish gates: what waits for a person, about a refused message or a paused destination, and its way out.

Rows behind a gate leave the outbox's flow: they are written into a table of their own, in the same
transaction as the progress past them, so the shard goes on and neither memory nor the ring of the
outbox grows with what waits. Only the owner of a shard closes, fills and empties its gates; a person
opens one by replaying or discarding its dead letter, or by resuming the destination.

While a destination has a gate in a shard, all of it goes there, also what a gate of its key waits
for; on its way out it goes behind that. So the two never change the order of a key.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final

import asyncpg

from towpath.relay.hooks import RelayHooks
from towpath.relay.journaling import JournalWriter
from towpath.relay.link import link_errors
from towpath.relay.options import RelayOptions
from towpath.relay.outbound import Outbound
from towpath.relay.pauses import Pauses
from towpath.relay.poison import Poison
from towpath.relay.progress import Batch, Part, Shards, boot_time
from towpath.relay.publish import GivenUp, Verdicts
from towpath.store.outbox import DESTINATION, ID, KEY, SHARD, OnPoison, Row, Server
from towpath.store.parking import GATE, Gate, Opened, Parking

_LOOK_SECONDS: Final = 1.0
_PAUSED: Final = Gate(None, None)
_GATES: Final = 200
"""Most gates emptied at once."""


class Gates:
    """The gates of the shards this relay owns. Uses the journal's connection."""

    def __init__(
        self,
        journal: JournalWriter,
        parking: Parking,
        poison: Poison,
        shards: Shards,
        pauses: Pauses,
        options: RelayOptions,
        hooks: RelayHooks,
    ) -> None:
        self._journal = journal
        self._parking = parking
        self._poison = poison
        self._shards = shards
        self._pauses = pauses
        self._options = options
        self._hooks = hooks
        self._look_at = 0.0
        self._tries: dict[int, int] = {}
        """Refusals of parked messages by outbox id."""
        self._released: dict[int, Opened] = {}
        """Gates being emptied."""
        self.count = 0
        """Gates of this relay's shards, at the last look."""

    def concerns(self, batch: Batch) -> bool:
        """Whether anything of the batch may have to wait."""
        if any(shard is not None and shard.gated.has_gates for shard in map(self._shards.get, batch.parts)):
            return True
        paused = self._pauses.destinations
        return bool(paused) and any(row[DESTINATION] in paused for row in batch.rows)

    async def parked(self, batch: Batch, server: Server) -> dict[int, Gate]:
        """The messages that wait behind a gate, by index. Raises StoreUnavailable."""
        paused = self._pauses.destinations
        rows = [row for row in batch.rows if self._is_gated(row[SHARD]) or row[DESTINATION] in paused]
        if not rows:
            return {}
        with link_errors():
            gates = await self._parking.gates_of(await self._journal.connection(), rows, server)
        found: dict[int, Gate] = {}
        if gates or paused:
            for index, row in enumerate(batch.rows):
                gate = gates.get((row[SHARD], row[DESTINATION], None))
                if gate is None and row[DESTINATION] in paused:
                    gate = _PAUSED
                gate = gate or gates.get((row[SHARD], row[DESTINATION], row[KEY]))
                if gate is not None:
                    found[index] = gate
        return found

    def _is_gated(self, number: int) -> bool:
        shard = self._shards.get(number)
        return shard is not None and shard.gated.has_gates

    def is_due(self, now: float) -> bool:
        """Whether to look for gates that were opened."""
        if now < self._look_at:
            return False
        if any(shard.gated.has_gates for shard in self._shards):
            return True
        if self.count:
            self.count = 0
            self._hooks.gates(0, 0)
        return False

    async def released(self, outbound: Outbound, server: Server) -> Batch | None:
        """The next messages behind gates that a person opened, maybe none; None: no gate is open.

        Raises StoreUnavailable.
        """
        self._look_at = boot_time() + _LOOK_SECONDS
        shards = [shard for shard in self._shards if shard.gated.has_gates and not shard.is_leaving]
        blocked = sum(shard.gated.is_blocked for shard in shards)
        numbers = [shard.number for shard in shards]
        options = self._options
        with link_errors():
            connection = await self._journal.connection()
            found = await self._parking.state(connection, numbers, server)
            self.count = await self._parking.count(connection, numbers)
            self._released = await self._parking.released(connection, numbers, server, limit=_GATES)
            if not self._released:
                for shard in shards:  # of what changed them the answer may have been lost
                    if shard in self._shards and shard.number in found:
                        self._shards.gate(shard.number, found[shard.number])
                self._hooks.gates(self.count, blocked)
                return None
            rows = await self._parking.behind(
                connection,
                list(self._released),
                row_limit=options.window_rows,
                byte_limit=options.window_bytes,
            )
            parked = await self._held_again(connection, rows, server)
        self._hooks.gates(self.count, blocked)
        messages, refused = outbound.messages(rows)
        parts = {
            shard.number: Part(shard.done, shard.stamp)
            for shard in shards
            if shard.done is not None and any(each.shard == shard.number for each in self._released.values())
        }
        return Batch(rows, messages, parts, refused, parked)

    async def _held_again(
        self, connection: asyncpg.Connection[Any], rows: Sequence[Row], server: Server
    ) -> dict[int, Gate]:
        """Messages of resumed destinations whose key has a gate of its own, by index: they go behind that."""
        resumed = {index: row for index, row in enumerate(rows) if self._released[row[GATE]].is_pause}
        gates = await self._parking.gates_of(connection, list(resumed.values()), server)
        return {
            index: gates[place]
            for index, row in resumed.items()
            if row[KEY] is not None and (place := (row[SHARD], row[DESTINATION], row[KEY])) in gates
        }

    def tries_of(self, row: Row) -> int:
        """Count one more try of a parked message."""
        tries = self._tries[row[ID]] = self._tries.get(row[ID], 0) + 1
        return tries

    async def settle(self, batch: Batch, verdicts: Verdicts, server: Server) -> None:
        """Forget what was sent or given up, close gates again, remove empty ones.

        Raises StoreUnavailable: what was sent is sent again. MemoryStale as the journal does.
        """
        left = {index for indexes in verdicts.left.values() for index in indexes}
        refused: dict[int, list[GivenUp]] = defaultdict(list)
        settled: dict[int, list[Row]] = defaultdict(list)
        for given_up in verdicts.refused:
            refused[batch.rows[given_up.index][SHARD]].append(given_up)
        for index, row in enumerate(batch.rows):
            if index not in left:
                settled[row[SHARD]].append(row)
        for number in batch.parts:
            parked = {index: g for index, g in verdicts.parked.items() if batch.rows[index][SHARD] == number}
            await self._settle_shard(batch, number, settled[number], refused[number], parked, server)
        now = boot_time()
        if verdicts.retry_refused:
            tries = max(self._tries.values(), default=1)
            self._look_at = now + self._options.backoff.delay(tries).total_seconds()
        elif batch.parts and not left:
            self._look_at = now  # there may be more

    async def _settle_shard(
        self,
        batch: Batch,
        number: int,
        settled: Sequence[Row],
        refused: Sequence[GivenUp],
        parked: Mapping[int, Gate],
        server: Server,
    ) -> None:
        shard = self._shards.get(number)
        if shard is None or shard.done is None:
            return
        gates = [gate for gate, opened in self._released.items() if opened.shard == number]
        moved: dict[Gate, list[Row]] = defaultdict(list)
        for index, gate in parked.items():
            if gate.sequence != batch.rows[index][ID]:  # else it is in the catalog already
                moved[gate].append(batch.rows[index])
        async with self._journal.fenced(shard, shard.done, server) as connection:
            if connection is None:
                return
            for given_up in refused:
                await self._poison.bury(connection, batch, given_up)
                if given_up.policy != "park":
                    await self._close(connection, batch.rows[given_up.index], given_up.policy)
            if moved:
                await self._parking.park(connection, moved)
            if settled:
                await self._parking.unpark(connection, settled)
            removed = await self._parking.remove(connection, gates)
            state = (await self._parking.state(connection, [number], server))[number]
        self._shards.gate(number, state)
        for row in settled:
            self._tries.pop(row[ID], None)
        self._poison.report(batch, refused)
        if removed or settled:
            closed = {batch.rows[each.index][GATE] for each in refused if each.policy != "park"}
            sent = len(settled) - len(refused) - len(parked)
            self._hooks.gate_released(number, sent, len(removed), len(closed))

    async def _close(self, connection: asyncpg.Connection[Any], row: Row, policy: OnPoison) -> None:
        """A message that had waited was refused: its gate, or one of its own, waits for a decision now."""
        if self._released[row[GATE]].is_pause:
            await self._parking.close(connection, row, policy)
        else:
            await self._parking.close_again(connection, row, policy)
