"""A schema that becomes newer while this version of the library runs."""

import asyncio
from datetime import timedelta
from typing import Any

import asyncpg
import pytest

from tests.fixtures.fix_cli import Ran, Run
from tests.integration.engine import Posted, bench, depot, until
from tests.integration.relaying import FAST, RecordingBroker
from tests.upgrades import know
from towpath.brokers.memory.broker import MemoryBroker
from towpath.consumer.engine import Consumer
from towpath.consumer.service import _Probe
from towpath.context import Call
from towpath.errors import SchemaMismatch, StoreError
from towpath.relay import Relay
from towpath.store import installed, migrate
from towpath.store.database import Database

TOO_NEW = (
    "the schema towpath has version 3 and works with towpath of version 2 or newer, this one is of 1: "
    "install a newer towpath"
)
CONTRACT = """
    update towpath.meta set value = '3' where name = 'schema_version';
    update towpath.meta set value = '2' where name = 'compatible_from';
"""


async def upgrade(url: str) -> str:
    return await asyncio.to_thread(migrate.upgrade, url)


async def test_an_older_command_line_works_with_the_next_schema_and_says_so(
    migrated_url: str, towpath: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """O3: also after the code was rolled back, and the schema was not."""
    with monkeypatch.context() as newer:
        know(newer, "additive")
        assert await upgrade(migrated_url) == "0002"
    line = "the schema is at revision 0002, newer than 0001 of this towpath, which works with it\n"

    assert await asyncio.to_thread(towpath, "db", "check") == Ran(0, line, "")
    assert await asyncio.to_thread(towpath, "db", "upgrade") == Ran(0, line, "")
    assert (await asyncio.to_thread(towpath, "dlq", "list")).code == 0


async def test_the_sql_between_two_revisions_does_what_the_upgrade_does(
    migrated_url: str, db: Any, towpath: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """O1: for those who run it by hand; nothing is asked of the database."""
    know(monkeypatch, "additive", "contracting")
    monkeypatch.setenv("TOWPATH_DATABASE_URL", "postgresql://nobody@127.0.0.1:1/nothing")
    ran = await asyncio.to_thread(towpath, "db", "sql", "--from", "0001", "--to", "0002")

    assert (ran.code, ran.err) == (0, "")
    await db.execute(ran.out)
    assert await asyncio.to_thread(migrate.current, migrated_url) == "0002"
    assert await db.fetchval("select count(*) from towpath.extra") == 0


@pytest.mark.parametrize(
    "arguments", [("--from", "9999"), ("--to", "\x1b"), ("--from", "0002", "--to", "0001")]
)
def test_sql_between_revisions_that_have_no_way_is_refused_in_one_line(
    towpath: Run, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    """O2, X2"""
    know(monkeypatch, "additive")
    ran = towpath("db", "sql", *arguments)
    assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)


async def test_a_contracted_schema_is_refused_and_nothing_is_done_to_it(
    migrated_url: str, towpath: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """O2"""
    with monkeypatch.context() as newer:
        know(newer, "additive", "contracting")
        assert await upgrade(migrated_url) == "0003"

    for arguments in (("dlq", "list"), ("db", "upgrade")):
        ran = await asyncio.to_thread(towpath, *arguments)
        assert (ran.code, ran.err) == (1, f"towpath: {TOO_NEW}\n")
    ran = await asyncio.to_thread(towpath, "db", "check")
    assert (ran.code, ran.out) == (3, f"{TOO_NEW}\n")


async def test_a_newer_library_refuses_the_schema_until_it_was_upgraded(
    migrated_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """O2: so the schema is upgraded before the code."""
    monkeypatch.setattr(installed, "SCHEMA_VERSION", 2)
    consumer = Consumer(depot_with_handler(), Database(migrated_url), MemoryBroker("memory://new"))

    with pytest.raises(SchemaMismatch, match="has version 1, this towpath needs 2: run towpath db upgrade"):
        await consumer.run(asyncio.Event())
    with pytest.raises(SchemaMismatch, match="has version 1, this towpath needs 2: run towpath db upgrade"):
        await Relay(migrated_url, RecordingBroker(), FAST).run(asyncio.Event())


def depot_with_handler() -> Any:
    app = depot()

    @app.idempotent()
    async def sort(parcel: Posted, call: Call) -> None: ...

    return app


async def test_a_worker_that_the_schema_left_behind_ends_what_it_runs_and_says_why(migrated_url: str) -> None:
    app, may_end, begun = depot(), asyncio.Event(), asyncio.Event()

    @app.idempotent()
    async def sort(parcel: Posted, call: Call) -> None:
        begun.set()
        await may_end.wait()

    async with bench(app, migrated_url, drain_timeout=timedelta(seconds=60)) as engine:
        consumer = Consumer(app, Database(migrated_url, pool_size=6), engine.broker, engine.settings)
        running = asyncio.create_task(consumer.run(asyncio.Event()))
        id_ = await engine.publish(Posted("a"))
        await asyncio.wait_for(begun.wait(), 60)
        await engine.db.execute(CONTRACT)
        await until(lambda: consumer.health.outdated is not None, seconds=60)

        told = _Probe("depot", consumer.health).readiness()
        assert (told["ok"], told["schema"]) == (False, TOO_NEW)
        may_end.set()
        with pytest.raises(SchemaMismatch, match="install a newer towpath"):
            await asyncio.wait_for(running, 60)
        assert await engine.state(id_) == "SUCCEEDED"
        assert await engine.db.fetchval("select count(*) from towpath.worker") == 0


async def test_a_relay_that_the_schema_left_behind_drains_and_says_why(db: Any, migrated_url: str) -> None:
    relay = Relay(migrated_url, RecordingBroker(), FAST)
    running = asyncio.create_task(relay.run(asyncio.Event()))
    await until(lambda: bool(relay.status().shards), seconds=60)

    await db.execute(CONTRACT)

    with pytest.raises(SchemaMismatch, match="install a newer towpath"):
        await asyncio.wait_for(running, 60)
    assert (relay.status().is_ready, relay.status().is_draining) == (False, True)
    assert any(TOO_NEW in problem for problem in relay.status().problems)
    assert await db.fetchval("select count(*) from towpath.shard_lease where relay is not null") == 0


async def test_producers_do_not_queue_behind_an_upgrade_that_waits_for_a_table(
    db: Any, migrated_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P3: it waits for a transaction that forgot to end, they would wait for it."""
    know(monkeypatch, "additive")
    monkeypatch.setattr(migrate, "_PATIENCE_SECONDS", 600.0)
    emit = "select towpath.emit('orders', 'order.placed', '{}')"
    holder = await asyncpg.connect(migrated_url)
    try:
        forgotten = holder.transaction()
        await forgotten.start()
        await holder.execute(emit)
        waits, tries = asyncio.Event(), 0

        upgrading = asyncio.create_task(upgrade(migrated_url))
        while tries < 3:  # the upgrade has come, and waits, three times
            is_waiting = await db.fetchval(
                "select exists (select from pg_locks where not granted and mode = 'AccessExclusiveLock')"
            )
            tries += is_waiting and not waits.is_set()
            (waits.set if is_waiting else waits.clear)()
            await asyncio.wait_for(db.execute(emit), 60)
            assert not upgrading.done()
        await forgotten.rollback()
        assert await asyncio.wait_for(upgrading, 60) == "0002"
    finally:
        await holder.close()


async def test_an_upgrade_gives_up_on_a_table_that_is_never_free(
    migrated_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """O2"""
    know(monkeypatch, "additive")
    monkeypatch.setattr(migrate, "_PATIENCE_SECONDS", 0.0)
    holder = await asyncpg.connect(migrated_url)
    try:
        async with holder.transaction():
            await holder.execute("select towpath.emit('orders', 'order.placed', '{}')")
            with pytest.raises(StoreError, match=r"kept a table locked .* end it .* nothing was changed"):
                await upgrade(migrated_url)
    finally:
        await holder.close()
    assert await asyncio.to_thread(migrate.current, migrated_url) == "0001"
