"""The rules of the model are those of Postgres: random histories, statement by statement on both."""

import random
import time
from collections.abc import Sequence
from typing import Any
from uuid import UUID

import asyncpg
import pytest

from tests.simulation.direct import Direct
from tests.simulation.gates import GatedSchema
from tests.simulation.postgres import Transaction
from tests.simulation.rows import SHARDS
from tests.simulation.world import message_row
from towpath.store.journal import Journal, JournalEntry
from towpath.store.leases import Leases
from towpath.store.outbox import ID, KEY, PAYLOAD, SHARD, KeyRanges, OutboxReader
from towpath.store.parking import GATE, Parking
from towpath.store.snapshot import Snapshot

KEYS = 3
RELAYS = [UUID(int=1), UUID(int=2)]
LEASE = 3600.0
INSERT = """
insert into towpath.outbox (shard, message_id, kind, destination, type, key, content_type, headers, payload)
values ($1, $2, 'event', 'orders', 't', $3, 'application/json', '[]', $4) returning id
"""
POLICY = "insert into towpath.destination (name, address, on_poison) values ('orders', 'orders', 'park_key')"
LAPSE = "update towpath.shard_lease set lease_until = '-infinity' where relay = $1"


class Pair:
    """One history on both sides. Ids and snapshots differ and are compared by what they stand for."""

    def __init__(self, connection: "asyncpg.Connection[Any]", url: str, seed: int) -> None:
        self.rnd = random.Random(seed)
        self.schema = GatedSchema(time.monotonic, self.rnd)
        self.sides: tuple[Any, Any] = (connection, Direct(self.schema))
        self.readers = [OutboxReader(side) for side in self.sides]
        self.leases, self.journal, self.parking = Leases(), Journal(), Parking()
        self.url = url
        self.writers: list[tuple[Any, Any, Transaction]] = []
        self.cuts: list[tuple[Snapshot, Snapshot]] = []
        self.epochs: list[dict[int, int]] = [{}, {}]
        self.journaled: list[dict[int, int]] = [{}, {}]
        """By side, the number of each shard's newest row."""
        self.count = 0
        self.rows: dict[int, tuple[Any, Any]] = {}
        """Of every message polled: the row on either side."""

    async def start(self) -> None:
        await self.readers[0].prepare()
        self.servers = []
        found = []
        for reader in self.readers:
            server, snapshot = await reader.server()
            self.servers.append(server)
            found.append(snapshot)
        self.cuts.append((found[0], found[1]))

    async def step(self) -> None:
        often = (self.write, self.write, self.poll, self.poll, self.end, self.append)
        seldom = (self.begin, self.read_window, self.take, self.renew, self.release, self.lapse, self.load)
        gates = (self.close, self.park, self.decide, self.empty)
        await self.rnd.choice((*often, *often, *seldom, *gates))()

    async def begin(self) -> None:
        if len(self.writers) < 4:
            connection = await asyncpg.connect(self.url, timeout=60)
            transaction = connection.transaction()
            await transaction.start()
            self.writers.append((connection, transaction, self.schema.begin()))

    async def write(self) -> None:
        if not self.writers:
            return
        connection, _, x = self.rnd.choice(self.writers)
        self.count += 1
        row = message_row(self.count, str(self.rnd.randrange(KEYS)))
        if is_taken_back := self.rnd.random() < 0.2:
            await connection.execute("savepoint s")
        undone = len(x.undo)
        await connection.execute(INSERT, row[SHARD], row["message_id"], row["key"], row[PAYLOAD])
        self.schema.emit(x, row)
        if is_taken_back:
            await connection.execute("rollback to s")
            x.back_to(undone)

    async def end(self) -> None:
        if not self.writers:
            return
        connection, transaction, x = self.writers.pop(self.rnd.randrange(len(self.writers)))
        if self.rnd.random() < 0.7:
            await transaction.commit()
            self.schema.commit(x)
        else:
            await transaction.rollback()
            self.schema.rollback(x)
        await connection.close(timeout=60)

    def _window(self) -> tuple[tuple[Snapshot, Snapshot], tuple[Snapshot, Snapshot]]:
        first, last = sorted((self.rnd.randrange(len(self.cuts)), self.rnd.randrange(len(self.cuts))))
        return self.cuts[first], self.cuts[last]

    def _shards(self) -> list[int]:
        return self.rnd.sample(SHARDS, self.rnd.randint(1, len(SHARDS)))

    async def poll(self) -> None:
        base, upto = self._window()
        shards, is_now, limit = self._shards(), self.rnd.random() < 0.6, self.rnd.choice((3, 1000))
        found = [
            await reader.poll(
                shards, base[side], None if is_now else upto[side], row_limit=limit, byte_limit=10**9
            )
            for side, reader in enumerate(self.readers)
        ]
        assert found[0].is_truncated == found[1].is_truncated
        if not found[0].is_truncated:
            self._same_rows(found[0].rows, found[1].rows)
        if is_now:
            self.cuts.append((found[0].upto, found[1].upto))

    def _same_rows(self, real: Sequence[Any], model: Sequence[Any]) -> None:
        assert [row[PAYLOAD] for row in real] == [row[PAYLOAD] for row in model]
        self.rows |= {int(row[PAYLOAD]): (row, twin) for row, twin in zip(real, model, strict=True)}

    async def read_window(self) -> None:
        base, upto = self._window()
        shards = self._shards()
        after = dict.fromkeys(shards, (0, 0))
        if self.rows:
            after[shards[0]] = tuple(row[ID] for row in self.rnd.choice(list(self.rows.values())))
        limit, fetched = self.rnd.randint(1, 5), []
        for side, reader in enumerate(self.readers):
            lists = await reader.list_keys(
                {shard: ids[side] for shard, ids in after.items()}, base[side], upto[side], limit=limit
            )
            ranges = KeyRanges()
            for shard in shards:
                ranges.add(shard, lists[shard].first(limit))
            fetched.append(await reader.fetch(ranges, byte_limit=10**9) if ranges.count else [])
        self._same_rows(*fetched)

    async def take(self) -> None:
        place, count = self.rnd.randrange(2), self.rnd.randint(1, 8)
        taken = [
            await self.leases.take(
                side,
                RELAYS[place],
                lease_seconds=LEASE,
                margin_seconds=0,
                count=count,
                shards=SHARDS,
            )
            for side in self.sides
        ]
        assert taken[0] == taken[1]
        self.epochs[place] |= taken[0]

    async def renew(self) -> None:
        relay = self.rnd.choice(RELAYS)
        beats = [await self.leases.beat(side, relay, "host", LEASE) for side in self.sides]
        told: list[dict[int, int]] = [{}, {}]
        for shard in self.journaled[0]:
            chance = self.rnd.random()  # where memory is ahead of the server, the row is not there
            for side, newest in enumerate(self.journaled):
                if chance < 0.8:
                    told[side][shard] = newest[shard] + (10**6 if chance < 0.2 else 0)
        renewed = [
            await self.leases.renew(side, relay, LEASE, seqs)
            for side, seqs in zip(self.sides, told, strict=True)
        ]
        assert (beats[0], renewed[0]) == (beats[1], renewed[1])

    async def release(self) -> None:
        place = self.rnd.randrange(2)
        for side in self.sides:
            await self.leases.release(side, RELAYS[place], dict(list(self.epochs[place].items())[:3]))

    async def lapse(self) -> None:
        if self.rnd.random() < 0.3:
            relay = self.rnd.choice(RELAYS)
            await self.sides[0].execute(LAPSE, relay)
            self.schema.lapse(relay)

    async def append(self) -> None:
        """Under epochs that were once given: some are still held."""
        place = self.rnd.randrange(2)
        known = self.epochs[place]
        if not known:
            return
        shards = self.rnd.sample(sorted(known), self.rnd.randint(1, min(3, len(known))))
        base, upto = self._window()
        last_ids = {shard: self.rnd.choice((None, 5, 9)) for shard in shards}
        appended = [
            await self.journal.append(
                connection,
                RELAYS[place],
                JournalEntry(base[side], upto[side], {shard: known[shard] for shard in shards}, last_ids),
                self.servers[side],
            )
            for side, connection in enumerate(self.sides)
        ]
        assert (appended[0].seq is None, appended[0].held) == (appended[1].seq is None, appended[1].held)
        for side, each in enumerate(appended):
            if each.seq is not None:
                self.journaled[side] |= dict.fromkeys(shards, each.seq)

    async def load(self) -> None:
        shards = self._shards()
        loaded = [await self.journal.load(side, shards) for side in self.sides]
        assert loaded[0].keys() == loaded[1].keys() == set(shards)
        for shard in shards:
            real, model = loaded[0][shard], loaded[1][shard]
            assert real.last_id == model.last_id
            if model.upto != self.schema.journal[0][2]:  # else it is as at the installation
                assert {(real.base, model.base), (real.upto, model.upto)} <= set(self.cuts)

    async def close(self) -> None:
        if not self.rows:
            return
        rows = self.rnd.choice(list(self.rows.values()))
        for side, connection in enumerate(self.sides):
            await self.parking.close(connection, rows[side], "park_key")
        await self._same_gates()

    async def _gates(self) -> list[dict[Any, Any]]:
        """By lane: the gate of either side."""
        rows = [[pair[side] for pair in self.rows.values()] for side in (0, 1)]
        return [
            await self.parking.gates_of(connection, rows[side], self.servers[side])
            for side, connection in enumerate(self.sides)
        ]

    async def _same_gates(self) -> None:
        real, model = await self._gates()
        assert real.keys() == model.keys()
        states = [
            await self.parking.state(connection, list(SHARDS), self.servers[side])
            for side, connection in enumerate(self.sides)
        ]
        assert states[0] == states[1]

    async def park(self) -> None:
        real, model = await self._gates()
        for lane in real:
            behind = [pair for pair in self.rows.values() if pair[0][6] == lane[2]][:2]
            for side, gates in enumerate((real, model)):
                await self.parking.park(self.sides[side], {gates[lane]: [pair[side] for pair in behind]})

    async def decide(self) -> None:
        """A person opens a gate, without its message."""
        real, model = await self._gates()
        if real:
            lane = self.rnd.choice(sorted(real))
            await self.sides[0].execute(
                "update towpath.publish_gate set released_at = clock_timestamp() where id = $1", real[lane].id
            )
            self.schema.release(model[lane].id)

    async def empty(self) -> None:
        """What is behind open gates, out of which a part is sent."""
        share, found = self.rnd.randint(1, 3), []
        for side, connection in enumerate(self.sides):
            released = await self.parking.released(connection, list(SHARDS), self.servers[side], limit=10)
            rows = await self.parking.behind(connection, list(released), row_limit=share, byte_limit=10**9)
            await self.parking.unpark(connection, rows)
            removed = await self.parking.remove(connection, list(released))
            place = {gate: number for number, gate in enumerate(released)}
            found.append(
                (
                    list(released.values()),
                    [(row[PAYLOAD], row[KEY], place[row[GATE]]) for row in rows],
                    sorted(place[gate] for gate in removed),
                    await self.parking.count(connection, list(SHARDS)),
                )
            )
        assert found[0] == found[1]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(4))
async def test_the_model_answers_as_postgres_does(
    db: "asyncpg.Connection[Any]", migrated_url: str, seed: int
) -> None:
    """R2, R5: the rules the simulation rests on, over snapshots, leases, the journal and publish gates."""
    await db.execute(POLICY)
    pair = Pair(db, migrated_url, seed)
    pair.schema.policy = "park_key"
    await pair.start()
    try:
        for _ in range(150):
            await pair.step()
    finally:
        for connection, _, _ in pair.writers:
            await connection.close(timeout=60)
    assert pair.rows, "nothing was ever read"
