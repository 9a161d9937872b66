"""Producers as a process: business transactions that emit and submit, some of which roll back.

python -m tests.acceptance.producing LEDGER --messages 10000 --producers 8 --seed 1

Every transaction first moves its aggregate on, which orders those of one key, then emits one event
and submits one task. Half of the producers use a SQLAlchemy session, half an asyncpg connection.
"""

import argparse
import asyncio
import os
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import asyncpg
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine

from tests.acceptance.apps.messages import Messages, declare
from tests.acceptance.ledger import Intention, Ledger
from towpath.outbox import emit, submit
from towpath.settings import load
from towpath.store.database import plain_url, sqlalchemy_url
from towpath.telemetry.setup import setup

ROLLED_BACK: Final = 0.10
ABANDONED_SAVEPOINTS: Final = 0.02
FAILING: Final = 0.05
KEYS: Final = 400

ADVANCE: Final = (
    "insert into aggregate (key, n) values ({0}, 1)"
    " on conflict (key) do update set n = aggregate.n + 1 returning n"
)


class _RolledBack(Exception):
    """The business changed its mind."""


@dataclass(frozen=True)
class _Plan:
    """What one transaction does."""

    key: str
    is_committed: bool
    has_abandoned_savepoint: bool
    failing_step: int
    failing_work: int


def _plan(rng: random.Random) -> _Plan:
    def failing() -> int:
        return rng.randint(1, 2) if rng.random() < FAILING else 0

    return _Plan(
        key=f"k{rng.randrange(KEYS)}",
        is_committed=rng.random() >= ROLLED_BACK,
        has_abandoned_savepoint=rng.random() < ABANDONED_SAVEPOINTS,
        failing_step=failing(),
        failing_work=failing(),
    )


class _Producer:
    """Runs transactions one after another and writes down what became of them."""

    def __init__(self, messages: Messages, ledger: Ledger) -> None:
        self._messages = messages
        self._ledger = ledger

    async def produce(self, plan: _Plan) -> None:
        """One transaction."""
        intentions: list[Intention] = []
        with suppress(_RolledBack):
            await self._transact(plan, intentions)
        self._ledger.write(intentions)

    async def _transact(self, plan: _Plan, intentions: list[Intention]) -> None:
        raise NotImplementedError


class _SessionProducer(_Producer):
    def __init__(self, messages: Messages, ledger: Ledger, engine: AsyncEngine) -> None:
        super().__init__(messages, ledger)
        self._engine = engine

    async def _transact(self, plan: _Plan, intentions: list[Intention]) -> None:
        step, work, _ = self._messages
        async with AsyncSession(self._engine) as session, session.begin():
            n = (await session.execute(text(ADVANCE.format(":key")), {"key": plan.key})).scalar_one()
            event_id = emit(session, step(key=plan.key, n=n, failing_attempts=plan.failing_step))
            intentions.append(Intention(event_id, "step", plan.key, n, plan.is_committed))
            if plan.has_abandoned_savepoint:
                await self._abandon(session, plan, n, intentions)
            handle = await submit(session, work(key=plan.key, n=n, failing_attempts=plan.failing_work))
            intentions.append(Intention(handle.id, "work", plan.key, n, plan.is_committed))
            if not plan.is_committed:
                raise _RolledBack

    async def _abandon(self, session: AsyncSession, plan: _Plan, n: int, intentions: list[Intention]) -> None:
        try:
            async with session.begin_nested():
                ghost = emit(session, self._messages.step(key=plan.key, n=n))
                intentions.append(Intention(ghost, "step", plan.key, n, is_committed=False))
                raise _RolledBack
        except _RolledBack:
            return


class _ConnectionProducer(_Producer):
    def __init__(self, messages: Messages, ledger: Ledger, pool: "asyncpg.Pool[Any]") -> None:
        super().__init__(messages, ledger)
        self._pool = pool

    async def _transact(self, plan: _Plan, intentions: list[Intention]) -> None:
        step, work, _ = self._messages
        async with self._pool.acquire() as connection, connection.transaction():
            n = await connection.fetchval(ADVANCE.format("$1"), plan.key)
            event_id = await emit(connection, step(key=plan.key, n=n, failing_attempts=plan.failing_step))
            intentions.append(Intention(event_id, "step", plan.key, n, plan.is_committed))
            handle = await submit(connection, work(key=plan.key, n=n, failing_attempts=plan.failing_work))
            intentions.append(Intention(handle.id, "work", plan.key, n, plan.is_committed))
            if not plan.is_committed:
                raise _RolledBack


@asynccontextmanager
async def _producers(count: int, group: str, ledger: Ledger) -> AsyncIterator[list[_Producer]]:
    url = load().database_url.get_secret_value()
    engine = create_async_engine(sqlalchemy_url(url), pool_size=count)
    messages = declare(group)
    try:
        async with asyncpg.create_pool(plain_url(url), min_size=1, max_size=count) as pool:
            yield [
                _SessionProducer(messages, ledger, engine)
                if number % 2
                else _ConnectionProducer(messages, ledger, pool)
                for number in range(count)
            ]
    finally:
        await engine.dispose()


async def produce(
    group: str,
    path: Path,
    *,
    message_count: int,
    producer_count: int,
    seed: int,
    pause_seconds: float = 0.0,
    is_over: asyncio.Event | None = None,
) -> None:
    """At least `message_count` committed messages, two per transaction, unless it is over before."""
    left = message_count

    async def run(producer: _Producer, rng: random.Random) -> None:
        nonlocal left
        while left > 0 and not (is_over and is_over.is_set()):
            plan = _plan(rng)
            if plan.is_committed:
                left -= 2
            await producer.produce(plan)
            await asyncio.sleep(pause_seconds)

    async with _producers(producer_count, group, Ledger(path)) as producers, asyncio.TaskGroup() as tasks:
        for number, producer in enumerate(producers):
            tasks.create_task(run(producer, random.Random(f"{seed}/{number}")))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ledger", type=Path)
    parser.add_argument("--messages", type=int, default=10_000)
    parser.add_argument("--producers", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    telemetry = setup("producer")
    try:
        asyncio.run(
            produce(
                os.environ["TOWPATH_TEST_GROUP"],
                options.ledger,
                message_count=options.messages,
                producer_count=options.producers,
                seed=options.seed,
            )
        )
    finally:
        telemetry.shutdown()


if __name__ == "__main__":
    main()
