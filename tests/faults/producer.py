"""Producers as a process: python -m tests.faults.producer SEED FIRST_LANE LANES

Each lane runs its transactions one after another and writes down what it means before the end, and what the
end said. Where the database is away a transaction is begun again under another name; started again after a
SIGKILL, or a SIGTERM that cancels what it does, the process goes on after the last one it began.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, Final, TypeAlias
from uuid import UUID

import asyncpg
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.pool import NullPool

from tests.acceptance.producing import ADVANCE
from tests.faults import defects
from tests.faults.ledger import Ended, Intended, Ledger
from tests.faults.messages import TASKS, Messages, declare
from tests.faults.plan import Message, Transaction, lanes
from tests.faults.world import UNREACHABLE
from towpath import tasks
from towpath.outbox import emit, submit
from towpath.settings import load
from towpath.store.database import plain_url, sqlalchemy_url, within

_PATIENCE_SECONDS: Final = 15.0
_AGAIN_SECONDS: Final = 0.5
_DEED: Final = "insert into deed (transaction) values ({0})"
_AWAY: Final = (*UNREACHABLE, DBAPIError)

Target: TypeAlias = "AsyncSession | asyncpg.Connection[Any]"


class Producer:
    """The lanes of one process."""

    def __init__(self, group: str, url: str, ledger: Ledger) -> None:
        self._group = group
        self._messages: Messages = declare(group)
        self._url = url
        self._ledger = ledger
        self._engine = create_async_engine(sqlalchemy_url(url), poolclass=NullPool)
        self._begun = {each.transaction for each in ledger.own() if isinstance(each, Intended | Ended)}

    def has_begun(self, name: str) -> bool:
        """Whether this process began a transaction before it was started again."""
        return name in self._begun

    async def run(self, lane: tuple[Transaction, ...]) -> None:
        """Its transactions, each until it has an end."""
        for transaction in lane:
            for again in range(1000):
                name = f"{transaction.name}.{again}"
                if self.has_begun(name):
                    break
                await asyncio.sleep(transaction.pause_seconds if again == 0 else _AGAIN_SECONDS)
                if await self._produce(transaction, name):
                    break

    async def _produce(self, transaction: Transaction, name: str) -> bool:
        """Whether it has an end; else the database was away before COMMIT."""
        how: list[str] = []
        attempt = self._by_session if transaction.by_session else self._by_connection
        try:
            cancelled = await within(_PATIENCE_SECONDS, attempt(transaction, name, how))
        except _AWAY:
            self._ledger.write(Ended(name, "unknown" if how else "rolled_back"))
            return bool(how)
        self._ledger.write(Ended(name, "rolled_back" if transaction.is_rolled_back else "committed"))
        await self._cancel(cancelled)
        return True

    async def _by_session(self, transaction: Transaction, name: str, how: list[str]) -> list[UUID]:
        async with AsyncSession(self._engine) as session:
            await session.execute(text(_DEED.format(":name")), {"name": name})
            cancelled = await self._write(session, transaction, name)
            if not transaction.is_rolled_back:
                how.append("commit was sent")
                await session.commit()
        return cancelled

    async def _by_connection(self, transaction: Transaction, name: str, how: list[str]) -> list[UUID]:
        connection = await asyncpg.connect(plain_url(self._url), timeout=_PATIENCE_SECONDS)
        try:
            block = connection.transaction()
            await block.start()
            await connection.execute(_DEED.format("$1"), name)
            cancelled = await self._write(connection, transaction, name)
            if transaction.is_rolled_back:
                await block.rollback()
            else:
                how.append("commit was sent")
                await block.commit()
            return cancelled
        finally:
            connection.terminate()

    async def _write(self, target: Target, transaction: Transaction, name: str) -> list[UUID]:
        """All messages; the ids of the tasks to cancel."""
        cancelled: list[UUID] = []
        for message in transaction.messages:
            savepoint = await _savepoint(target) if message.is_abandoned else None
            id_ = await self._write_one(target, transaction, name, message)
            if savepoint is not None:
                await savepoint.rollback()
            elif message.fate == "is_cancelled":
                cancelled.append(id_)
        await asyncio.sleep(transaction.held_seconds)
        return cancelled

    async def _write_one(self, target: Target, transaction: Transaction, name: str, message: Message) -> UUID:
        is_request = message.kind == "requested"
        key = message.request if is_request else transaction.key
        n = 0 if is_request else await _advance(target, key)
        values = {"request": message.request} if is_request else {}
        payload = getattr(self._messages, message.kind)(key=key, n=n, fate=message.fate, **values)
        delay = f"{message.delay_seconds}s" if message.delay_seconds else None
        is_repeat = False
        if message.kind in TASKS:
            handle = await submit(target, payload, delay=delay)
            id_, is_repeat = handle.id, not handle.created
        else:
            emitted: Any = emit(target, payload, delay=delay)
            id_ = await emitted if isinstance(emitted, Coroutine) else emitted
        self._ledger.write(
            Intended(
                name,
                id_,
                message.kind,
                key,
                n,
                message.fate,
                message.is_abandoned,
                delay is not None,
                message.request,
                is_repeat,
            )
        )
        return id_

    async def _cancel(self, ids: list[UUID]) -> None:
        if not ids:
            return

        async def ask() -> None:
            async with AsyncSession(self._engine) as session, session.begin():
                for id_ in ids:
                    await tasks.cancel(session, id_, group=self._group)

        try:
            await within(_PATIENCE_SECONDS, ask())
        except _AWAY as error:
            print(f"not cancelled: {error!r}", file=sys.stderr)


async def _advance(target: Target, key: str) -> int:
    if isinstance(target, AsyncSession):
        return int((await target.execute(text(ADVANCE.format(":key")), {"key": key})).scalar_one())
    return int(await target.fetchval(ADVANCE.format("$1"), key))


async def _savepoint(target: Target) -> Any:
    if isinstance(target, AsyncSession):
        return await target.begin_nested()
    savepoint = target.transaction()
    await savepoint.start()
    return savepoint


async def until_terminated(*lanes: Coroutine[Any, Any, None]) -> None:
    """Side by side; SIGTERM cancels them."""
    work = asyncio.gather(*lanes)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, work.cancel)
    with suppress(asyncio.CancelledError):
        await work


async def produce(seed: int, first_lane: int, count: int) -> None:
    """Some lanes of a seed's plan, side by side."""
    producer = Producer(
        os.environ["TOWPATH_TEST_GROUP"],
        load().database_url.get_secret_value(),
        Ledger.of_this_process(),
    )
    chosen = list(lanes(seed))[first_lane : first_lane + count]
    await until_terminated(*map(producer.run, chosen))


if __name__ == "__main__":
    defects.plant()
    asyncio.run(produce(*map(int, sys.argv[1:4])))
