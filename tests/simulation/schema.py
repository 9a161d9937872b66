"""The statements that read the outbox, as rules over the model of Postgres, each stated once.

A method is named after its statement and takes what that takes. `test_conformance` runs both side by
side.
"""

import random
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from uuid import UUID

from tests.simulation.postgres import Postgres, Table, Transaction
from tests.simulation.rows import COLUMNS, ID, SHARD, SHARDS, Lease, OutboxRow, Record
from towpath.store.installed import SCHEMA_VERSION
from towpath.store.snapshot import Snapshot


class Schema(Postgres):
    """The tables of a relay, and its statements."""

    def __init__(self, clock: Callable[[], float], rnd: random.Random) -> None:
        super().__init__(clock, rnd)
        self.outbox: Table = {}
        """Rows by the id of their transaction."""
        self.leases: Table = {shard: Lease() for shard in SHARDS}
        self.relays: Table = {}
        self.journal: Table = {
            0: (tuple((shard, 0, None) for shard in SHARDS), self.snapshot(), self.snapshot())
        }
        self.gates: Table = {}
        self.parked: Table = {}
        self.letters: Table = {}
        self.policy = "park"
        self._ids = {"outbox": 0, "journal": 0, "gate": 0}

    def _next_id(self, sequence: str) -> int:
        self._ids[sequence] += 1  # never taken back
        return self._ids[sequence]

    # Producers and people

    def emit(self, x: Transaction, row: OutboxRow) -> OutboxRow:
        """Write one row, under an id that it draws and the writer's transaction id."""
        xid = self.xid(x)
        written = row.but(id=self._next_id("outbox"))
        x.put(self.outbox, xid, (*self.outbox.get(xid, ()), written))
        return written

    def decide(self, x: Transaction, message_id: UUID, *, is_replayed: bool) -> None:
        """Replay or discard an open dead letter."""
        letter = self.letters[message_id]
        self.xid(x)
        is_gated = False
        for number, gate in list(self.gates.items()):
            if gate.message_id == message_id and not gate.is_released:
                is_gated = True
                x.put(self.gates, number, replace(gate, is_released=True))
                if is_replayed:
                    x.put(self.parked, (number, gate.sequence), letter.row)
        if is_replayed and not is_gated:
            self.emit(x, letter.row)
        state = "replayed" if is_replayed else "discarded"
        x.put(self.letters, message_id, replace(letter, state=state))

    def release(self, gate: int) -> None:
        """A person opens a gate."""
        self.gates[gate] = replace(self.gates[gate], is_released=True)

    # Reading

    def _is_seen(self, xid: int, snapshot: Snapshot) -> bool:
        return snapshot.sees(xid) and xid not in self.running

    def _window(
        self, shards: Sequence[int], xmax: int, late: Iterable[int], end: Snapshot
    ) -> list[tuple[int, OutboxRow]]:
        """(xid, row) of what is visible at the end of the window and was not at its beginning."""
        xids = [xid for xid in late if self._is_seen(xid, end)]
        xids += [xid for xid in self.outbox if xmax <= xid < end.xmax and self._is_seen(xid, end)]
        return [(xid, row) for xid in xids for row in self.outbox.get(xid, ()) if row[SHARD] in shards]

    def poll(
        self, x: Transaction, xmax: str, shards: list[int], late: str, upto: str | None, limit: int, size: int
    ) -> list[OutboxRow]:
        now = self.snapshot()
        end = Snapshot(upto) if upto else now
        rows: list[OutboxRow] = []
        upto_here = 0
        for _, row in self._window(shards, int(xmax), _xids(late), end)[:limit]:
            upto_here += row.size
            rows.append(row.but(fits=upto_here <= size or upto_here == row.size))
        head = dict.fromkeys(COLUMNS) | {
            "id": 0, "kind": now.text, "destination": end.text, "type": str(self.starts),
            "key": str(self.timeline), "content_type": "1", "fits": True,
        }  # fmt: skip
        return [OutboxRow(head.values()), *sorted(rows)]

    def list_keys(
        self, x: Transaction, shards: list[int], xmax: str, late: str, upto: str, after: list[int], limit: int
    ) -> list[Record]:
        end = Snapshot(upto)
        found = []
        for shard, after_id in zip(shards, after, strict=True):
            keys = sorted((row[ID], xid) for xid, row in self._window([shard], int(xmax), _xids(late), end))
            packed = [struct.pack("!QQ", xid, id_) for id_, xid in keys if id_ > after_id][:limit]
            found.append({"shard": shard, "keys": b"".join(packed)})
        return found

    def fetch_keys(
        self, x: Transaction, shards: list[int], xids: str, first: list[int], last: list[int], size: int
    ) -> list[OutboxRow]:
        ranges = zip(shards, _xids(xids), first, last, strict=True)
        rows = sorted(
            row
            for shard, xid, from_id, to_id in ranges
            for row in self.outbox.get(xid, ())
            if row[SHARD] == shard and from_id <= row[ID] <= to_id
        )
        upto_here = 0
        fitting = []
        for row in rows:
            upto_here += row.size
            if upto_here <= size or upto_here == row.size:
                fitting.append(row)
        return fitting

    def server(self, x: Transaction) -> list[Record]:
        return [
            {
                "started_at": str(self.starts),
                "timeline": str(self.timeline),
                "backend": "1",
                "snapshot": self.snapshot().text,
            }
        ]

    def facts(self, x: Transaction) -> list[Record]:
        return [{"version": SCHEMA_VERSION, "compatible_from": SCHEMA_VERSION, "shards": len(SHARDS)}]

    def installation(self, x: Transaction) -> list[Record]:
        return [{"value": "installation"}]

    def recognise(self, x: Transaction, broker: int, cluster: str | None, home: str) -> list[Record]:
        return [{"cluster": None, "home": home}]


def _xids(text: str) -> list[int]:
    return [int(xid) for xid in text.strip("{}").split(",") if xid]
