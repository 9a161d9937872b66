"""Publishing stopped by a person: nothing leaves, nothing is lost, everything else goes on."""

import asyncio
import time
from dataclasses import replace
from typing import Any
from uuid import uuid4

import asyncpg
import pytest

from tests.integration.relaying import FAST, emit, eventually, judge, prepare, race, relaying
from tests.integration.test_publish_gates import GATES, PARKED, Sick, decide, policy, until
from towpath.brokers.factory import broker_from_url
from towpath.brokers.ports import GroupTopology
from towpath.store.pauses import EVERYTHING, PauseStore, Target

PENDING = "select count(*) from towpath.outbox_message where status = 'PENDING'"


async def pause(db: "asyncpg.Connection[Any]", name: str = "orders") -> None:
    """As the command does."""
    assert await PauseStore().pause(db, Target("publish", name), actor="ann", reason="moves")


async def resume(db: "asyncpg.Connection[Any]", name: str = "orders") -> None:
    """As the command does."""
    assert await PauseStore().resume(db, Target("publish", name))


async def test_a_paused_destination_waits_in_order_while_others_go_on(
    db: "asyncpg.Connection[Any]", migrated_url: str
) -> None:
    """R10: also without a key, across a change of relays, and with messages written while it catches up."""
    broker = Sick()
    async with relaying(migrated_url, broker) as relay:
        await emit(db, "k", b"0")
        await eventually(lambda: broker.of_key("k") == [b"0"])
        await pause(db)
        await eventually(lambda: relay.status().paused == ["orders"])
        for number in range(1, 4):
            await emit(db, "k", b"%d" % number)
            await emit(db, None, b"without")
            await emit(db, "k", b"elsewhere", destination="invoices")
        await until(db, PARKED, 6)
        await eventually(lambda: broker.of_key("k") == [b"0"] + 3 * [b"elsewhere"])
        status = relay.status()
        assert (status.is_ready, status.gate_count, status.held_count) == (True, 0, 0)
    async with relaying(migrated_url, broker, replace(FAST, window_rows=2)) as relay:
        await emit(db, "k", b"4")
        await until(db, PARKED, 7)
        assert b"4" not in broker.payloads
        await resume(db)
        await emit(db, "k", b"5")
        await until(db, GATES, 0)
        await eventually(lambda: relay.status().paused == [])
        await emit(db, "k", b"6")
        await eventually(lambda: b"6" in broker.payloads)
    of_key = [payload for payload in broker.of_key("k") if payload != b"elsewhere"]
    assert of_key == [b"%d" % number for number in range(7)]
    assert broker.payloads.count(b"without") == 3


async def test_while_everything_is_paused_nothing_is_sent_and_shards_and_leases_stay(
    db: "asyncpg.Connection[Any]", migrated_url: str
) -> None:
    """R10, R22: not what was read before, not by a relay that starts meanwhile; the rows are unsent."""
    broker = Sick()
    held = "select array_agg((shard, relay, epoch)::text order by shard) from towpath.shard_lease"
    async with relaying(migrated_url, broker) as relay:
        await until(db, "select count(*) from towpath.shard_lease where relay is not null", 16)
        before = await db.fetchval(held)
        await pause(db, EVERYTHING)
        await eventually(lambda: relay.status().paused == [EVERYTHING])
        for number in range(20):
            await emit(db, "k", b"%d" % number)
        beaten = relay._heartbeat.beat_at
        await eventually(lambda: relay._heartbeat.beat_at > beaten + 1)
        assert (broker.payloads, relay.status().is_ready) == ([], True)
        assert await db.fetchval(held) == before
        assert await db.fetchval(PENDING) == 20
    async with relaying(migrated_url, broker) as relay:
        await eventually(lambda: relay.status().paused == [EVERYTHING])
        await eventually(lambda: len(relay.status().shards) == 16)
        beaten = relay._heartbeat.beat_at
        await eventually(lambda: relay._heartbeat.beat_at > beaten + 1)
        assert (broker.payloads, broker.attempts) == ([], 0)
        await resume(db, EVERYTHING)
        await eventually(lambda: len(broker.payloads) == 20)
    assert broker.of_key("k") == [b"%d" % number for number in range(20)]


async def test_what_waits_for_a_decision_waits_for_the_pause_as_well(
    db: "asyncpg.Connection[Any]", migrated_url: str
) -> None:
    """R8, R23: a decision during the pause sends nothing; afterwards the key's order is kept."""
    await policy(db, "park_key")
    broker = Sick(b"1")
    for number in range(3):
        await emit(db, "k", b"%d" % number)
    async with relaying(migrated_url, broker) as relay:
        await until(db, PARKED, 1)
        await pause(db)
        await eventually(lambda: relay.status().paused == ["orders"])
        await emit(db, "k", b"3")
        await emit(db, "other", b"x")
        await until(db, PARKED, 3)
        broker.poison.clear()
        assert await decide(db) == 1
        looked = relay._gates._look_at
        await eventually(lambda: relay._gates._look_at > looked + 2)
        assert broker.payloads == [b"0"]
        await resume(db)
        await until(db, GATES, 0)
    assert broker.of_key("k") == [b"0", b"1", b"2", b"3"]
    assert broker.of_key("other") == [b"x"]


async def test_a_message_refused_while_a_destination_catches_up_holds_its_key_alone(
    db: "asyncpg.Connection[Any]", migrated_url: str
) -> None:
    """R8, R23: what comes behind it in the pause waits behind it; other keys are sent."""
    await policy(db, "park_key")
    broker = Sick(b"1")
    await pause(db)
    for number in range(4):
        await emit(db, "k", b"%d" % number)
        await emit(db, None, b"without")
    async with relaying(migrated_url, broker, replace(FAST, window_rows=2)) as relay:
        await until(db, PARKED, 8)
        await resume(db)
        await until(db, "select count(*) from towpath.publish_gate where policy = 'pause'", 0)
        await until(db, PARKED, 2)
        assert (broker.of_key("k"), broker.payloads.count(b"without")) == ([b"0"], 4)
        await eventually(lambda: relay.status().gate_count == 1)
        broker.poison.clear()
        assert await decide(db) == 1
        await until(db, GATES, 0)
    assert broker.of_key("k") == [b"0", b"1", b"2", b"3"]


async def test_a_message_refused_while_it_catches_up_blocks_its_shard_where_the_policy_says_so(
    db: "asyncpg.Connection[Any]", migrated_url: str
) -> None:
    """R8: what is left of the pause in that shard waits for the decision too."""
    await policy(db, "block")
    broker = Sick(b"1")
    await pause(db)
    for number in range(4):
        await emit(db, "k", b"%d" % number)
    async with relaying(migrated_url, broker, replace(FAST, window_rows=1)) as relay:
        await until(db, PARKED, 4)
        await resume(db)
        await eventually(lambda: relay.status().blocked_shards != [])
        assert broker.of_key("k") == [b"0"]
        broker.poison.clear()
        assert await decide(db) == 1
        await until(db, GATES, 0)
    assert broker.of_key("k") == [b"0", b"1", b"2", b"3"]


async def test_pauses_come_and_go_under_racing_writers_without_loss_or_disorder(
    db: "asyncpg.Connection[Any]", migrated_url: str
) -> None:
    """R10: of the destination and of everything, at two relays that hand shards to each other."""
    await prepare(db)
    broker, committed = Sick(), list[tuple[str, int]]()
    until_ = time.monotonic() + 3
    writers = [asyncio.create_task(race(migrated_url, committed, writer=n, until=until_)) for n in range(4)]
    async with relaying(migrated_url, broker):
        for name in ("orders", EVERYTHING, "orders"):
            await pause(db, name)
            async with relaying(migrated_url, broker) as second:
                await eventually(lambda s=second, n=name: s.status().paused == [n])  # type: ignore[misc]
                await eventually(lambda s=second: len(s.status().shards) > 0)  # type: ignore[misc]
                await resume(db, name)
        await asyncio.gather(*writers)
        await until(db, PENDING, 0, seconds=60)
        await until(db, GATES, 0, seconds=60)
    found = judge(committed, broker)
    assert (found.lost, found.ghosts, found.duplicates, found.inversions) == (0, 0, 0, 0)


@pytest.mark.parametrize("name", ["kafka", "rabbitmq"])
async def test_a_destination_that_is_not_there_holds_its_shard_until_it_is_paused(
    db: "asyncpg.Connection[Any]", migrated_url: str, request: pytest.FixtureRequest, name: str
) -> None:
    """R10, R24: other shards go on, readiness names it; made and resumed, what waited is sent, once."""
    given: str = request.getfixturevalue("kafka_bootstrap" if name == "kafka" else "rabbit_url")
    broker = broker_from_url(f"kafka://{given}" if name == "kafka" else given)
    there, missing = f"orders-{uuid4().hex[:8]}", f"typo-{uuid4().hex[:8]}"
    admin = broker.admin()
    await admin.apply([there], [GroupTopology("g", (there,))], partitions=2)
    async with relaying(migrated_url, broker, replace(FAST, publish_deadline=5.0)) as relay:
        await emit(db, "k", b"x", destination=missing)
        shard = await db.fetchval("select shard from towpath.outbox")
        await eventually(lambda: any(missing in each for each in relay.status().problems))
        for number in range(200):
            await emit(db, str(number), b"x", destination=there)
        of_shard = await db.fetchval(
            "select count(*) from towpath.outbox where shard = $1 and destination = $2", shard, there
        )
        assert 0 < of_shard < 200
        await until(db, PENDING, 1 + of_shard)
        await pause(db, missing)
        await until(db, PENDING, 0)
        await eventually(lambda: relay.status().published_count == 200)
        await eventually(lambda: relay.status().problems == [])
        await admin.apply([missing], [GroupTopology("g", (missing,))], partitions=1)
        await resume(db, missing)
        await eventually(lambda: relay.status().published_count == 201)
        await until(db, PARKED, 0)
    await admin.aclose()
    assert await db.fetchval("select count(*) from towpath.dead_letter") == 0
