"""Whoever loses a race for rows in the database tries again; a deadlock is no reason to end a worker."""

import asyncio
from contextlib import suppress
from datetime import timedelta
from typing import Any
from uuid import UUID

import asyncpg
import pytest

from tests.integration.engine import Engine, Posted, bench, depot, until
from towpath import App, Call

LOCK = "select 1 from towpath.task where id = $1 for update"


def patient(*, reports: bool) -> tuple[App, asyncio.Event]:
    """Handlers that say how far they are, if asked, and wait until they may end."""
    app, may_end = depot(), asyncio.Event()

    @app.idempotent()
    async def sort(parcel: Posted, call: Call) -> None:
        if reports:
            await call.progress(0.5)
        await may_end.wait()

    return app, may_end


async def waits_for_a_lock(db: Any) -> bool:
    return bool(
        await db.fetchval(
            "select count(*) from pg_stat_activity "
            "where datname = current_database() and application_name = 'towpath' and wait_event_type = 'Lock'"
        )
    )


async def locked_against_order(engine: Engine, url: str, ids: list[UUID], act: Any) -> None:
    """Hold the later row, let `act` lock the earlier one and wait, then ask for that: `act` must give way."""
    first, second = sorted(ids)
    other = await asyncpg.connect(url, server_settings={"deadlock_timeout": "10s"}, timeout=30)
    try:
        # Where `act` had waited for too long by then to be the one that loses, this one does.
        with suppress(asyncpg.DeadlockDetectedError):
            async with other.transaction():
                await other.execute(LOCK, second)
                acting = asyncio.ensure_future(act)
                await until(lambda: waits_for_a_lock(engine.db))
                await other.execute(LOCK, first)
    finally:
        await other.close()
    await acting


async def is_reported(engine: Engine) -> bool:
    return bool(await engine.db.fetchval("select bool_and(progress is not null) from towpath.task"))


@pytest.mark.parametrize("way", ["progress", "hand back"])
async def test_a_worker_outlives_a_deadlock(migrated_url: str, way: str) -> None:
    """C17, S4: what it wanted to write is written with the next try."""
    app, may_end = patient(reports=way == "progress")
    async with bench(
        app, migrated_url, beat_every=timedelta(seconds=2), drain_timeout=timedelta(milliseconds=1)
    ) as engine:
        async with engine.member() as member:
            ids = [await engine.publish(Posted(parcel)) for parcel in "ab"]
            for id_ in ids:
                await engine.reaches(id_, "RUNNING")

            act = asyncio.sleep(0) if way == "progress" else member.stop()
            await locked_against_order(engine, migrated_url, ids, act)
            if way == "progress":
                await until(lambda: is_reported(engine))
        may_end.set()
        async with engine.member():
            for id_ in ids:
                await engine.reaches(id_, "SUCCEEDED")
