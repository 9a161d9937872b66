"""The statements of publish gates and of the catalog, as rules over the model of Postgres."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from uuid import UUID

from tests.simulation.leases import LeasedSchema
from tests.simulation.postgres import GONE, Transaction
from tests.simulation.rows import FITS, ID, SHARD, Gate, Letter, OutboxRow, Record


class GatedSchema(LeasedSchema):
    """With what waits for a person's decision."""

    def bury_unpublished(self, x: Transaction, message_id: UUID, *columns: Any) -> list[Record]:
        type_, kind, destination, key, sequence, payload, content_type, headers, *_ = columns
        shard = next(row[SHARD] for rows in self.outbox.values() for row in rows if row[ID] == sequence)
        row = OutboxRow(
            (
                sequence,
                shard,
                message_id,
                kind,
                destination,
                type_,
                key,
                content_type,
                headers,
                payload,
                0,
                shard,
                True,
            )
        )
        x.put(self.letters, message_id, Letter(row))
        return []

    def state(self, x: Transaction, shards: Sequence[int], started_at: str) -> list[Record]:
        policies = {
            shard: {gate.policy for gate in self.gates.values() if gate.shard == shard} for shard in shards
        }
        return [
            {"shard": shard, "has_gates": bool(found), "is_blocked": "block" in found}
            for shard, found in policies.items()
            if started_at == str(self.starts)
        ]

    def gates_of(
        self, x: Transaction, shards: list[int], destinations: list[str], keys: list[str], started_at: str
    ) -> list[Record]:
        if started_at != str(self.starts):
            return [dict.fromkeys(("gate", "shard", "destination", "key", "sequence"))]
        wanted = set(zip(shards, destinations, keys, strict=True))
        return [
            {
                "gate": number,
                "shard": gate.shard,
                "destination": gate.destination,
                "key": gate.key,
                "sequence": gate.sequence,
            }
            for number, gate in self.gates.items()
            if (gate.shard, gate.destination, gate.key) in wanted
        ]

    def close(
        self,
        x: Transaction,
        shard: int,
        destination: str,
        key: str | None,
        policy: str,
        message_id: UUID,
        sequence: int,
    ) -> list[Record]:
        lane = (shard, destination, key)
        number = next(
            (
                number
                for number, gate in self.gates.items()
                if key is not None and (gate.shard, gate.destination, gate.key) == lane
            ),
            None,
        )
        x.put(
            self.gates,
            self._next_id("gate") if number is None else number,
            Gate(shard, destination, key, policy, message_id, sequence),
        )
        return []

    def close_again(
        self, x: Transaction, number: int, policy: str, message_id: UUID, sequence: int
    ) -> list[Record]:
        if number in self.gates:
            gate = replace(
                self.gates[number], policy=policy, message_id=message_id, sequence=sequence, is_released=False
            )
            x.put(self.gates, number, gate)
        return []

    def park(self, x: Transaction, gates: list[int], ids: list[int], *columns: list[Any]) -> list[Record]:
        for number, id_, message_id, kind, type_, key, content_type, headers, payload, created_at in zip(
            gates, ids, *columns, strict=True
        ):
            if (number, id_) not in self.parked:
                gate = self.gates[number]
                row = (id_, gate.shard, message_id, kind, gate.destination, type_, key, content_type,
                       headers, payload, created_at, gate.shard, True)  # fmt: skip
                x.put(self.parked, (number, id_), OutboxRow(row))
        return []

    def released(self, x: Transaction, shards: list[int], limit: int, started_at: str) -> list[Record]:
        return [
            {"gate": number, "shard": gate.shard, "is_pause": False}
            for number, gate in sorted(self.gates.items())
            if gate.shard in shards and gate.is_released and started_at == str(self.starts)
        ][:limit]

    def behind(self, x: Transaction, gates: list[int], share: int, size: int) -> list[OutboxRow]:
        rows = []
        for number in sorted(gates):
            waiting = sorted((id_, row) for (gate, id_), row in self.parked.items() if gate == number)
            rows += [OutboxRow((id_, *row[1:FITS], number)) for id_, row in waiting[:share]]
        upto_here = 0
        fitting = []
        for row in rows:
            upto_here += row.size
            if upto_here <= size or upto_here == row.size:
                fitting.append(row)
        return fitting

    def unpark(self, x: Transaction, gates: list[int], ids: list[int]) -> list[Record]:
        for place in zip(gates, ids, strict=True):
            x.put(self.parked, place, GONE)
        return []

    def remove(self, x: Transaction, gates: list[int]) -> list[Record]:
        filled = {number for number, _ in self.parked}
        empty = [
            number
            for number in gates
            if number in self.gates and self.gates[number].is_released and number not in filled
        ]
        for number in empty:
            x.put(self.gates, number, GONE)
        return [{"id": number} for number in empty]

    def count(self, x: Transaction, shards: list[int]) -> list[Record]:
        return [{"count": sum(gate.shard in shards for gate in self.gates.values())}]
