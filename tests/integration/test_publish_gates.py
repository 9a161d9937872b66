"""What waits behind a message that nobody takes: keys and shards, until a person decides."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import asyncpg
import pytest
from asyncpg.transaction import Transaction

from tests.integration.relaying import FAST, RecordingBroker, emit, eventually, relaying
from towpath.brokers.ports import OutboundMessage
from towpath.deadletters import Action, Filter, carry_out, make_plan
from towpath.errors import MessageRefused
from towpath.store.retention import Retention
from towpath.store.statements import load


class Sick(RecordingBroker):
    """Refuses some payloads until it is cured."""

    def __init__(self, *poison: bytes) -> None:
        super().__init__()
        self.poison = set(poison)
        self.refuse = self._refusal

    def _refusal(self, message: OutboundMessage) -> MessageRefused | None:
        return MessageRefused("too_large") if message.payload in self.poison else None

    def of_key(self, key: str) -> list[bytes | None]:
        """What arrived of a key, in order."""
        return [each.message.payload for each in self.arrivals if each.message.key == key]


async def policy(db: "asyncpg.Connection[Any]", name: str, destination: str = "orders") -> None:
    """Set a destination's policy."""
    await db.execute(
        "insert into towpath.destination (name, address, on_poison) values ($1, $1, $2)", destination, name
    )


async def decide(db: "asyncpg.Connection[Any]", action: Action = "replay") -> int:
    """What an operator does with everything open."""
    plan = await make_plan(db, Filter(stages=("publish",)))
    _, counts = await carry_out(db, plan, action, actor="ann", reason="decided")
    return counts.done


async def until(db: "asyncpg.Connection[Any]", sql: str, expected: object, *, seconds: float = 30) -> None:
    """Wait for a value in the database."""
    deadline = asyncio.get_running_loop().time() + seconds
    while (found := await db.fetchval(sql)) != expected:
        assert asyncio.get_running_loop().time() < deadline, f"{sql}: {found}, not {expected}"
        await asyncio.sleep(0.02)


PARKED = "select count(*) from towpath.parked_message"
GATES = "select count(*) from towpath.publish_gate"


async def test_park_key_holds_the_key_and_no_other_until_the_message_is_replayed(
    db: "asyncpg.Connection[Any]", migrated_url: str
) -> None:
    """R8, R23: followers wait whenever they were written, and come behind it, which keeps its number."""
    await policy(db, "park_key")
    broker = Sick(b"1")
    for number in range(4):
        await emit(db, "k", b"%d" % number)
    await emit(db, "other", b"x")
    async with relaying(migrated_url, broker) as relay:
        await until(db, PARKED, 2)
        await emit(db, "k", b"4")
        await emit(db, "k", b"elsewhere", destination="invoices")
        await emit(db, "other", b"y")
        await until(db, PARKED, 3)
        await eventually(lambda: broker.of_key("other") == [b"x", b"y"])
        await eventually(lambda: broker.of_key("k") == [b"0", b"elsewhere"])
        assert relay.status().is_ready
        await eventually(lambda: relay.status().gate_count == 1)
        await until(db, "select count(*) from towpath.outbox_message where status = 'PENDING'", 0)
        statuses = await db.fetch("select status, count(*) from towpath.outbox_message group by 1 order by 1")
        assert [tuple(row) for row in statuses] == [("PARKED", 3), ("SENT", 5)]
        broker.poison.clear()
        assert await decide(db) == 1
        await until(db, GATES, 0)
        await emit(db, "k", b"5")
        await eventually(lambda: len(broker.of_key("k")) == 7)
        await eventually(lambda: relay.status().gate_count == 0)
    of_orders = [each.message for each in broker.arrivals if each.message.address == "orders"]
    of_key = [message for message in of_orders if message.key == "k"]
    assert [message.payload for message in of_key] == [b"0", b"1", b"2", b"3", b"4", b"5"]
    assert sorted(message.sequence for message in of_key) == [message.sequence for message in of_key]
    assert await db.fetchval(PARKED) == 0
    assert await db.fetchval("select count(*) from towpath.outbox where payload = '1'") == 1


async def test_a_discarded_message_lets_its_followers_go_without_it(
    db: "asyncpg.Connection[Any]", migrated_url: str
) -> None:
    """R8: the decision may be not to send it."""
    await policy(db, "park_key")
    broker = Sick(b"1")
    for number in range(4):
        await emit(db, "k", b"%d" % number)
    async with relaying(migrated_url, broker):
        await until(db, PARKED, 2)
        assert await decide(db, "discard") == 1
        await until(db, GATES, 0)
    assert broker.of_key("k") == [b"0", b"2", b"3"]


async def test_a_follower_that_is_refused_too_closes_the_gate_again(
    db: "asyncpg.Connection[Any]", migrated_url: str
) -> None:
    """R8, R23: what comes behind it waits for the next decision; so does a replay that fails again."""
    await policy(db, "park_key")
    broker = Sick(b"1", b"3")
    for number in range(6):
        await emit(db, "k", b"%d" % number)
    async with relaying(migrated_url, broker):
        await until(db, PARKED, 4)
        await decide(db)
        await until(db, "select death_count from towpath.dead_letter where payload = '1'", 2)
        assert broker.of_key("k") == [b"0"]
        broker.poison.remove(b"1")
        await decide(db)
        await until(db, "select count(*) from towpath.dead_letter where payload = '3' and state = 'open'", 1)
        assert broker.of_key("k") == [b"0", b"1", b"2"]
        await until(db, PARKED, 2)
        broker.poison.clear()
        await decide(db)
        await until(db, GATES, 0)
    assert broker.of_key("k") == [b"%d" % number for number in range(6)]


async def test_block_stops_the_shard_and_says_so_until_a_person_decides(
    db: "asyncpg.Connection[Any]", migrated_url: str
) -> None:
    """R8: other keys of the shard wait in the outbox, other shards go on, readiness and backlog tell."""
    await policy(db, "block")
    broker = Sick(b"1")
    await emit(db, None, b"1")
    shard = await db.fetchval("select shard from towpath.outbox")
    async with relaying(migrated_url, broker) as relay:
        await eventually(lambda: relay.status().blocked_shards == [shard])
        assert not relay.status().is_ready
        assert "blocked" in relay.status().problems[0]
        await db.execute(
            """
            insert into towpath.outbox
              (shard, message_id, kind, destination, type, key, content_type, payload)
            select towpath.shard('views', n, gen_random_uuid()), gen_random_uuid(), 'event', 'views', 't', n,
                   '', 'later'
            from (select n::text from generate_series(1, 300) n) k
            """
        )
        in_shard = await db.fetchval(
            "select count(*) from towpath.outbox where shard = $1 and payload = 'later'", shard
        )
        assert 0 < in_shard < 300
        await eventually(lambda: len(broker.arrivals) == 300 - in_shard)
        pending = "select count(*) from towpath.outbox_message where status = 'PENDING'"
        await until(db, pending, in_shard)
        broker.poison.clear()
        assert await decide(db) == 1
        await eventually(lambda: len(broker.arrivals) == 301)
        await eventually(lambda: relay.status().is_ready)
    assert await db.fetchval(GATES) == 0


async def test_a_key_stays_held_across_relays_and_the_successor_releases_it(
    db: "asyncpg.Connection[Any]", migrated_url: str
) -> None:
    """R8, R5: gates belong to the database; who owns the shard keeps them."""
    await policy(db, "park_key")
    broker = Sick(b"1")
    for number in range(3):
        await emit(db, "k", b"%d" % number)
    async with relaying(migrated_url, broker):
        await until(db, PARKED, 1)
    await emit(db, "k", b"3")
    async with relaying(migrated_url, broker):
        await until(db, PARKED, 2)
        assert broker.of_key("k") == [b"0"]
    broker.poison.clear()
    await decide(db)
    async with relaying(migrated_url, broker):
        await until(db, GATES, 0)
    assert broker.of_key("k") == [b"0", b"1", b"2", b"3"]


async def test_what_is_parked_outlives_the_slot_it_was_written_to(
    db: "asyncpg.Connection[Any]", migrated_url: str
) -> None:
    """R22: the ring is cleared meanwhile, and the followers are still sent, unchanged."""
    await policy(db, "park_key")
    broker = Sick(b"1")
    headers = json.dumps([["tag", "a"], ["tag", "b"]])
    for number in range(4):
        await emit(db, "k", b"%d" % number, headers=headers)
    before = await db.fetch("select id, message_id, created_at from towpath.outbox order by id")
    async with relaying(migrated_url, broker):
        await until(db, PARKED, 2)
        store = Retention()
        slot = await db.fetchval("select distinct slot from towpath.outbox")
        await until(db, "select count(*) from towpath.outbox_message where status = 'PENDING'", 0)
        await until(db, "select count(*) from towpath.shard_progress where last_id is not null", 0)
        await db.execute(
            f"create or replace function towpath.ring_slot() returns smallint language sql volatile "
            f"as 'select {(slot + 2) % 4}::smallint'"
        )
        reason: str | None = "not tried"
        for _ in range(200):
            reason = await store.clear(db, slot, 0.0, hold_seconds=1.0)
            if reason is None:
                break
            await asyncio.sleep(0.05)
        assert (reason, await db.fetchval("select count(*) from towpath.outbox")) == (None, 0)
        await decide(db, "discard")
        await until(db, GATES, 0)
    arrived = [each.message for each in broker.arrivals]
    assert [message.payload for message in arrived] == [b"0", b"2", b"3"]
    assert [(message.sequence, message.message_id) for message in arrived] == [
        (row["id"], row["message_id"]) for row in before if row != before[1]
    ]
    assert arrived[0].headers[-2:] == arrived[2].headers[-2:] == (("tag", b"a"), ("tag", b"b"))
    times = [dict(message.headers)["ce_time"] for message in arrived]
    assert times == sorted(set(times))


async def test_a_large_hold_is_not_in_memory_and_leaves_in_bounded_windows(
    db: "asyncpg.Connection[Any]", migrated_url: str
) -> None:
    """R8: five thousand followers wait in the database, the relay holds none of them."""
    await policy(db, "park_key")
    broker = Sick(b"0")
    sizes: list[int] = []

    async def note(_: int, window: Any) -> None:
        sizes.append(len(window))

    broker.before = note
    await emit(db, "k", b"0")
    async with relaying(migrated_url, broker, replace(FAST, window_rows=200)) as relay:
        await until(db, GATES, 1)
        await db.execute(
            """
            insert into towpath.outbox
              (shard, message_id, kind, destination, type, key, content_type, payload)
            select g.shard, gen_random_uuid(), 'event', 'orders', 't', 'k', '', convert_to(n::text, 'utf8')
            from towpath.publish_gate g, generate_series(1, 5000) n
            """
        )
        await until(db, PARKED, 5_000, seconds=60)
        assert relay.status().held_count == 0
        broker.poison.clear()
        await decide(db)
        await until(db, GATES, 0, seconds=60)
    assert broker.of_key("k") == [b"%d" % number for number in range(5_001)]
    assert max(sizes) <= 200


async def test_a_parked_tasks_message_is_not_taken_for_lost(
    db: "asyncpg.Connection[Any]", migrated_url: str
) -> None:
    """C21, R23: its turn has yet to come; the reaper leaves its task alone until it was sent."""
    await policy(db, "park_key", "tasks.billing")
    broker = Sick(b"1")
    await emit(db, "k", b"1", kind="task", destination="tasks.billing")
    await db.execute(
        """
        insert into towpath.outbox (shard, message_id, kind, destination, type, key, content_type)
        select towpath.shard('tasks.billing', 'k', t.task_id), t.task_id, 'task', 'tasks.billing', 'charge',
               'k', ''
        from towpath.accept_task('billing', gen_random_uuid(), 'charge', 'tasks.billing', 'k', '',
                                 null, null, 'body', 'application/json', '[]', null) t
        """
    )
    lost = load("work")["lost"]
    async with relaying(migrated_url, broker):
        await until(db, PARKED, 1)
        await until(db, "select count(*) from towpath.outbox_message where status = 'PENDING'", 0)
        assert await db.fetch(lost, "billing", -60.0, 10, True) == []
        await decide(db, "discard")
        await until(db, GATES, 0)
        deadline = asyncio.get_running_loop().time() + 60
        while not await db.fetch(lost, "billing", -60.0, 10, True):
            assert asyncio.get_running_loop().time() < deadline
            await asyncio.sleep(0.05)


async def test_a_relay_that_loses_its_lease_meanwhile_releases_nothing(
    db: "asyncpg.Connection[Any]", migrated_url: str
) -> None:
    """R5, R8: parked rows are forgotten only under the lease; the new owner sends them."""
    await policy(db, "park_key")
    broker = Sick(b"1")
    for number in range(3):
        await emit(db, "k", b"%d" % number)
    thief = await asyncpg.connect(migrated_url)
    async with relaying(migrated_url, broker):
        await until(db, PARKED, 1)
        broker.poison.clear()

        async def steal(_: int, window: Any) -> None:
            if any(message.payload == b"1" for message in window):
                broker.before = None
                await thief.execute(
                    "update towpath.shard_lease set epoch = epoch + 1, lease_until = towpath.clock()"
                )

        broker.before = steal
        await decide(db)
        await until(db, GATES, 0)
    await thief.close()
    assert broker.of_key("k") == [b"0", b"1", b"2", b"1", b"2"]


async def test_a_gate_whose_commit_was_not_answered_holds_all_the_same(
    db: "asyncpg.Connection[Any]", migrated_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R8, R23: closing and removing it; by then the broker would take the message."""
    await policy(db, "park_key")
    broker = Sick(b"1")
    for number in range(4):
        await emit(db, "k", b"%d" % number)
    answered, lost = Transaction.commit, [False, False]
    watch = await asyncpg.connect(migrated_url)

    async def lose(self: Transaction) -> None:
        await answered(self)
        if self._connection is db:
            return
        gates = await watch.fetchval(GATES)
        if not lost[gates == 0]:
            lost[gates == 0] = True
            broker.poison.clear()
            raise ConnectionResetError("the answer was lost")

    monkeypatch.setattr(Transaction, "commit", lose)
    async with relaying(migrated_url, broker) as relay:
        await until(db, PARKED, 2)
        assert broker.of_key("k") == [b"0"]
        assert await decide(db) == 1
        await until(db, GATES, 0)
        await eventually(lambda: relay.status().gate_count == 0)
    await watch.close()
    assert broker.of_key("k") == [b"0", b"1", b"2", b"3"]
    assert lost == [True, True]


async def test_a_shard_that_was_opened_without_an_answer_goes_on(
    db: "asyncpg.Connection[Any]", migrated_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R8: the relay looks whether the gate that it removed is gone."""
    await policy(db, "block")
    broker = Sick(b"1")
    await emit(db, None, b"1")
    async with relaying(migrated_url, broker) as relay:
        await eventually(lambda: relay.status().blocked_shards != [])
        answered, watch = Transaction.commit, await asyncpg.connect(migrated_url)

        async def lose(self: Transaction) -> None:
            await answered(self)
            if self._connection is not db and not await watch.fetchval(GATES):
                monkeypatch.setattr(Transaction, "commit", answered)
                raise ConnectionResetError("the answer was lost")

        monkeypatch.setattr(Transaction, "commit", lose)
        broker.poison.clear()
        await decide(db)
        await eventually(lambda: relay.status().blocked_shards == [])
        await watch.close()
        assert Transaction.commit is answered


@pytest.mark.parametrize("action", ["replay", "discard"])
async def test_one_decision_opens_every_gate_that_waits_for_the_message(
    db: "asyncpg.Connection[Any]", migrated_url: str, action: Action
) -> None:
    """R8, D1: under one id it was sent to two destinations, and the catalog has a row for each id."""
    broker = Sick(b"1")
    for destination in ("orders", "invoices"):
        await policy(db, "park_key", destination)
        for payload in (b"1", b"2"):
            await db.execute(
                """
                insert into towpath.outbox
                  (shard, message_id, kind, destination, type, key, content_type, payload)
                select towpath.shard($1, 'k', m), m, 'event', $1, 't', 'k', '', $2::bytea
                from (select md5($2::bytea)::uuid as m) m
                """,
                destination,
                payload,
            )
    async with relaying(migrated_url, broker):
        await until(db, PARKED, 2)
        broker.poison.clear()
        assert await decide(db, action) == 1
        await until(db, GATES, 0)
    expected = [b"1", b"2"] if action == "replay" else [b"2"]
    for destination in ("orders", "invoices"):
        arrived = [e.message.payload for e in broker.arrivals if e.message.address == destination]
        assert arrived == expected
