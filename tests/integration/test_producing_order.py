"""Ids grow in commit order for transactions that change the same row before they emit."""

import asyncio
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import Engine, create_engine, event
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from tests.integration.shop import Account, Base, OrderPlaced
from towpath.outbox import emit
from towpath.store.database import sqlalchemy_url

HOT = ("a", "b", "c")

# Each change of an account leaves its version beside the transaction that made it.
LEDGER = """
create table ledger (xid xid8, id text, version integer);
create function note() returns trigger language plpgsql as
  $$ begin insert into ledger values (pg_current_xact_id(), new.id, new.version); return null; end $$;
create trigger note after update on account for each row execute function note();
"""

VERSIONS = """
select o.key, l.version from towpath.outbox o join ledger l on l.xid = o.xid and l.id = o.key order by o.id
"""


@pytest.fixture
def engine(migrated_url: str) -> Iterator[Engine]:
    engine = create_engine(sqlalchemy_url(migrated_url, "psycopg"), pool_size=20)
    Base.metadata.create_all(engine)
    with engine.begin() as connection:
        connection.exec_driver_sql(LEDGER)
        connection.execute(sa.insert(Account), [{"id": name, "version": 0} for name in HOT])
    yield engine
    engine.dispose()


def versions(engine: Engine) -> dict[str, list[int]]:
    """By account the versions that its messages tell, in the order of their ids."""
    found: dict[str, list[int]] = {name: [] for name in HOT}
    with engine.connect() as connection:
        for key, version in connection.execute(sa.text(VERSIONS)):
            found[key].append(version)
    return found


def naive_emit(session: Session, message: OrderPlaced) -> None:
    """What most outbox libraries do: insert when the session says it will commit."""

    def insert(session: Session) -> None:
        session.connection().execute(
            sa.text("select towpath.emit('orders', 'order.placed', '{}', :key)"), {"key": message.order_id}
        )

    event.listen(session, "before_commit", insert, once=True)


Emit = Callable[[Session, OrderPlaced], object]


@pytest.mark.parametrize(("how", "expected"), [(emit, [1, 2]), (naive_emit, [2, 1])], ids=["ours", "naive"])
def test_whoever_flushes_later_draws_the_later_id(engine: Engine, how: Emit, expected: list[int]) -> None:
    """P8: between one transaction's before_commit and its flush another one commits."""
    overtaken = threading.Event()
    is_committing = threading.Event()

    def slow() -> None:
        with Session(engine) as session, session.begin():
            session.get_one(Account, "a").version = Account.version + 1
            how(session, OrderPlaced(order_id="a"))

            @event.listens_for(session, "before_commit")
            def wait(session: Session) -> None:
                is_committing.set()
                assert overtaken.wait(30)

    with ThreadPoolExecutor(1) as thread:
        first = thread.submit(slow)
        assert is_committing.wait(30)
        with Session(engine) as session, session.begin():
            session.get_one(Account, "a").version = Account.version + 1
            how(session, OrderPlaced(order_id="a"))
        overtaken.set()
        first.result(30)

    assert versions(engine)["a"] == expected


def change(session: Session, target: Any, rng: random.Random) -> None:
    """A business transaction in one of the shapes people write."""
    name = rng.choice(HOT)
    with session.begin():
        shape = rng.randrange(5)
        if shape == 0:
            emit(target, OrderPlaced(order_id=name))
            session.get_one(Account, name).version = Account.version + 1
        elif shape == 1:
            session.execute(sa.update(Account).where(Account.id == name).values(version=Account.version + 1))
            emit(target, OrderPlaced(order_id=name))
        elif shape == 2:
            with session.begin_nested():
                session.get_one(Account, name).version = Account.version + 1
                emit(target, OrderPlaced(order_id=name))
        elif shape == 3:
            session.get_one(Account, name).version = Account.version + 1
            event.listen(
                session, "before_commit", lambda _: emit(target, OrderPlaced(order_id=name)), once=True
            )
        else:
            session.get_one(Account, name).version = Account.version + 1
            event.listen(
                session, "after_flush", lambda *_: emit(target, OrderPlaced(order_id=name)), once=True
            )


@pytest.mark.parametrize("autoflush", [True, False])
def test_racing_threads_tell_each_change_in_order(engine: Engine, autoflush: bool, scale: float) -> None:
    """P2 P8"""
    rounds = int(60 * scale)

    def race(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(rounds):
            with Session(engine, autoflush=autoflush) as session:
                change(session, session, rng)

    with ThreadPoolExecutor(12) as threads:
        list(threads.map(race, range(12)))

    found = versions(engine)
    assert sum(map(len, found.values())) == 12 * rounds
    assert found == {name: sorted(told) for name, told in found.items()}


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
async def test_racing_coroutines_tell_each_change_in_order(
    engine: Engine, migrated_url: str, driver: str, scale: float
) -> None:
    """P2 P8"""
    rounds = int(40 * scale)
    async_engine = create_async_engine(sqlalchemy_url(migrated_url, driver), pool_size=12)

    async def race(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(rounds):
            async with AsyncSession(async_engine) as session:
                await session.run_sync(lambda plain: change(plain, session, rng))

    async with asyncio.TaskGroup() as group:
        for seed in range(12):
            group.create_task(race(seed))
    await async_engine.dispose()

    found = versions(engine)
    assert sum(map(len, found.values())) == 12 * rounds
    assert found == {name: sorted(told) for name, told in found.items()}
