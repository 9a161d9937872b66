"""A transaction of its own for each message, which updates one of 10,000 accounts."""

from collections import Counter

import asyncpg

from benchmarks.cells.backlog import by_floor, by_worker
from benchmarks.cells.round import Backlog, Round
from benchmarks.drain import Check
from benchmarks.measure import Sample
from benchmarks.orders import ACCOUNTS


async def by_sqlalchemy(round_: Round) -> Sample:
    """Begin, update, settle and commit by hand, over an AsyncSession for each message."""
    return await _by_hand(round_, "sqlalchemy")


async def by_asyncpg(round_: Round) -> Sample:
    """The same on the bare driver."""
    return await _by_hand(round_, "asyncpg")


async def transactional(round_: Round) -> Sample:
    """A transactional handler, 16 at once like the loops."""
    backlog = await _backlog(round_, "transactional")
    return await by_worker(round_, backlog, "transactional", check=_balances(backlog))


async def _by_hand(round_: Round, driver: str) -> Sample:
    backlog = await _backlog(round_, driver)
    check = _balances(backlog)
    return await by_floor(round_, backlog, "benchmarks.floor_transactional", driver, check=check)


async def _backlog(round_: Round, of: str) -> Backlog:
    return await round_.backlog(of, round_.size(20_000, 1_000))


def _balances(backlog: Backlog) -> Check:
    """Every message was paid in once."""
    expected = Counter(message.id.int % ACCOUNTS for message in backlog.messages)

    async def check(connection: asyncpg.Connection) -> str:
        rows = await connection.fetch("select id, balance from public.account where balance > 0")
        wrong = expected - Counter(dict(rows)) + (Counter(dict(rows)) - expected)
        return f"{wrong.total()} updates missing or doubled" if wrong else ""

    return check
