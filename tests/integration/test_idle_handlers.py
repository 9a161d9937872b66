"""A handler that idles in its transaction is a failure that a person understands, not an outage."""

import time

import asyncpg
import psycopg
import pytest
from sqlalchemy import text

from tests.integration.engine import EFFECTS, Posted, bench, depot, effects, until
from tests.integration.test_effects import write
from towpath import Batch, RetryPolicy, SyncTx
from towpath.app import App
from towpath.context import Call, Tx

HASTY = RetryPolicy(attempts=2, base="1ms", cap="10ms")
PID = text("select pg_backend_pid()")
IS_THERE = "select exists (select from pg_stat_activity where pid = {pid})"


async def idle(tx: Tx, url: str) -> None:
    """Wait outside the transaction, until the database has ended its session."""
    pid = int(await tx.session.scalar(PID) or 0)
    looking = await asyncpg.connect(url, timeout=30)

    async def is_gone() -> bool:
        return not await looking.fetchval(IS_THERE.format(pid=pid))

    await until(is_gone)
    await looking.close(timeout=30)


def idle_in_thread(tx: SyncTx, url: str) -> None:
    """The same in a plain function."""
    pid = int(tx.session.scalar(PID) or 0)
    with psycopg.connect(url, autocommit=True) as looking:
        row = (True,)
        while row and row[0]:
            time.sleep(0.05)
            row = looking.execute(IS_THERE.format(pid=pid)).fetchone()


def idler(kind: str, url: str) -> App:
    """A group whose handler of this kind writes and then idles."""
    app = depot(retry=HASTY)
    if kind == "transactional":

        @app.transactional()
        async def sort(parcel: Posted, tx: Tx) -> None:
            await write(tx, parcel)
            await idle(tx, url)

    elif kind == "wrapping":

        @app.transactional()
        async def sort_wrapping(parcel: Posted, tx: Tx) -> None:
            await write(tx, parcel)
            await idle(tx, url)
            try:
                await write(tx, parcel)
            except Exception as error:
                raise RuntimeError("could not write") from error

    elif kind == "plain":

        @app.transactional()
        def sort_plain(parcel: Posted, tx: SyncTx) -> None:
            idle_in_thread(tx, url)

    elif kind == "batch":

        @app.batch(max_size=10)
        async def sort_all(parcels: Batch[Posted], tx: Tx) -> None:
            await write(tx, parcels.payloads[0])
            await idle(tx, url)

    else:

        @app.idempotent()
        async def sort_outside(parcel: Posted, call: Call) -> None:
            async with call.transaction() as tx:
                await write(tx, parcel)
                await idle(tx, url)

    return app


@pytest.mark.parametrize("kind", ["transactional", "wrapping", "plain", "batch", "idempotent"])
async def test_a_handler_that_idles_in_its_transaction_spends_attempts_and_dies_with_the_fix_named(
    migrated_url: str, kind: str
) -> None:
    """C12: the database ends its session to fence it, which is no outage."""
    async with bench(idler(kind, migrated_url), migrated_url) as engine:
        await engine.db.execute(EFFECTS)
        async with engine.member(session_lease_seconds=0.5):
            id_ = await engine.publish(Posted("a"))
            row = await engine.reaches(id_, "DEAD")
            assert (row["reason_code"], row["attempt"]) == ("handler_idled", 2)
            (letter,) = await engine.letters()
            told = letter["error_message"]
            if kind != "wrapping":
                assert "idempotent handler" in told, told
                assert "TOWPATH_WORKER__LEASE" in told, told
        assert await effects(engine) == []


async def test_a_session_that_is_cut_while_its_handler_works_spends_nothing(migrated_url: str) -> None:
    """C13: long before the limit it is an outage, whoever did it."""
    app = depot(retry=RetryPolicy(attempts=1, base="1ms", cap="10ms"))
    cut = list[int]()

    @app.transactional()
    async def sort(parcel: Posted, tx: Tx) -> None:
        if not cut:
            cut.append(int(await tx.session.scalar(PID) or 0))
            killer = await asyncpg.connect(migrated_url, timeout=30)
            await killer.execute("select pg_terminate_backend($1, 30000)", cut[0])
            await killer.close(timeout=30)
        await write(tx, parcel)

    async with bench(app, migrated_url) as engine:
        await engine.db.execute(EFFECTS)
        async with engine.member(session_lease_seconds=600):
            row = await engine.reaches(await engine.publish(Posted("a")), "SUCCEEDED", "DEAD")
            assert (row["state"], row["attempt"]) == ("SUCCEEDED", 1)
        assert await effects(engine) == [("a", 0)]
