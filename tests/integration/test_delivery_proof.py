"""Canaries: every shard proves its delivery, and a message that is skipped is missed."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import datetime
from typing import Any
from uuid import uuid4

import asyncpg
import pytest

from tests.fixtures.fix_cli import Run
from tests.integration.relaying import FAST, RecordingBroker, emit, eventually, relaying
from towpath.brokers.factory import broker_from_url
from towpath.brokers.ports import GroupTopology
from towpath.messages.limits import CANARY

OFTEN = replace(FAST, canary_every=0.4)
AT_BROKERS = replace(OFTEN, lease=12.0, publish_deadline=5.0)


async def until(condition: Callable[[], Awaitable[bool]], *, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not await condition():
        assert time.monotonic() < deadline, "it did not become true in time"
        await asyncio.sleep(0.05)


async def confirmed_count(db: "asyncpg.Connection[Any]") -> int:
    return int(await db.fetchval("select count(*) from towpath.canary where is_confirmed"))


async def test_every_shard_proves_its_delivery_again_and_again(
    db: "asyncpg.Connection[Any]", migrated_url: str
) -> None:
    """R21: by two relays, each for its shards; one row a shard."""
    broker = RecordingBroker()
    async with relaying(migrated_url, broker, OFTEN), relaying(migrated_url, broker, OFTEN):
        await until(lambda: is_all(db, "select count(*) from towpath.canary"))
        for _ in range(2):
            now = await db.fetchval("select towpath.clock()")
            await until(
                lambda now=now: is_all(db, "select count(*) from towpath.canary where proved_at > $1", now)
            )
    assert {each.message.address for each in broker.arrivals} == {CANARY}
    assert await db.fetchval("select count(*) from towpath.canary") == 16


async def is_all(db: "asyncpg.Connection[Any]", query: str, *arguments: object) -> bool:
    return bool(await db.fetchval(query, *arguments) == 16)


async def test_a_skipped_canary_is_missed_though_everything_counts_as_sent(
    db: "asyncpg.Connection[Any]", migrated_url: str, towpath: Run, caplog: pytest.LogCaptureFixture
) -> None:
    """R21: the proof does not rest on the formula that says what is sent."""
    await db.execute(
        """
        create function skip() returns trigger language plpgsql as $$
        begin new.xid := '3'; return new; end $$;
        create trigger skip before insert on towpath.outbox
          for each row when (new.shard = 5) execute function skip();
        """
    )
    caplog.set_level(logging.ERROR)
    broker = RecordingBroker()
    async with relaying(migrated_url, broker, OFTEN):
        await eventually(lambda: any(each.message == "relay.canary_missing" for each in caplog.records))
        now = await db.fetchval("select towpath.clock()")
        await until(lambda: are_proved_since(db, now, set(range(16)) - {5}))
    assert not await db.fetchval("select is_confirmed from towpath.canary where shard = 5")
    assert await db.fetchval("select status from towpath.outbox_message where shard = 5 limit 1") == "SENT"
    await db.execute("update towpath.canary set proved_at = proved_at - interval '6 minutes' where shard = 5")
    ran = await asyncio.to_thread(towpath, "outbox", "status")
    assert "shards [5] have had no canary confirmed" in ran.out


async def are_proved_since(db: "asyncpg.Connection[Any]", time_: datetime, shards: set[int]) -> bool:
    """Whether just these shards have delivered a canary since: what a later round does not take back."""
    rows = await db.fetch("select shard from towpath.canary where proved_at > $1", time_)
    return {row["shard"] for row in rows} == shards


@pytest.mark.parametrize("name", ["kafka", "rabbitmq"])
async def test_a_missing_destination_of_canaries_holds_up_and_buries_nothing(
    db: "asyncpg.Connection[Any]", migrated_url: str, request: pytest.FixtureRequest, name: str
) -> None:
    """R21: events arrive, the relay stays ready; once the destination is there, every shard proves itself."""
    fixture = "kafka_bootstrap" if name == "kafka" else "rabbit_url"
    given: str = request.getfixturevalue(fixture)
    url = f"kafka://{given}" if name == "kafka" else given
    topic = f"orders-{uuid4().hex[:8]}"
    await db.execute(
        "insert into towpath.destination values ($1, 0, $2)", CANARY, f"missing-{uuid4().hex[:8]}"
    )
    admin = broker_from_url(url).admin()
    await admin.apply([topic], [GroupTopology("g", (topic,))], partitions=2)
    async with relaying(migrated_url, broker_from_url(url), AT_BROKERS) as relay:
        await until(lambda: is_all(db, "select count(*) from towpath.canary"))
        for number in range(40):
            await emit(db, str(number), b"x", destination=topic)
        await eventually(lambda: relay.status().published_count >= 40)
        await until(lambda: is_nothing_pending(db))
        await eventually(lambda: relay.status().problems == [])
        assert await confirmed_count(db) == 0
        await admin.apply([CANARY], [], partitions=1)
        await db.execute("delete from towpath.destination")  # relays hear of it with a heartbeat
        await until(lambda: is_all(db, "select count(*) from towpath.canary where is_confirmed"), seconds=60)
    await admin.aclose()
    assert await db.fetchval("select count(*) from towpath.dead_letter") == 0


async def is_nothing_pending(db: "asyncpg.Connection[Any]") -> bool:
    pending = (
        "select count(*) from towpath.outbox_message where status = 'PENDING' and type <> 'towpath.canary'"
    )
    return not await db.fetchval(pending)
