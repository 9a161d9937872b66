"""What is around relays in a history: a database and a broker, writers and a person, and the verdict."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from tests.simulation.broker import Arrival, SimBroker
from tests.simulation.gates import GatedSchema
from tests.simulation.links import Server
from tests.simulation.loop import Process, SimLoop
from tests.simulation.plan import Fault, Step, Write
from tests.simulation.postgres import Blocked, Transaction
from tests.simulation.rows import OutboxRow


@dataclass
class Account:
    """What came of a history."""

    trace: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    arrivals: list[Arrival] = field(default_factory=list)

    @property
    def sent(self) -> int:
        """Messages, without repeats."""
        return len({arrival.number for arrival in self.arrivals})

    @property
    def summary(self) -> str:
        last = self.arrivals[-1].at if self.arrivals else 0.0
        return f"{self.sent} messages arrived {len(self.arrivals)} times, the last at {last:.6f} s"


class World:
    """Of one run of a plan."""

    def __init__(self, loop: SimLoop, seed: int, steps: Sequence[Step]) -> None:
        self._loop = loop
        self._rnd = random.Random(f"run {seed}")
        self._steps = steps
        self.account = Account()
        self._schema = GatedSchema(loop.time, self._rnd)
        self._schema.policy = ("park_key", "block", "park_key", "park")[seed // 2 % 4]
        self._server = Server(loop, self._schema, self._rnd)
        self._poison = {step.number for step in steps if isinstance(step, Write) and step.is_poison}
        self._cured: set[int] = set()
        self._discarded: set[int] = set()
        self._is_calm = not self._poison and not any(isinstance(step, Fault) for step in steps)
        delay = 0.01 if self._is_calm else self._rnd.choice((0.02, 0.2, 0.4))
        self._broker = SimBroker(loop, self._rnd, self._is_refused, self._owns, delay)
        self._committed: dict[Any, Any] = {}
        """By message: its key and place in the order of the key."""
        self._decided_at = 0.0
        self._lost_by_failover: set[int] = set()

    def _is_refused(self, number: int) -> bool:
        return number in self._poison - self._cured

    def _owns(self, process: Process, key: str | None) -> bool:
        """Whether the database says so."""
        lease = self._schema.leases[_shard(key)]
        return bool(lease.relay == process.owner and lease.until > self._loop.time())

    def _note(self, text: str) -> None:
        self.account.trace.append(f"{self._loop.time():7.3f}  {text}")

    async def _write(self, write: Write) -> None:
        schema = self._schema
        await self._server.up.wait()
        x = schema.begin()
        if write.is_early:
            schema.xid(x)
            await asyncio.sleep(self._rnd.expovariate(1 / 0.3))
        if not await self._locked(x, write.key):
            return
        for number in range(write.number, write.number + write.count):
            if write.has_ghost and number == write.number:
                savepoint = len(x.undo)
                schema.emit(x, message_row(-1, write.key))
                x.back_to(savepoint)
            row = schema.emit(x, message_row(number, write.key))
            x.put(self._committed, number, (write.key, row["id"]))
        await asyncio.sleep(write.seconds)
        if x.is_over:
            self._note(f"the transaction of {write.number} was lost in a crash")
        elif write.is_rolled_back:
            schema.rollback(x)
        else:
            schema.commit(x)

    async def _locked(self, x: Transaction, key: str) -> bool:
        """Take the hot row; False when the server died meanwhile."""
        while not x.is_over:
            try:
                self._schema.lock(x, ("hot", key))
            except Blocked:
                await asyncio.sleep(0.05)
            else:
                return True
        return False

    def _decide(self) -> None:
        """A person looks at the catalog now and then."""
        if not self._server.is_up:
            return
        unseen = self._schema.unseen(self._schema.letters)
        for message_id, letter in list(self._schema.letters.items()):
            if message_id in unseen or letter.state != "open" or self._rnd.random() < 0.5:
                continue
            self._decided_at = self._loop.time()
            number = int(letter.row["payload"])
            is_replayed = self._rnd.random() < 0.7 and number not in self._discarded
            if is_replayed:
                self._cured.add(number)
            else:
                self._discarded.add(number)
            self._note(f"{'replay' if is_replayed else 'discard'} {number}")
            x = self._schema.begin()
            self._schema.decide(x, message_id, is_replayed=is_replayed)
            self._schema.commit(x)

    def _expected(self) -> dict[int, tuple[str, int]]:
        running = self._schema.unseen(self._committed)
        return {
            number: place
            for number, place in self._committed.items()
            if number not in self._discarded | running
        }

    def _is_complete(self) -> bool:
        arrived = {arrival.number for arrival in self._broker.arrivals}
        is_open = any(letter.state == "open" for letter in self._schema.letters.values())
        return (
            not self._schema.running
            and self._expected().keys() <= arrived
            and not (self._schema.gates or self._schema.parked or is_open)
        )

    def _judge(self) -> None:
        arrivals = self._broker.arrivals
        expected, wrong = self._expected(), self.account.wrong
        numbers = [arrival.number for arrival in arrivals]
        self.account.arrivals = arrivals
        if lost := sorted(expected.keys() - set(numbers)):
            wrong.append(f"lost: {lost}")
        if ghosts := sorted(set(numbers) - self._committed.keys() - self._lost_by_failover):
            wrong.append(f"published and not committed: {ghosts}")
        if inverted := self._inverted(expected, numbers):
            wrong.append(f"out of order: {inverted}")
        if trespasses := self._broker.trespasses:
            wrong.append(f"not the owner: {trespasses}")
        if self._is_calm and len(numbers) > len(set(numbers)):
            wrong.append(f"twice without a reason: {sorted({n for n in numbers if numbers.count(n) > 1})}")
        if not lost and not self._is_complete():
            wrong.append("gates or dead letters are left")

    def _inverted(
        self, expected: dict[int, tuple[str, int]], numbers: Sequence[int]
    ) -> list[tuple[int, int]]:
        """Pairs of one key whose first appearances are not in the order of commits."""
        last: dict[str, int] = {}
        inverted = []
        for number in dict.fromkeys(numbers):
            if number not in expected or (number in self._poison and self._schema.policy == "park"):
                continue  # a message that was put aside alone comes when a person says so
            key, place = expected[number]
            if key in last and place < expected[last[key]][1]:
                inverted.append((last[key], number))
            else:
                last[key] = number
        return inverted


def _shard(key: str | None) -> int:
    return int(key or 0) * 3


def message_row(number: int, key: str) -> OutboxRow:
    shard = _shard(key)
    return OutboxRow(
        (
            0,
            shard,
            UUID(int=number + 2),
            "event",
            "orders",
            "t",
            key,
            "application/json",
            "[]",
            b"%d" % number,
            0,
            shard,
            True,
        )
    )
