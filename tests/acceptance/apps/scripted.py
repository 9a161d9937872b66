"""A consumer group that does as its messages say; its name is `TOWPATH_TEST_GROUP`.

Failing handlers fail after their writes and calls, so that whatever should be rolled back or
repeated under one key really is.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Final
from uuid import UUID

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine

from tests.acceptance.apps.messages import declare
from tests.acceptance.apps.policy import ATTEMPTS, BASE_SECONDS, CAP_SECONDS
from towpath.app import App
from towpath.backoff import RetryPolicy
from towpath.context import Attempt, Call, Tx
from towpath.outcomes import Dead, Reject
from towpath.settings import load
from towpath.store.database import sqlalchemy_url

Step, Work, Request = declare(os.environ["TOWPATH_TEST_GROUP"])

app = App(
    os.environ["TOWPATH_TEST_GROUP"],
    ordering="key",
    retry=RetryPolicy(attempts=ATTEMPTS, max_age="1h", base=f"{BASE_SECONDS}s", cap=f"{CAP_SECONDS}s"),
)

_EFFECT: Final = text(
    "insert into effect (message_id, handler, key, n, attempt)"
    " values (:message_id, :handler, :key, :n, :attempt)"
)
_CALL: Final = text(
    "insert into outside_call (message_id, idempotency_key, attempt) values (:message_id, :key, :attempt)"
)
_IS_CAUSED: Final = text("select count(*) > 0 from cause")

_IS_FIRST_START: Final = text("select count(*) = 1 from outside_call where message_id = :message_id")
_NEIGHBOUR_SECONDS: Final = 60

someone_lingers = asyncio.Event()


class PassingTrouble(Exception):
    """Gone at a later attempt."""


class StandingTrouble(Exception):
    """There as long as its cause."""


class Refused(Exception):
    """Hopeless by the group's own rule."""


app.classify(Refused, Reject("refused_outside"))


class Outside:
    """A system that keeps what it was told, whatever becomes of the caller."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def call(self, message_id: UUID, key: str, attempt: int) -> None:
        """Committed when it returns."""
        async with self._engine.connect() as connection:
            await connection.execute(_CALL, {"message_id": message_id, "key": key, "attempt": attempt})


@asynccontextmanager
async def outside() -> AsyncIterator[Outside]:
    """Beside the handlers' transactions, on connections of its own."""
    url = sqlalchemy_url(load().database_url.get_secret_value())
    engine = create_async_engine(url, isolation_level="AUTOCOMMIT", pool_size=4, max_overflow=12)
    try:
        yield Outside(engine)
    finally:
        await engine.dispose()


app.provide(Outside, outside)


@app.transactional()
async def step(message: Step, tx: Tx, *, outside: Outside) -> Reject | None:
    """One effect in the same database."""
    if message.is_watched:
        await outside.call(tx.message_id, f"{tx.message_id}", tx.attempt.attempt)
    await _effect(tx.session, tx.attempt, "step", message.key, message.n)
    if message.fate == "is_rejected":
        return Reject("told_to", "the message says so")
    await _fail_as_told(tx.session, message, tx.attempt)
    return None


@app.idempotent(timeout="1m")
async def work(message: Work, call: Call, *, outside: Outside) -> None:
    """One outside call under a stable key, recorded where the task ends."""
    await outside.call(call.message_id, call.idempotency_key("act"), call.attempt.attempt)
    if message.fate == "is_rejected":
        raise Refused("the message says so")
    if call.attempt.attempt <= message.failing_attempts:
        raise PassingTrouble(f"attempt {call.attempt.attempt} of {message.failing_attempts} that fail")
    async with call.transaction() as tx:
        await _fail_as_told(tx.session, message, call.attempt)
        await _effect(tx.session, call.attempt, "work", message.key, message.n)


@app.idempotent()
async def request(message: Request, call: Call, *, outside: Outside) -> dict[str, str]:
    """Answers; the answer is kept as the task's result."""
    await outside.call(call.message_id, call.idempotency_key("ask"), call.attempt.attempt)
    return {"answered": message.request_id}


async def _effect(session: AsyncSession, attempt: Attempt, handler: str, key: str, n: int) -> None:
    values = {"message_id": attempt.message_id, "handler": handler, "key": key, "n": n}
    await session.execute(_EFFECT, {**values, "attempt": attempt.attempt})


async def _stay(session: AsyncSession, told: asyncio.Event) -> None:
    """Until told to go, but not for ever; a session that idles for a lease is ended."""
    for _ in range(_NEIGHBOUR_SECONDS):
        with suppress(TimeoutError):
            await asyncio.wait_for(told.wait(), 1)
            return
        await session.execute(_IS_CAUSED)


async def _fail_as_told(session: AsyncSession, message: Step | Work, attempt: Attempt) -> None:
    if message.fate in ("lingers", "kills"):
        started = await session.execute(_IS_FIRST_START, {"message_id": attempt.message_id})
        is_first_start = started.scalar_one()
        if message.fate == "lingers" and is_first_start:
            someone_lingers.set()
            await _stay(session, asyncio.Event())  # its killer comes meanwhile
        if message.fate == "kills":
            if is_first_start:
                await _stay(session, someone_lingers)
            os.kill(os.getpid(), signal.SIGKILL)
    if message.fate == "dies":
        raise Dead("hopeless", "the message says so")
    if message.fate == "fails_while_caused" and (await session.execute(_IS_CAUSED)).scalar_one():
        raise StandingTrouble("the cause is there")
    if attempt.attempt <= message.failing_attempts:
        raise PassingTrouble(f"attempt {attempt.attempt} of {message.failing_attempts} that fail")
