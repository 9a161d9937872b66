"""Random histories of consumer groups on real Postgres: the engine itself against a broker model.

Each history is a group of its own in one database, so that many run at once. A lease lapses by an
UPDATE when its process died or froze, and not by waiting: so leases may be long, and a busy machine
makes no history of its own.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from typing import Any, Final, TypeAlias
from uuid import UUID

import asyncpg

from tests.property.protocol_group import LEDGER, Fortune, Group, Provider
from tests.property.scripts import Account, Weather, scripts_of, weather_of
from tests.property.sim_broker import SimBroker, SimSubscriber, delivery_of
from tests.property.verdict import verdict
from towpath.brokers.ports import Delivery
from towpath.consumer.member import Member
from towpath.errors import LeaseLost, StoreUnavailable
from towpath.messages import read_envelope
from towpath.outbox import Outbox
from towpath.outcomes import DidNotHappen, Happened
from towpath.settings import WorkerSettings
from towpath.states import TaskState
from towpath.store.database import Database
from towpath.store.doubts import Resolutions
from towpath.store.groups import Terms
from towpath.telemetry.metrics import NO_TELEMETRY

TOGETHER: Final = 12
"""Histories at once, so that one's waiting is another's work."""
_PARTITIONS: Final = 2
_STUCK_SECONDS: Final = 45.0
"""Without any move, it never comes to an end."""
MAX_DELIVERIES = 4
_SETTINGS: Final = WorkerSettings(
    lease=timedelta(seconds=20),
    beat_every=timedelta(milliseconds=200),
    concurrency=8,
    due_poll_min=timedelta(milliseconds=10),
    due_poll_max=timedelta(milliseconds=120),
    reap_every=timedelta(milliseconds=150),
    ack_after=timedelta(milliseconds=200),
    drain_timeout=timedelta(milliseconds=200),
)
_LAPSE: Final = "update towpath.worker set lease_until = '-infinity' where id = $1"
_ROWS: Final = """select id, state, finished_at is not null or held_by = 'database' as is_safe
  from towpath.task where consumer_group = $1"""


Judged: TypeAlias = tuple[Account, dict[str, object]]


class World:
    """What the histories of a run share: one database and its connections."""

    def __init__(self, url: str, database: Database, outside: "asyncpg.Pool[Any]") -> None:
        self.url = url
        self.database = database
        self.outside = outside

    async def run(
        self, seeds: Sequence[int], *, weather: Weather | None = None, seconds: float | None = None
    ) -> AsyncIterator[Judged]:
        """Each seed's history as it ends, with what is wrong with it: nothing where the promise held.

        It is given `seconds`, or as long as something moves: a busy machine is not a stuck engine.
        """
        together = asyncio.Semaphore(TOGETHER)

        async def one(seed: int) -> Judged:
            async with together:
                history = _History(self, seed, weather)
                await history.run(seconds)
                return history.account, await verdict(self.outside, history.account)

        running = [asyncio.create_task(one(seed)) for seed in seeds]
        try:
            for ended in asyncio.as_completed(running):
                yield await ended
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)


@asynccontextmanager
async def world_of(url: str) -> AsyncIterator[World]:
    """Connections for histories in a migrated database."""
    database = Database(url, pool_size=40)
    await database.start()
    try:
        async with asyncpg.create_pool(url, min_size=1, max_size=12, command_timeout=30) as outside:
            await outside.execute(LEDGER)
            yield World(url, database, outside)
    finally:
        # What dead processes left running in this one, such as a batch under way.
        strays = asyncio.all_tasks() - {asyncio.current_task()}
        for stray in strays:
            stray.cancel()
        await asyncio.gather(*strays, return_exceptions=True)
        await database.aclose()


class _MortalMember(Member):
    """A member whose process may die, which drains and hands back nothing, or freeze, which beats no more."""

    is_dead = False
    thawed: asyncio.Event

    def mortal(self) -> None:
        beat = self._workers.beat
        self.thawed = asyncio.Event()
        self.thawed.set()

        async def beat_unless_frozen() -> None:
            await self.thawed.wait()
            await beat()

        self._workers.beat = beat_unless_frozen  # type: ignore[method-assign]

    async def vanish(self) -> None:
        """Also what its own end would have left running, where that was on its way and was cut off."""
        await self._roster.cancel_all()

    async def _drain(self, patience_seconds: float) -> None:
        if not self.is_dead:
            await super()._drain(patience_seconds)

    async def _abandon(self) -> None:
        if not self.is_dead:
            await super()._abandon()


class _History:
    """One seeded run."""

    def __init__(self, world: World, seed: int, weather: Weather | None) -> None:
        self._world = world
        self._rnd = rnd = random.Random(seed)
        weather = weather or weather_of(rnd)
        scripts = scripts_of(rnd, weather)
        self.account = Account(f"history-{seed}", weather, scripts, Counter(), set(), set())
        self._broker = SimBroker(_PARTITIONS, rnd.choice((2, 2, 3)))
        self._provider = Provider(world.outside, self.account.group)
        self._lone_failures, self._begun = Counter[UUID](), Counter[UUID]()
        self._acknowledged = list[UUID]()
        self._stop = asyncio.Event()
        for script in scripts.values():
            log = self._broker.logs[int(script.key[1:]) % _PARTITIONS]
            log.append(delivery_of(script.id, script.type, script.key, script.sequence))
            if rnd.random() < 0.2:
                log.append(rnd.choice(log))

    async def run(self, seconds: float | None) -> None:
        hosts = [asyncio.create_task(self._host(number)) for number in range(self._broker.members)]
        until, seen = time.monotonic() + (seconds or _STUCK_SECONDS), None
        try:
            while time.monotonic() < until:
                for partition, owner in enumerate(self._broker.owner):
                    if owner is None or self._rnd.random() < 0.1:
                        self._broker.assign(partition, self._rnd.randrange(self._broker.members))
                await asyncio.sleep(0.1)
                for host in hosts:
                    if host.done():
                        host.result()
                states = await self._look()
                news = states, self.account.stat.total(), self._broker.committed[:]
                if seconds is None and news != seen:
                    seen = news
                    until = time.monotonic() + _STUCK_SECONDS
                await self._decide([id_ for id_, state in states.items() if state == "UNKNOWN"])
                ended = sum(state in ("SUCCEEDED", "DEAD") for state in states.values())
                if ended == len(self.account.scripts) and self._broker.is_drained:
                    break
        finally:
            self._stop.set()
            await asyncio.wait(hosts, timeout=10)
        await self._look()

    async def _look(self) -> dict[UUID, str]:
        """States now. What was acknowledged must be finished or held by the database, and stay so."""
        asked, self._acknowledged = set(self._acknowledged), []
        rows = await self._world.outside.fetch(_ROWS, self.account.group)
        self.account.early |= asked - {row["id"] for row in rows if row["is_safe"]}
        return {row["id"]: row["state"] for row in rows}

    async def _decide(self, doubtful: Sequence[UUID]) -> None:
        """An operator looks after what no provider tells, and says the truth."""
        for id_ in doubtful:
            if not self.account.scripts[id_].is_silent or self._rnd.random() < 0.5:
                continue
            answer = await self._provider.answer(id_)
            if isinstance(answer, Happened):
                state = TaskState.SUCCEEDED
            elif isinstance(answer, DidNotHappen):
                state = self._rnd.choice((TaskState.WAITING, TaskState.WAITING, TaskState.DEAD))
            else:
                continue
            if await self._resolve(id_, state):
                self.account.stat["operator"] += 1
                if state is TaskState.DEAD:
                    self.account.condemned.add(id_)

    async def _resolve(self, id_: UUID, state: TaskState) -> bool:
        """As the command does."""
        database, group = self._world.database, self.account.group
        async with database.pool.acquire() as connection:
            transaction = connection.transaction()
            await transaction.start()
            resolutions = Resolutions(database.schema, group)
            doubt = await resolutions.find(connection, id_)
            if doubt is None or not await resolutions.resolve(
                connection, doubt.work, state, reason_code="operator", actor="ann"
            ):
                await transaction.rollback()
                return False
            await transaction.commit()
        return True

    async def _host(self, number: int) -> None:
        while not self._stop.is_set():
            await self._incarnation(number)

    async def _incarnation(self, number: int) -> None:
        """One process from its start to its end, by whatever cause."""
        stat, rnd = self.account.stat, self._rnd
        died = asyncio.Event()
        subscriber = SimSubscriber(self._broker, number, rnd, zombie_seconds=0.06)
        member: _MortalMember

        def die() -> None:
            member.is_dead = True
            died.set()

        async def freeze(id_: UUID) -> None:
            """Mostly until another member runs the same message; it does not always come to that."""
            member.thawed.clear()
            await self._lapse(member.id)
            self._broker.leave(number, rnd)
            begun, until = self._begun[id_], time.monotonic() + rnd.choice((0.1, 1.5, 1.5))
            while self._begun[id_] == begun and time.monotonic() < until:  # noqa: ASYNC110 - no event to wait for
                await asyncio.sleep(0.02)
            await asyncio.sleep(rnd.uniform(0, 0.02))
            member.thawed.set()

        fortune = Fortune(rnd, self.account.weather, stat, die, freeze)
        acknowledge = subscriber.acknowledge

        def forgetful(deliveries: Sequence[Delivery]) -> None:
            if self.account.weather is not Weather.KILLERS and rnd.random() < 0.008 and not died.is_set():
                stat["crash before ack"] += 1
                die()
            if not died.is_set():
                self._acknowledged += [read_envelope(each.headers).message_id for each in deliveries]
                acknowledge(deliveries)

        subscriber.acknowledge = forgetful  # type: ignore[method-assign,assignment]
        limit = 100 if self.account.weather is Weather.STORM else MAX_DELIVERIES
        app = Group(
            self.account.group,
            self.account.scripts,
            self._provider,
            fortune,
            self._lone_failures,
            self._begun,
        ).app
        member = _MortalMember(
            app,
            self._world.database,
            subscriber,
            _SETTINGS.model_copy(update={"max_deliveries": limit}),
            terms=Terms(app.ordering, None),
            installation="test",
            destinations={},
            outbox=Outbox(),
            resources={},
            telemetry=NO_TELEMETRY,
            broker_labels={},
            on_progress=lambda _: None,
            on_outdated=lambda _: None,
            on_paused=lambda _: None,
        )
        member.mortal()
        await subscriber.start(member)
        running = asyncio.create_task(member.run(self._stop))
        dying = asyncio.create_task(died.wait())
        await asyncio.wait({running, dying}, return_when=asyncio.FIRST_COMPLETED)
        dying.cancel()
        if died.is_set():
            running.cancel()
            await asyncio.wait({running})
            await member.vanish()
            await self._lapse(member.id)
            return
        with suppress(StoreUnavailable):
            try:
                await running
            except LeaseLost:
                stat["lease lost"] += 1

    async def _lapse(self, worker: UUID) -> None:
        """Its time is up, by the only clock that counts."""
        await self._world.outside.execute(_LAPSE, worker)
