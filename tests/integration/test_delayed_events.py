"""Events for later: never early, never twice, none lost, whoever moves them and whatever dies meanwhile."""

import asyncio
import json
import os
import random
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import asyncpg
import pytest
from sqlalchemy.orm import Session

from tests.integration.relaying import FAST, RecordingBroker, eventually, relaying
from tests.integration.shop import KINDS, OrderPlaced, PageViewed, Target, sessions
from towpath.crashpoints import CrashPoint
from towpath.errors import ConfigurationError, StoreUnavailable
from towpath.outbox import emit, emit_many
from towpath.relay.hooks import RelayHooks
from towpath.relay.link import SCHEDULE, Link, link_errors
from towpath.relay.mover import Mover
from towpath.relay.options import RelayOptions
from towpath.store import migrate
from towpath.store.scheduled import Place, ScheduledStore
from towpath.testing.services import PostgresServer

ROOT = Path(__file__).parents[2]
STORE = ScheduledStore()
EAGER = RelayOptions(scheduled_poll=0.02, moved_rows=20)


@asynccontextmanager
async def mover(url: str, options: RelayOptions = EAGER) -> AsyncIterator[Mover]:
    link = Link(url, "mover", SCHEDULE, command_timeout_seconds=60)
    made = Mover(link, STORE, options, RelayHooks(UUID(int=1), {"system": "memory"}))
    try:
        yield made
    finally:
        made.close()


async def settled(one: Mover) -> float:
    """Step until there is nothing to do; how long it would wait then."""
    async with asyncio.timeout(30):
        while not (wait := await one.step()):
            pass
    return wait


async def schedule(db: Any, count: int, due: str, *, key: str = "k") -> None:
    """Rows in bulk, due at an SQL expression of `g`."""
    await db.execute(
        "insert into towpath.scheduled (message_id, destination, type, key, content_type, payload, due_at)"
        f" select gen_random_uuid(), 'orders', 'order.placed', '{key}' || g, 'x', '', {due}"
        f" from generate_series(1, {count}) g"
    )


def an_hours_work() -> str:
    """Ten due rows a second, each time moved by a step of its own."""
    move = STORE.statements["move"].replace("$1::bigint", "1000::bigint")
    return f"""
        do $work$ begin
          for second in 1 .. 3600 loop
            insert into towpath.scheduled (message_id, destination, type, content_type, due_at)
              select gen_random_uuid(), 'orders', 'churn', 'x', clock_timestamp() from generate_series(1, 10);
            commit;
            execute $move${move}$move$;
            commit;
          end loop;
        end $work$"""


async def moved(db: Any) -> list[str]:
    return [row["key"] for row in await db.fetch("select key from towpath.outbox order by id")]


@pytest.mark.parametrize("kind", KINDS)
async def test_an_event_for_later_is_written_with_the_change_and_not_into_the_outbox(
    db: Any, migrated_url: str, kind: str
) -> None:
    """R18 P1: through each kind of session, on the database's clock."""
    at = datetime.now(UTC) + timedelta(days=3)

    def work(target: Target, session: Session) -> None:
        with session.begin():
            emit(target, OrderPlaced(order_id="at"), at=at, headers={"tenant": "acme"})
            emit(target, OrderPlaced(order_id="now"))
            emit_many(target, [OrderPlaced(order_id="d1"), OrderPlaced(order_id="d2")], delay="90m")
            with suppress(ZeroDivisionError), session.begin_nested():
                emit(target, OrderPlaced(order_id="ghost"), delay="1h")
                raise ZeroDivisionError

    async with sessions(kind, migrated_url) as run:
        before = await db.fetchval("select towpath.clock()")
        await run(work)
        after = await db.fetchval("select towpath.clock()")

    assert await moved(db) == ["now"]
    rows = await db.fetch("select *, headers::text as pairs from towpath.scheduled order by id")
    assert [row["key"] for row in rows] == ["at", "d1", "d2"]
    assert rows[0]["due_at"] == at
    assert '["tenant","acme"]' in rows[0]["pairs"]
    assert (rows[0]["destination"], rows[0]["type"]) == ("orders", "order.placed")
    for row in rows[1:]:
        assert before <= row["due_at"] - timedelta(minutes=90) <= after


async def test_a_due_event_keeps_what_it_was_and_goes_where_its_destination_is_now(db: Any) -> None:
    """R18: id, key, headers and body; the broker of today."""
    async with db.transaction():
        id_ = await emit(
            db, OrderPlaced(order_id="o1", amount=7), delay=timedelta(0), headers={"tenant": "acme"}
        )
    await db.execute(
        "insert into towpath.broker values (1, 'other');"
        "insert into towpath.destination values ('orders', 1, 'somewhere')"
    )
    assert await STORE.move(db, 10) == 1

    row = await db.fetchrow(
        "select *, headers::text as pairs, towpath.shard(destination, key, message_id) as right_shard"
        " from towpath.outbox"
    )
    assert (row["message_id"], row["kind"], row["key"], row["destination"]) == (id_, "event", "o1", "orders")
    assert row["payload"] == b'{"order_id":"o1","amount":7}'
    assert '["tenant","acme"]' in row["pairs"]
    assert row["shard"] == row["right_shard"] >= 16
    assert row["created_at"] >= await db.fetchval("select due_at from towpath.scheduled")


async def test_a_relay_publishes_at_the_due_time_and_not_before(db: Any, migrated_url: str) -> None:
    """R18, end to end: each on its own time, in the order of the times."""
    broker = RecordingBroker()
    async with relaying(migrated_url, broker), relaying(migrated_url, broker):
        async with db.transaction():
            for number in (3, 1, 2):
                await emit(db, OrderPlaced(order_id=str(number)), delay=f"{number * 200}ms")
            await emit(db, PageViewed("/"), at=datetime.now(UTC) - timedelta(days=1))
            await emit(db, PageViewed("/later"), at=datetime.now(UTC) + timedelta(days=1))
        due = {
            row["key"]: row["due_at"] for row in await db.fetch("select key, due_at from towpath.scheduled")
        }
        await eventually(lambda: len({arrival.message.key for arrival in broker.arrivals}) == 4)

    assert {arrival.message.key for arrival in broker.arrivals} == {None, "1", "2", "3"}
    assert await moved(db) == [None, "1", "2", "3"]
    for row in await db.fetch("select key, created_at from towpath.outbox where key is not null"):
        assert row["created_at"] >= due[row["key"]]
    assert await db.fetchval("select count(*) from towpath.scheduled where due_at > now()") == 1


async def test_a_mover_sleeps_until_the_next_is_due_and_no_longer_than_half_a_second(
    db: Any, migrated_url: str
) -> None:
    """R18: within a second of its time."""
    assert RelayOptions().scheduled_poll == 0.5
    async with mover(migrated_url, RelayOptions(scheduled_poll=60)) as one:
        assert await settled(one) == 60
        async with db.transaction():
            await emit(db, PageViewed("/"), delay="1h")
            await emit(db, PageViewed("/"), delay="20s")
        assert 0 < await settled(one) < 20


async def test_a_poll_of_an_idle_reader_tells_the_mover_what_is_due(db: Any, migrated_url: str) -> None:
    """R18, R13: so that it need not look itself, which here it does every ten minutes."""
    broker = RecordingBroker()
    async with relaying(migrated_url, broker, replace(FAST, scheduled_poll=600.0)) as relay:
        await eventually(lambda: relay._mover.is_waiting)
        async with db.transaction():
            await emit(db, PageViewed("/"), delay="1s")
        await eventually(lambda: len(broker.arrivals) == 1)


async def test_a_backlog_of_one_moment_moves_in_bounded_steps(db: Any) -> None:
    """R18: a million for midnight are not one transaction."""
    await schedule(db, 2500, "timestamptz '2001-01-01' + interval '1 year' * (g % 2)")
    await db.execute("update towpath.scheduled_progress set due_upto = '2000-01-01'")

    assert [await STORE.move(db, 1000) for _ in range(4)] == [1000, 1000, 500, 0]
    assert len(set(await moved(db))) == 2500
    keys = [int(key[1:]) for key in await moved(db)]
    assert keys == sorted(keys, key=lambda n: (n % 2, n)), "in the order of due time and id"


async def test_moved_rows_are_deleted_in_batches_and_nothing_else(db: Any, migrated_url: str) -> None:
    await db.execute("update towpath.scheduled_progress set created_at = now()")  # the template may be old
    await schedule(db, 2500, "clock_timestamp() - interval '1 day'")
    await schedule(db, 3, "clock_timestamp() + interval '1 day'")
    assert await STORE.move(db, 10) == 2500
    await schedule(db, 2, "clock_timestamp() - interval '1 hour'")  # late, and not moved yet

    count, place = await STORE.forget_moved(db, Place(), 1000)
    assert count == 1000
    assert (await STORE.forget_moved(db, place, 2000))[0] == 1500
    assert await db.fetchval("select count(*) from towpath.scheduled") == 5
    for seq, age in ((50, "2 hours"), (51, "1 minute"), (52, "0")):
        await db.execute(
            "insert into towpath.scheduled_progress (seq, due_upto, id_upto, snapshot, created_at)"
            f" select {seq}, due_upto, id_upto, snapshot, now() - interval '{age}'"
            " from towpath.scheduled_progress where seq = 2"
        )
    async with mover(migrated_url) as one:
        await settled(one)
    assert await db.fetchval("select count(*) from towpath.scheduled") == 3
    kept = await db.fetchval("select array_agg(seq order by seq) from towpath.scheduled_progress")
    assert kept[:2] == [1, 2]
    assert 50 not in kept
    assert {51, 52} < set(kept)
    assert len(await moved(db)) == 2502


async def test_nothing_is_lost_doubled_or_early_while_two_movers_race(db: Any, migrated_url: str) -> None:
    """R18: late commits, rollbacks, savepoints, equal due times."""
    due: dict[str, datetime] = {}
    began = time.monotonic()

    def is_enough(one: Mover, two: Mover) -> bool:
        """Both won some of the races, or one of them never will."""
        seconds = time.monotonic() - began
        return seconds > 2.5 and (min(one.moved_count, two.moved_count) > 0 or seconds > 60)

    async def write(seed: int) -> None:
        rng, number = random.Random(seed), 0
        connection = await asyncpg.connect(migrated_url, timeout=30)
        while not is_enough(one, two):
            transaction = connection.transaction()
            await transaction.start()
            written: dict[str, datetime] = {}
            for _ in range(rng.choice((1, 1, 3))):
                number += 1
                at = datetime.now(UTC) + timedelta(seconds=rng.uniform(-0.5, 1))
                if rng.random() < 0.5:
                    at = at.replace(microsecond=at.microsecond // 250_000 * 250_000)
                key = f"{seed}-{number}"
                if rng.random() < 0.2:
                    with suppress(ZeroDivisionError):
                        async with connection.transaction():
                            await emit(connection, PageViewed("/"), key=f"ghost {key}", at=at)
                            raise ZeroDivisionError
                await emit(connection, PageViewed("/"), key=key, at=at)
                written[key] = at
            await asyncio.sleep(rng.random() * (0.6 if rng.random() < 0.1 else 0.02))
            if rng.random() < 0.15:
                await transaction.rollback()
            else:
                await transaction.commit()
                due.update(written)
        await connection.close(timeout=10)

    async with mover(migrated_url) as one, mover(migrated_url) as two:
        moving = [asyncio.create_task(each.run()) for each in (one, two)]
        await asyncio.gather(*[write(seed) for seed in range(8)])
        await eventually(lambda: one.moved_count + two.moved_count >= len(due))
        await asyncio.sleep(0.3)  # what would come twice
        for task in moving:
            task.cancel()
        await asyncio.gather(*moving, return_exceptions=True)
        counts = (one.moved_count, two.moved_count)

    rows = await db.fetch("select key, created_at from towpath.outbox")
    assert sorted(row["key"] for row in rows) == sorted(due)
    assert [row["key"] for row in rows if row["created_at"] < due[row["key"]]] == []
    assert sum(counts) == len(due)
    assert min(counts) > 0, "one of the two never won"


async def waits_for_a_lock(db: Any, other: Any) -> None:
    """Until the other connection stands behind somebody's lock."""
    waits = "select wait_event_type = 'Lock' from pg_stat_activity where pid = $1"
    async with asyncio.timeout(30):
        while not await db.fetchval(waits, other.get_server_pid()):  # noqa: ASYNC110 - the database is asked
            await asyncio.sleep(0.01)


async def test_of_two_movers_at_one_step_the_second_moves_nothing(db: Any, migrated_url: str) -> None:
    """R18: it waits for the first, which may still fail."""
    await schedule(db, 5, "clock_timestamp()")
    for commits in (False, True):
        second = await asyncpg.connect(migrated_url, timeout=30)
        transaction = db.transaction()
        await transaction.start()
        assert await STORE.move(db, 100) == 5
        racing = asyncio.create_task(STORE.move(second, 100))
        await waits_for_a_lock(db, second)
        assert not racing.done()
        if commits:
            await transaction.commit()
        else:
            await transaction.rollback()
        assert await racing == (None if commits else 5)
        if not commits:
            await db.execute(
                "delete from towpath.outbox; delete from towpath.scheduled_progress where seq > 1"
            )
        await second.close(timeout=10)
    assert len(await moved(db)) == 5


async def test_a_mover_killed_in_the_middle_of_a_step_leaves_nothing_half_moved(
    db: Any, migrated_url: str
) -> None:
    """R18 R4"""
    await schedule(db, 50, "clock_timestamp()")
    blocking = db.transaction()
    await blocking.start()
    await db.execute("lock table towpath.outbox in share mode")
    async with mover(migrated_url, RelayOptions()) as one:
        stepping = asyncio.create_task(one.step())
        look = await asyncpg.connect(migrated_url, timeout=30)
        waiting = "select pid from pg_stat_activity where application_name = 'towpath relay mover' and"
        async with asyncio.timeout(30):
            while (pid := await look.fetchval(f"{waiting} wait_event_type = 'Lock'")) is None:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await look.execute("select pg_terminate_backend($1)", pid)
        with pytest.raises(StoreUnavailable), link_errors():
            await stepping
        await look.close(timeout=10)
    await blocking.rollback()
    assert await moved(db) == []
    async with mover(migrated_url) as two:
        await settled(two)
    assert sorted(await moved(db)) == sorted(f"k{n}" for n in range(1, 51))


async def test_a_relay_killed_after_moving_leaves_the_rest_to_the_next(
    db: Any, migrated_url: str, tmp_path: Path
) -> None:
    """R18 R4: what it moved is in the outbox, durably, and is published once."""
    await schedule(db, 1500, "clock_timestamp()")
    with (tmp_path / "log").open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "outbox_relay",
            cwd=ROOT,
            stdout=output,
            stderr=output,
            env={
                **{name: value for name, value in os.environ.items() if not name.startswith("TOWPATH_")},
                "TOWPATH_DATABASE_URL": migrated_url,
                "TOWPATH_BROKER_URL": "memory://nobody",
                "TOWPATH_CRASH_AT": str(CrashPoint.MOVED_DUE),
            },
        )
        async with asyncio.timeout(60):
            assert await process.wait() == -signal.SIGKILL, (tmp_path / "log").read_text()
    async with mover(migrated_url) as one:
        await settled(one)
    keys = await moved(db)
    assert len(keys) == len(set(keys)) == 1500
    assert await db.fetchval("select count(*) from towpath.scheduled") == 0


async def test_an_immediate_restart_of_the_server_loses_and_doubles_none() -> None:
    """R18 R19"""
    with PostgresServer(fsync=True) as server:
        url = server.create_database("later")
        await asyncio.to_thread(migrate.upgrade, url)
        db = await asyncpg.connect(url, timeout=30)
        await schedule(db, 3000, "clock_timestamp() + interval '1 ms' * (g % 1500)")
        await db.close(timeout=10)
        broker = RecordingBroker()
        async with relaying(url, broker, FAST), relaying(url, broker, FAST):
            await eventually(lambda: len(broker.arrivals) > 200)
            await asyncio.to_thread(server.restart, immediate=True)
            await eventually(lambda: len({a.message.message_id for a in broker.arrivals}) == 3000, seconds=90)
        db = await asyncpg.connect(url, timeout=30)
        keys = await moved(db)
        await db.close(timeout=10)
    assert len(keys) == len(set(keys)) == 3000


async def test_what_is_scheduled_for_tomorrow_costs_today_nothing(
    db: Any, migrated_url: str, scale: float
) -> None:
    """R18, R3: about as few pages with 100,000 as with ten, also behind an hour's steps under a held horizon.

    `TOWPATH_TEST_SCALE=10` makes it a million.
    """
    link = Link(migrated_url, "mover", SCHEDULE, command_timeout_seconds=60)
    connection = await link.connection()

    async def pages() -> dict[str, int]:
        found = {}
        for name in ("look", "move"):
            text = STORE.statements[name].replace("$1::bigint", "1000::bigint")
            [plan] = json.loads(await connection.fetchval(f"explain (analyze, buffers, format json) {text}"))
            assert "Seq Scan" not in json.dumps(plan), name
            found[name] = plan["Plan"]["Shared Hit Blocks"] + plan["Plan"]["Shared Read Blocks"]
        return found

    await schedule(db, 10, "clock_timestamp() + interval '1 day'")
    assert await STORE.move(connection, 1000) == 0
    await schedule(db, 3, "clock_timestamp()", key="first")
    few = await pages()
    await schedule(db, int(100_000 * scale), "clock_timestamp() + interval '1 day' + interval '1 ms' * g")
    assert await STORE.move(connection, 1000) == 0
    holder = await asyncpg.connect(migrated_url, timeout=30)
    await holder.execute(
        "begin isolation level repeatable read; select count(*) from towpath.scheduled_progress"
    )
    await connection.execute(an_hours_work())
    place, count, deleted = Place(), 1000, 0
    while count == 1000:
        count, place = await STORE.forget_moved(connection, place, 1000)
        deleted += count
    assert deleted == 3 + 10 * 3600
    await schedule(db, 3, "clock_timestamp()", key="today")
    many = await pages()
    await holder.close(timeout=10)
    link.drop()
    assert set(await moved(db)) >= {"today1", "today2", "today3"}
    for name, count in many.items():
        # Each of the five ways into the indexes is two levels deeper, and new pages are mapped.
        assert count < few[name] + 60, (few, many)


async def test_progress_of_another_cluster_is_refused(db: Any) -> None:
    """R20: it says which transactions were seen, and here they are others."""
    await db.execute("update towpath.scheduled_progress set xid = '1'")
    with pytest.raises(ConfigurationError, match="another database cluster"):
        await STORE.look(db)
