"""Random histories of one consumer group on real Postgres: the engine itself against a broker model.

Rebalances, zombies, crashes before and after commit, freezes past the lease, duplicates, failures
and deaths. Whatever happens: one effect or one death per message, order per key, nothing stuck.
"""

import asyncio
import random
import time
from collections import Counter, defaultdict
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from uuid import UUID

import asyncpg
import pytest
from sqlalchemy import text
from uuid_utils.compat import uuid7

from tests.property.sim_broker import TOPIC, SimBroker, SimSubscriber, delivery_of
from towpath.app import App
from towpath.backoff import RetryPolicy
from towpath.consumer.member import Member
from towpath.context import Tx
from towpath.errors import LeaseLost, StoreUnavailable
from towpath.messages import event
from towpath.outbox import Outbox
from towpath.settings import WorkerSettings
from towpath.store.claims import ClaimStore
from towpath.store.database import Database
from towpath.telemetry.metrics import NO_TELEMETRY

LEASE = timedelta(milliseconds=400)
DEADLINE_SECONDS = 60.0
GROUP = "protocol"


class _MortalMember(Member):
    """A member whose process may die: then nothing is drained, handed back or said good-bye to."""

    is_dead = False

    async def _drain(self, patience_seconds: float) -> None:
        if not self.is_dead:
            await super()._drain(patience_seconds)

    async def _abandon(self) -> None:
        if self.is_dead:
            await self._roster.cancel_all()
        else:
            await super()._abandon()


class _History:
    """One seeded run."""

    def __init__(self, url: str, seed: int, *, members: int = 3, partitions: int = 2, keys: int = 6) -> None:
        self._url = url
        self._rnd = random.Random(seed)
        self._members = members
        self._broker = SimBroker(partitions)
        self._stop = asyncio.Event()
        self.stat: Counter[str] = Counter()
        self.messages: dict[UUID, tuple[str, int]] = {}
        for sequence in range(12):
            for key in range(keys):
                message_id: UUID = uuid7()
                self.messages[message_id] = (f"k{key}", sequence)
                message = delivery_of(message_id, f"k{key}", sequence, b'{"sequence": %d}' % sequence)
                log = self._broker.logs[key % partitions]
                log.append(message)
                if self._rnd.random() < 0.2:
                    log.append(self._rnd.choice(log))

    async def run(self) -> None:
        hosts = [asyncio.create_task(self._host(number)) for number in range(self._members)]
        until = time.monotonic() + DEADLINE_SECONDS
        observer = await asyncpg.connect(self._url)
        try:
            while time.monotonic() < until:
                for partition, owner in enumerate(self._broker.owner):
                    if owner is None or self._rnd.random() < 0.1:
                        self._broker.assign(partition, self._rnd.randrange(self._members))
                await asyncio.sleep(0.1)
                for host in hosts:
                    if host.done():
                        host.result()
                ended = await observer.fetchval(
                    "select count(*) from towpath.task where state in ('SUCCEEDED', 'DEAD')"
                )
                if ended == len(self.messages) and self._broker.is_drained:
                    break
        finally:
            self._stop.set()
            await asyncio.wait(hosts, timeout=10)
            await observer.close()

    async def _host(self, number: int) -> None:
        while not self._stop.is_set():
            database = Database(self._url, pool_size=6)
            await database.start()
            try:
                await self._incarnation(number, database)
            finally:
                await database.aclose()

    async def _incarnation(self, number: int, database: Database) -> None:
        died = asyncio.Event()
        subscriber = SimSubscriber(self._broker, number, self._rnd, zombie_seconds=0.1)
        app = App(GROUP, retry=RetryPolicy(attempts=4, base="1ms", cap="30ms"))
        member: _MortalMember

        def die() -> None:
            self.stat["crash"] += 1
            member.is_dead = True
            died.set()

        @app.transactional()
        async def step(message: _Step, tx: Tx) -> None:
            rnd = self._rnd
            dice = rnd.random()
            if dice < 0.01:
                die()
                await asyncio.sleep(60)
            if dice < 0.03:
                self.stat["freeze"] += 1
                member._membership._beat_seconds = 60.0
                await asyncio.sleep(LEASE.total_seconds() * 2)
            await asyncio.sleep(rnd.random() * 0.004)
            if rnd.random() < 0.25:
                self.stat["failure"] += 1
                raise RuntimeError("not this time")
            await tx.session.execute(
                text("insert into public.effect (id, key, sequence) values (:id, :key, :sequence)"),
                {"id": tx.message_id, "key": tx.attempt.key, "sequence": message.sequence},
            )
            await asyncio.sleep(rnd.random() * 0.002)

        acknowledge = subscriber.acknowledge

        def forgetful(deliveries: Any) -> None:
            if self._rnd.random() < 0.01 and not died.is_set():
                self.stat["crash before ack"] += 1
                die()
            if not died.is_set():
                acknowledge(deliveries)

        subscriber.acknowledge = forgetful  # type: ignore[method-assign]
        settings = WorkerSettings(
            lease=LEASE,
            beat_every=LEASE / 4,
            concurrency=8,
            due_poll_min=timedelta(milliseconds=5),
            due_poll_max=timedelta(milliseconds=20),
            reap_every=timedelta(milliseconds=150),
            drain_timeout=timedelta(milliseconds=200),
            max_deliveries=50,
        )
        member = _MortalMember(
            app,
            database,
            subscriber,
            settings,
            installation="test",
            destinations={},
            outbox=Outbox(),
            resources={},
            telemetry=NO_TELEMETRY,
            on_progress=lambda _: None,
        )
        await subscriber.start(member)
        running = asyncio.create_task(member.run(self._stop))
        dying = asyncio.create_task(died.wait())
        await asyncio.wait({running, dying}, return_when=asyncio.FIRST_COMPLETED)
        dying.cancel()
        if died.is_set():
            running.cancel()
            await asyncio.wait({running})
        else:
            with suppress(LeaseLost, StoreUnavailable):
                await running
                return
            self.stat["lease lost"] += 1


@event("protocol.step", destination=TOPIC)
@dataclass(frozen=True)
class _Step:
    sequence: int


EFFECTS = "create table public.effect (n bigserial primary key, id uuid, key text, sequence int)"


async def _verdict(url: str, messages: dict[UUID, tuple[str, int]]) -> dict[str, object]:
    """What is wrong, by kind; empty when the promise held."""
    connection = await asyncpg.connect(url)
    try:
        effects = await connection.fetch("select id, key, sequence from public.effect order by n")
        states = {
            row["id"]: row["state"] for row in await connection.fetch("select id, state from towpath.task")
        }
        letters = await connection.fetch("select message_id, death_count from towpath.dead_letter")
        gates = await connection.fetchval("select count(*) from towpath.key_gate")
        workers_rows = await connection.fetchval("select count(*) from towpath.task where state = 'RUNNING'")
    finally:
        await connection.close()
    counts = Counter(row["id"] for row in effects)
    dead = {id_ for id_, state in states.items() if state == "DEAD"}
    by_key: dict[str, list[int]] = defaultdict(list)
    for row in effects:
        by_key[row["key"]].append(row["sequence"])
    wrong: dict[str, object] = {
        "doubled": [id_ for id_, count in counts.items() if count > 1],
        "dead and done": dead & counts.keys(),
        "lost": messages.keys() - dead - counts.keys(),
        "invented": counts.keys() - messages.keys(),
        "inverted": {key: done for key, done in by_key.items() if done != sorted(done)},
        "not ended": {id_: state for id_, state in states.items() if state not in ("SUCCEEDED", "DEAD")},
        "gates left": gates,
        "running": workers_rows,
        "catalog differs": dead ^ {row["message_id"] for row in letters},
        "died twice": [row["message_id"] for row in letters if row["death_count"] != 1],
    }
    return {kind: found for kind, found in wrong.items() if found}


@pytest.mark.timeout(600)
async def test_any_history_has_one_effect_or_death_per_message_in_order_per_key(
    new_database: Any, schema_template: str, scale: float
) -> None:
    """C18, C6, C10, C5, D1: the key gate holds over random histories of the real engine."""
    total: Counter[str] = Counter()
    for seed in range(max(2, round(6 * scale))):
        with new_database(schema_template) as url:
            connection = await asyncpg.connect(url)
            await connection.execute(EFFECTS)
            await connection.close()
            history = _History(url, seed)
            await history.run()
            total += history.stat
            assert {} == await _verdict(url, history.messages), f"seed {seed}: {dict(history.stat)}"
    assert all(total[kind] for kind in ("crash", "freeze", "failure")), f"too tame: {total}"


@pytest.mark.timeout(600)
async def test_without_the_gates_check_some_history_shows_an_inversion(
    new_database: Any, schema_template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C18: the checker is awake, and the gate is what keeps the order."""

    async def sees_no_gate(*_: Any) -> dict[tuple[str, str | None], bool]:
        return {}

    monkeypatch.setattr(ClaimStore, "_gated_lanes", sees_no_gate)
    monkeypatch.setattr(f"{__name__}.DEADLINE_SECONDS", 10.0)
    for seed in range(20):
        with new_database(schema_template) as url:
            connection = await asyncpg.connect(url)
            await connection.execute(EFFECTS)
            await connection.close()
            history = _History(url, seed)
            await history.run()
            if "inverted" in await _verdict(url, history.messages):
                return
    pytest.fail("twenty histories without a gate kept their order: the checker sees nothing")
