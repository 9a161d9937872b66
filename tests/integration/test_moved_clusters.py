"""Clusters that go on elsewhere with the transaction ids they had: promoted standbys, upgrades."""

import asyncio
import dataclasses
import os
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from uuid import UUID

import asyncpg

from tests.fixtures.fix_postgres import oldest_postgres, plain_cluster
from tests.integration.relaying import (
    FAST,
    RecordingBroker,
    emit,
    eventually,
    prepare,
    race,
    relaying,
    verdict,
)
from towpath.store import migrate
from towpath.testing.services import PostgresServer

NEXT_ID = "select pg_snapshot_xmax(pg_current_snapshot())::text"
EMITTED = "select message_id, key, payload, xid::text::bigint as xid from towpath.outbox order by id"


@asynccontextmanager
async def session(url: str) -> "AsyncIterator[asyncpg.Connection[Any]]":
    connection = await asyncpg.connect(url, timeout=30)
    try:
        yield connection
    finally:
        await connection.close(timeout=10)


async def race_all(url: str, seconds: float, seed: int) -> None:
    """Writers, until the time is over or their server is."""
    until = time.monotonic() + seconds
    writers = [race(url, [], writer=number, until=until, seed=seed) for number in range(6)]
    await asyncio.gather(*writers, return_exceptions=True)


async def race_past(url: str, xid: int, seed: int) -> None:
    """Writers, until so many transaction ids were given out."""
    async with session(url) as db:
        while int(await db.fetchval(NEXT_ID)) < xid:
            await race_all(url, 0.5, seed)
            seed += 1


def arrived(broker: RecordingBroker) -> set[UUID]:
    return {each.message.message_id for each in broker.arrivals}


async def test_a_promoted_standby_that_was_behind_the_relay_skips_no_surviving_row() -> None:
    """R19: ids that the relay has seen are given out again on another timeline; what came by them is sent."""
    with PostgresServer() as primary:
        url = primary.create_database("moving")
        await asyncio.to_thread(migrate.upgrade, url)
        async with session(url) as db:
            await prepare(db)

        def copy(server: PostgresServer) -> None:
            server.run(
                "pg_basebackup", "-D", server.data_directory, "-R", "-X", "stream", "-c", "fast",
                "-d", primary.url(),
            )  # fmt: skip

        with PostgresServer(fill=copy) as standby:
            hosts = f"127.0.0.1:{primary.port},127.0.0.1:{standby.port}"
            either = f"postgresql://postgres@{hosts}/moving?target_session_attrs=primary"
            broker = RecordingBroker()
            async with relaying(either, broker) as relay:
                await race_all(url, 1, seed=1)
                async with session(standby.url()) as watching:
                    await watching.execute("alter system set primary_conninfo = ''")
                    await watching.execute("select pg_reload_conf()")
                    await detached(watching)
                    ids_copied = await watching.fetchval(NEXT_ID)
                    await race_past(url, int(ids_copied) + 500, seed=2)
                    async with session(url) as db:
                        ahead = await db.fetchval(NEXT_ID)
                        await eventually_sent(db, broker)
                    await asyncio.to_thread(primary.stop, immediate=True)
                    await watching.execute("select pg_promote()")
                there = standby.url("moving")
                await race_past(there, int(ahead), seed=3)
                async with session(there) as db:
                    await eventually_sent(db, broker)
                    rows = await db.fetch(EMITTED)
                await eventually(lambda: relay.status().is_ready)
    reused = [row for row in rows if int(ids_copied) <= row["xid"] < int(ahead)]
    assert len(reused) > 20, "the new timeline did not give out ids that the relay had seen"
    survivors = {row["message_id"]: row for row in rows}
    first = dict.fromkeys(
        each.message.message_id for each in broker.arrivals if each.message.message_id in survivors
    )
    came = [(survivors[id_]["key"], survivors[id_]["payload"]) for id_ in first]
    committed = [(row["key"], int(row["payload"])) for row in rows]
    found = verdict(committed, came)
    assert (found.lost, found.inversions) == (0, 0)


async def detached(standby: "asyncpg.Connection[Any]") -> None:
    """Wait until the standby receives nothing any more."""
    deadline = time.monotonic() + 30
    for _ in iter(lambda: time.monotonic() < deadline, False):
        if not await standby.fetchval("select count(*) from pg_stat_wal_receiver"):
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it still receives")


async def eventually_sent(db: "asyncpg.Connection[Any]", broker: RecordingBroker) -> None:
    """Wait until everything that is there has come."""
    there = {row["message_id"] for row in await db.fetch("select message_id from towpath.outbox")}
    await eventually(lambda: there <= arrived(broker), seconds=60)


async def test_an_upgraded_cluster_is_continued_where_it_was() -> None:
    """R20: schema and relay run on the old one; pg_upgrade keeps transaction ids, so nothing repeats."""
    broker, same_place = RecordingBroker(), dataclasses.replace(FAST, environment="production")
    with await asyncio.to_thread(oldest_postgres) as old:
        url = old.create_database("upgraded")
        await asyncio.to_thread(migrate.upgrade, url)
        async with relaying(url, broker, same_place), session(url) as db:
            assert await db.fetchval("show server_version_num") < "180000"
            for number in range(10):
                await emit(db, str(number), b"before")
            await eventually(lambda: len(broker.arrivals) == 10)
        async with session(url) as db:
            for number in range(10):
                await emit(db, str(number), b"between")
        old.stop()

        def upgrade(server: PostgresServer) -> None:
            plain_cluster(server)
            scratch = server.group.directory / "upgrade"
            scratch.mkdir()
            shutil.chown(scratch, server.owner.uid if server.owner else os.geteuid())
            server.run(
                "pg_upgrade", "-b", old.program("postgres").parent, "-d", old.data_directory,
                "-D", server.data_directory, "-U", "postgres", "-p", str(old.port), "-P", str(server.port),
                "-s", scratch, cwd=scratch,
            )  # fmt: skip

        with PostgresServer(fill=upgrade) as new:
            there = new.url("upgraded")
            async with relaying(there, broker, same_place), session(there) as db:
                await eventually(lambda: len(broker.arrivals) >= 20)
                for number in range(10):
                    await emit(db, str(number), b"after")
                await eventually(lambda: len(broker.arrivals) >= 30)
    assert broker.payloads == [b"before"] * 10 + [b"between"] * 10 + [b"after"] * 10


async def test_a_cluster_recovered_to_a_point_in_time_is_continued_where_it_was() -> None:
    """R20: what was sent after the point is unsent again, and ids given out again hide nothing."""
    same_place = dataclasses.replace(FAST, environment="production")
    with PostgresServer() as lost:
        url = lost.create_database("recovered")
        await asyncio.to_thread(migrate.upgrade, url)
        backup = lost.group.directory / "base"
        backup.mkdir()
        shutil.chown(backup, lost.owner.uid if lost.owner else os.geteuid())
        await asyncio.to_thread(
            lost.run, "pg_basebackup", "-D", backup, "-X", "stream", "-c", "fast", "-d", lost.url()
        )
        broker = RecordingBroker()
        async with relaying(url, broker, same_place), session(url) as db:
            await emit_all(db, b"before")
            await eventually(lambda: len(broker.arrivals) == 10)
        async with session(url) as db:
            await emit_all(db, b"pending")
            await db.execute("select pg_create_restore_point('here')")
        async with relaying(url, broker, same_place), session(url) as db:
            await emit_all(db, b"gone")
            await eventually(lambda: len(broker.arrivals) == 30)
        lost.stop()

        def recover(server: PostgresServer) -> None:
            shutil.copytree(backup, server.data_directory, dirs_exist_ok=True)
            (server.data_directory / "recovery.signal").touch()

        target = {
            "restore_command": f"cp {lost.data_directory}/pg_wal/%f %p",
            "recovery_target_name": "here",
            "recovery_target_action": "promote",
        }
        with PostgresServer(fill=recover, settings=target) as server:
            there, broker = server.url("recovered"), RecordingBroker()
            async with relaying(there, broker, same_place), session(there) as db:
                await eventually(lambda: len(broker.arrivals) >= 10)
                await emit_all(db, b"after")
                await eventually(lambda: len(broker.arrivals) >= 20)
    assert broker.payloads == [b"pending"] * 10 + [b"after"] * 10


async def emit_all(db: "asyncpg.Connection[Any]", payload: bytes) -> None:
    """One message of each of ten keys."""
    for number in range(10):
        await emit(db, str(number), payload)
