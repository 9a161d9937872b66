"""The rules of work in the model are those of Postgres: random histories, store by store on both."""

import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final
from uuid import UUID

import pytest
import pytest_asyncio

from tests.simulation.direct import DirectDatabase
from tests.simulation.settling import TaskSchema
from towpath.errors import LeaseLost
from towpath.failures import Failure
from towpath.states import TaskState, WaitingFor
from towpath.store.claims import Claimed, ClaimStore
from towpath.store.database import Database
from towpath.store.groups import Terms
from towpath.store.reaping import ReapStore
from towpath.store.settles import SettleStore
from towpath.store.work import Work
from towpath.store.workers import WorkerStore

GROUP: Final = "conforming"
MESSAGES: Final = 12
KEYS: Final = 3
LEASE: Final = 3600.0
FAILURE: Final = Failure(
    "retry", "trouble", error_class="Trouble", error_message="again", fingerprint="trouble"
)
TASKS: Final = """
select id, state, held_by, lane, position, deliveries, attempt, version, waiting_for, payload, worker,
       token is null as is_free, due_at is null or due_at <= towpath.clock() as is_due
  from towpath.task order by id
"""
LAPSE: Final = "update towpath.worker set lease_until = '-infinity' where id = $1"


class Worker:
    """One worker on one side."""

    def __init__(self, database: Any, id_: UUID) -> None:
        self.claims = ClaimStore(database, GROUP, id_, is_ordered_by_key=True, max_parked=2)
        self.settles = SettleStore(database, GROUP, id_)
        self.workers = WorkerStore(database, GROUP, id_, LEASE, Terms("key", None, ("t",)))
        self.reaps = ReapStore(database, GROUP)


class Pair:
    """One history on both sides. Tokens differ; everything else is the same."""

    def __init__(self, database: Database, seed: int) -> None:
        self.rnd = random.Random(seed)
        self.schema = TaskSchema(time.monotonic, self.rnd)
        self.real = database
        self.databases: tuple[Any, Any] = (database, DirectDatabase(self.schema))
        self.ids: list[UUID] = []
        """Of two workers that live, or so they think."""
        self.workers: dict[UUID, tuple[Worker, Worker]] = {}
        self.runs: list[tuple[UUID, tuple[Work, Work]]] = []
        """What was started, by whom; perhaps taken over since."""
        self.due_by: UUID | None = None
        """Who started something from the database last."""
        self.seen: set[str] = set()

    async def start(self) -> None:
        for _ in range(2):
            await self.register()

    async def register(self) -> None:
        id_ = UUID(int=1 + len(self.workers))
        self.workers[id_] = (Worker(self.databases[0], id_), Worker(self.databases[1], id_))
        await self.both(id_, lambda worker: worker.workers.register())
        self.ids.append(id_)

    async def both(self, id_: UUID, act: Callable[[Worker], Awaitable[Any]]) -> Any:
        """What both sides answer, which is the same."""
        real, model = [await act(worker) for worker in self.workers[id_]]
        assert real == model
        return real

    async def step(self) -> None:
        often = (self.claim, self.claim, self.succeed, self.wait, self.due)
        seldom = (
            self.take_over,
            self.end,
            self.keep,
            self.hand_back,
            self.lapse,
            self.beat,
            self.tend,
            self.tend,
        )
        await self.rnd.choice((*often, *often, *seldom))()
        await self._compare()

    async def _compare(self) -> None:
        real = [tuple(row) for row in await self.real.pool.fetch(TASKS)]
        now = self.schema.clock()
        assert real == [
            (task.id, task.state, task.held_by, task.lane, task.position, task.deliveries, task.attempt,
             task.version, task.waiting_for, task.payload, task.worker, task.token is None,
             task.due_at is None or task.due_at <= now)
            for _, task in sorted(self.schema.tasks.items())
        ]  # fmt: skip
        gates = await self.real.pool.fetch("select source, lane, head from towpath.key_gate")
        assert {(source, lane): head for source, lane, head in gates} == self.schema.gates
        letters = await self.real.pool.fetch("select message_id, death_count from towpath.dead_letter")
        assert {id_: count for id_, count in letters} == self.schema.letters  # noqa: C416 - rows are no pairs
        ids = [UUID(int=1000 + number) for number in range(MESSAGES)]
        await self.both(self.rnd.choice(self.ids), lambda worker: worker.claims.findings(ids))

    def _work(self, number: int) -> Work:
        key = str(number % KEYS)
        return Work(
            id=UUID(int=1000 + number),
            type="t",
            kind="event",
            source="orders",
            key=key,
            lane=key,
            position=number,
            payload=b"%d" % number,
            content_type="application/json",
            headers=(),
            trace=None,
        )

    async def claim(self, *, takes_over: bool = False) -> None:
        id_ = self.rnd.choice(self.ids)
        numbers = self.rnd.sample(range(MESSAGES), self.rnd.randint(1, 3))
        numbers = list({number % KEYS: number for number in numbers}.values())  # one of a lane
        works = ([self._work(number) for number in numbers], [self._work(number) for number in numbers])
        claimed = [
            await worker.claims.claim(works[side], takes_over=takes_over)
            for side, worker in enumerate(self.workers[id_])
        ]
        assert _told(claimed[0]) == _told(claimed[1])
        self.seen |= {name for name, found in _told(claimed[0]).items() if found}
        self._note(id_, claimed[0].started, claimed[1].started)

    async def take_over(self) -> None:
        await self.claim(takes_over=True)

    def _note(self, id_: UUID, *started: list[Work]) -> None:
        real, model = (sorted(works, key=lambda work: work.id) for works in started)
        for pair in zip(real, model, strict=True):
            assert _facts(pair[0]) == _facts(pair[1])
            self.runs.append((id_, pair))

    async def _settle(self, name: str, act: Callable[[Worker, Work], Awaitable[Any]]) -> None:
        """One run ends on both sides, in the same way; often it is forgotten."""
        if not self.runs:
            return
        id_, works = picked = self.runs.pop(self.rnd.randrange(len(self.runs)))
        if name == "keep" or self.rnd.random() < 0.2:
            self.runs.append(picked)
        real, model = [await act(worker, work) for worker, work in zip(self.workers[id_], works, strict=True)]
        assert real == model
        self.seen.add(f"{name} {bool(real)}")

    async def succeed(self) -> None:
        await self._settle("succeed", lambda worker, work: worker.settles.succeed([(work, None)]))

    async def wait(self) -> None:
        delay, spent = self.rnd.choice((0.0, 0.0, LEASE)), self.rnd.choice((0, 1))

        async def act(worker: Worker, work: Work) -> object:
            waits = await worker.settles.wait(
                work, FAILURE, delay_seconds=delay, waiting_for=WaitingFor.RETRY, spent=spent
            )
            return waits and (waits.state, waits.attempt)

        await self._settle("wait", act)

    async def end(self) -> None:
        state = self.rnd.choice((TaskState.DEAD, TaskState.FAILED))
        await self._settle("end", lambda worker, work: worker.settles.end(work, state, FAILURE, spent=1))

    async def keep(self) -> None:
        """And it runs on."""
        await self._settle("keep", lambda worker, work: worker.settles.keep(work))

    async def hand_back(self) -> None:
        await self._settle("hand back", lambda worker, work: worker.settles.hand_back([work]))

    async def due(self) -> None:
        id_ = self.rnd.choice(self.ids)
        started = [await worker.claims.start_due(100) for worker in self.workers[id_]]
        if started[0]:
            self.seen.add("due")
            self.due_by = id_
        self._note(id_, *started)

    async def lapse(self) -> None:
        """A worker that froze: another begins beside it, and it may still try to settle."""
        if self.rnd.random() < 0.7:
            id_ = self.due_by if self.due_by in self.ids else self.rnd.choice(self.ids)
            self.ids.remove(id_)
            await self.real.pool.execute(LAPSE, id_)
            self.schema.workers[id_] = float("-inf")
            await self.register()
            await self.tend()

    async def beat(self) -> None:
        id_ = self.rnd.choice(list(self.workers))

        async def act(worker: Worker) -> bool:
            try:
                await worker.workers.beat()
            except LeaseLost:
                return False
            return True

        await self.both(id_, act)

        async def claims(worker: Worker) -> set[UUID]:
            return {task_id for task_id, _ in await worker.settles.claims()}

        await self.both(id_, claims)

    async def tend(self) -> None:
        id_ = self.rnd.choice(self.ids)
        count = await self.both(id_, lambda worker: worker.reaps.reap_abandoned(100))
        if count:
            self.seen.add("reaped")
        await self.both(id_, lambda worker: worker.reaps.repair_gates(100))


def _told(claimed: Claimed) -> dict[str, set[UUID]]:
    names = ("started", "parked", "lost", "contended", "full")
    return {name: {work.id for work in getattr(claimed, name)} for name in names}


def _facts(work: Work) -> tuple[object, ...]:
    return (
        work.id,
        work.attempt,
        work.version,
        work.deliveries,
        work.lane,
        work.position,
        work.payload,
        work.trigger,
    )


@pytest_asyncio.fixture
async def database(migrated_url: str) -> AsyncIterator[Database]:
    database = Database(migrated_url)
    await database.start()
    yield database
    await database.aclose()


@pytest.mark.timeout(600)
async def test_the_model_answers_as_postgres_does(database: Database) -> None:
    """C10, C18, C20: the rules the simulation rests on, over claims, gates of keys, settling and leases."""
    seen: set[str] = set()
    for seed in range(5):
        async with database.transaction() as connection:
            await connection.execute(
                "truncate towpath.task, towpath.key_gate, towpath.dead_letter, towpath.worker cascade"
            )
        pair = Pair(database, seed)
        await pair.start()
        for _ in range(120):
            await pair.step()
        seen |= pair.seen
    assert seen >= {
        "started", "parked", "lost", "contended", "full", "due", "reaped",
        "succeed True", "wait True", "wait False", "end False", "keep True", "keep False",
    }, seen  # fmt: skip
