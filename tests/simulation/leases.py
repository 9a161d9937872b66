"""The statements of leases and of the journal, as rules over the model of Postgres."""

import json
from dataclasses import replace
from uuid import UUID

from tests.simulation.postgres import GONE, Transaction
from tests.simulation.rows import Lease, Record
from tests.simulation.schema import Schema
from towpath.store.snapshot import Snapshot


class LeasedSchema(Schema):
    """With who may publish what, and how far it is."""

    def beat_relay(
        self, x: Transaction, relay: UUID, host: str, lease: float, broker: int, version: str
    ) -> list[Record]:
        self.xid(x)
        x.put(self.relays, relay, self.clock())
        others = [each for each, seen in self.relays.items() if each != relay and seen > self.clock() - lease]
        before = sum(each < relay for each in others)
        destinations = json.dumps({"orders": ["orders", self.policy]})
        return [
            {
                "living": 1 + len(others),
                "before": before,
                "is_known": True,
                "paused": [],
                "destinations": destinations,
            }
        ]

    def renew_leases(
        self, x: Transaction, relay: UUID, lease: float, shards: list[int], seqs: list[int]
    ) -> list[Record]:
        told = dict(zip(shards, seqs, strict=True))
        held = [
            (shard, each)
            for shard, each in self.leases.items()
            if each.relay == relay and each.until > self.clock()
        ]
        for shard, each in held:
            seq = told.get(shard)
            parts = self.journal[seq][0] if seq in self.journal else ()
            is_there = any(number == shard for number, _, _ in parts)
            journaled = max(each.journaled, seq) if seq is not None and is_there else each.journaled
            self._write_lease(x, shard, replace(each, until=self.clock() + lease, journaled=journaled))
        return [{"shard": shard, "epoch": each.epoch} for shard, each in held]

    def take_leases(
        self, x: Transaction, relay: UUID, lease: float, margin: float, count: int, first: int, last: int
    ) -> list[Record]:
        free = [
            (shard, each)
            for shard, each in sorted(self.leases.items())
            if first <= shard <= last
            and (each.relay is None or each.until + margin < self.clock())
            and not self.is_locked(("lease", shard), x)
        ][:count]
        for shard, each in free:
            self._write_lease(x, shard, Lease(relay, each.epoch + 1, self.clock() + lease, each.journaled))
        return [{"shard": shard, "epoch": each.epoch + 1} for shard, each in free]

    def lapse(self, relay: UUID) -> None:
        """Its leases are over, as if it had not renewed them in time."""
        for shard, lease in self.leases.items():
            if lease.relay == relay:
                self.leases[shard] = replace(lease, until=float("-inf"))

    def release_leases(
        self, x: Transaction, relay: UUID, shards: list[int], epochs: list[int]
    ) -> list[Record]:
        mine = [
            shard
            for shard, epoch in zip(shards, epochs, strict=True)
            if (self.leases[shard].relay, self.leases[shard].epoch) == (relay, epoch)
        ]
        for shard in mine:
            self._write_lease(x, shard, replace(self.leases[shard], relay=None))
        return [{"shard": shard} for shard in mine]

    def leave_relay(self, x: Transaction, relay: UUID) -> list[Record]:
        self.xid(x)
        for shard, lease in sorted(self.leases.items()):
            if lease.relay == relay:
                self._write_lease(x, shard, replace(lease, relay=None))
        x.put(self.relays, relay, GONE)
        return []

    def _write_lease(self, x: Transaction, shard: int, lease: Lease) -> None:
        self.lock(x, ("lease", shard))
        self.xid(x)
        x.put(self.leases, shard, lease)

    # Journal

    def load_progress(self, x: Transaction, shards: list[int]) -> list[Record]:
        newest = self._newest(min((self.leases[shard].journaled for shard in shards), default=0))
        return [
            {"shard": shard, "epoch": epoch, "last_id": last_id, "seq": seq, "is_ours": True,
             "snapshot_from": self.journal[seq][1].text, "snapshot_to": self.journal[seq][2].text}
            for shard, (epoch, seq, last_id) in newest.items() if shard in shards
        ]  # fmt: skip

    def _newest(self, first: int = 0) -> dict[int, tuple[int, int, int | None]]:
        """Epoch, number and last id of each shard's newest row: a higher epoch wins over a later row.

        Rows before `first` are not looked at.
        """
        newest: dict[int, tuple[int, int, int | None]] = {}
        for seq, (parts, _, _) in self.journal.items():
            for shard, epoch, last_id in parts if seq >= first else ():
                if shard not in newest or (epoch, seq) > newest[shard][:2]:
                    newest[shard] = (epoch, seq, last_id)
        return newest

    def holds(self, relay: UUID, shard: int, epoch: int) -> bool:
        """The fence: whether a relay still has a shard under its epoch."""
        lease = self.leases[shard]
        return bool((lease.relay, lease.epoch) == (relay, epoch) and lease.until > self.clock())

    def append_progress(
        self,
        x: Transaction,
        relay: UUID,
        shards: list[int],
        epochs: list[int],
        last_ids: list[int | None],
        base: str,
        upto: str,
        started_at: str,
        timeline: str,
    ) -> list[Record]:
        held = [shard for shard, epoch in zip(shards, epochs, strict=True) if self.holds(relay, shard, epoch)]
        for shard in held:
            self.lock(x, ("lease", shard))
        seq = None
        if len(held) == len(shards) and (started_at, timeline) == (str(self.starts), str(self.timeline)):
            self.xid(x)
            seq = self._next_id("journal")
            parts = tuple(zip(shards, epochs, last_ids, strict=True))
            x.put(self.journal, seq, (parts, Snapshot(base), Snapshot(upto)))
        return [{"seq": seq, "held": held}]

    def trim_journal(self, x: Transaction, seqs: list[int]) -> list[Record]:
        self.xid(x)
        for seq in seqs:
            x.put(self.journal, seq, GONE)
        return []

    def sweep_journal(self, x: Transaction, upto_seq: int) -> list[Record]:
        kept = {
            seq for _, seq, _ in self._newest(min(each.journaled for each in self.leases.values())).values()
        }
        return self.trim_journal(x, [seq for seq in self.journal if seq <= upto_seq and seq not in kept])
