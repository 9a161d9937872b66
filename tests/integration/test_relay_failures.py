"""What the relay does when the broker or the database fails it, and with messages nobody takes."""

import asyncio
import base64
import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import pytest

from tests.integration.relaying import (
    FAST,
    RecordingBroker,
    emit,
    emit_many,
    eventually,
    judge,
    prepare,
    race,
    relaying,
)
from towpath.brokers.ports import OutboundMessage
from towpath.errors import BrokerUnavailable, ConfigurationError, MessageRefused
from towpath.relay import Relay, engine
from towpath.store import migrate
from towpath.testing.services import PostgresServer

CATALOG = "select * from towpath.dead_letter order by message_id"
LEASED_UNTIL = "select min(lease_until) from towpath.shard_lease"


def refusing(payload: bytes, reason: str = "refused") -> Any:
    """Refuses the message with that payload."""
    return lambda message: MessageRefused(reason, "by the test") if message.payload == payload else None


async def pending(db: "asyncpg.Connection[Any]") -> int:
    """Rows whose derived status is not SENT."""
    count: int = await db.fetchval("select count(*) from towpath.outbox_message where status = 'PENDING'")
    return count


async def test_a_broker_outage_spends_nothing_keeps_order_and_ends_by_itself(
    db: "asyncpg.Connection[Any]", migrated_url: str
) -> None:
    """R7: bounded attempts while it is away, none counted against a message, all in order afterwards."""
    await prepare(db)
    committed: list[tuple[str, int]] = []
    broker = RecordingBroker()
    told = asyncio.Event()
    async with relaying(migrated_url, broker) as relay:
        await eventually(lambda: len(relay.status().shards) == 16)
        writers = [
            asyncio.create_task(race(migrated_url, committed, writer=number, until=told))
            for number in range(4)
        ]
        await eventually(lambda: len(broker.arrivals) > 50)
        broker.is_available, broker.attempts = False, 0
        began = time.monotonic()
        await eventually(lambda: not relay.status().is_ready)
        await asyncio.sleep(2)
        longest = FAST.backoff.cap_delay.total_seconds()
        assert broker.attempts <= 12 + 2 * (time.monotonic() - began) / (longest / 4)
        assert relay.status().problems[0].startswith("broker:")
        broker.is_available = True
        await eventually(lambda: relay.status().is_ready)
        told.set()
        await asyncio.gather(*writers)
        await eventually(lambda: judge(committed, broker).lost == 0)
    found = judge(committed, broker)
    assert (found.lost, found.ghosts, found.inversions) == (0, 0, 0)
    assert await db.fetch(CATALOG) == []
    assert await pending(db) == 0


async def test_one_unpublishable_message_among_ten_thousand_reaches_the_catalog(
    db: "asyncpg.Connection[Any]", migrated_url: str
) -> None:
    """R8: after the tries it is put aside with its reason; every other message arrives once."""
    broker = RecordingBroker()
    poison = b"5000 " + b"x" * 95
    broker.refuse = refusing(poison, "unroutable")
    await emit_many(db, 10_000)
    async with relaying(migrated_url, broker) as relay:
        await eventually(lambda: len(broker.arrivals) == 9_999)
        await eventually(lambda: relay.status().put_aside_count == 1)
    assert max(Counter(broker.payloads).values()) == 1
    (row,) = await db.fetch(CATALOG)
    assert row["stage"] == "publish"
    assert row["consumer_group"] == ""
    assert row["state"] == "open"
    assert row["reason_code"] == "unroutable"
    assert row["attempts"] == FAST.publish_attempts
    assert row["payload"] == poison
    assert row["type"] == "order.placed"
    assert row["source"] == "orders"
    assert json.loads(row["origin"])["address"] == "orders"
    assert await pending(db) == 0


async def test_too_large_is_put_aside_at_once_and_its_followers_go_on(
    db: "asyncpg.Connection[Any]", migrated_url: str
) -> None:
    """R8, R23: what no further try can change gets none; the order of the others of its key holds."""
    broker = RecordingBroker()
    broker.refuse = refusing(b"1", "too_large")
    for number in range(4):
        await emit(db, "k", b"%d" % number)
    async with relaying(migrated_url, broker):
        await eventually(lambda: len(broker.arrivals) == 3)
    assert broker.payloads == [b"0", b"2", b"3"]
    (row,) = await db.fetch(CATALOG)
    assert (row["reason_code"], row["attempts"]) == ("too_large", 1)


async def test_no_follower_passes_a_refused_message_before_it_is_given_up(
    db: "asyncpg.Connection[Any]", migrated_url: str
) -> None:
    """R23: while it is tried again its followers wait, and other keys of the shard do not."""
    broker = RecordingBroker()
    is_refusing = True

    def refuse(message: OutboundMessage) -> MessageRefused | None:
        return MessageRefused("refused") if is_refusing and message.payload == b"1" else None

    broker.refuse = refuse
    options = replace(FAST, publish_attempts=1_000)
    for number in range(4):
        await emit(db, "k", b"%d" % number)
        await emit(db, f"other {number}", b"other")
    async with relaying(migrated_url, broker, options) as relay:
        await eventually(lambda: len(broker.arrivals) == 5)
        await eventually(lambda: broker.attempts > 5)
        assert [payload for payload in broker.payloads if payload != b"other"] == [b"0"]
        is_refusing = False
        await eventually(lambda: len(broker.arrivals) == 8)
        assert [payload for payload in broker.payloads if payload != b"other"] == [b"0", b"1", b"2", b"3"]
        assert relay.status().put_aside_count == 0
    assert await db.fetch(CATALOG) == []


async def test_a_submitted_tasks_message_is_skipped_and_never_in_the_catalog(
    db: "asyncpg.Connection[Any]", migrated_url: str
) -> None:
    """R8: the reaper runs the task from its row; here it is only counted."""
    broker = RecordingBroker()
    broker.refuse = lambda message: MessageRefused("refused") if message.payload is None else None
    await emit(db, "k", None, kind="task", destination="tasks.billing")
    await emit(db, "k", b"after", destination="orders")
    async with relaying(migrated_url, broker) as relay:
        await eventually(lambda: relay.status().put_aside_count == 1)
        await eventually(lambda: broker.payloads == [b"after"])
    assert await db.fetch(CATALOG) == []
    assert await pending(db) == 0


async def test_a_sent_tasks_message_has_a_body_and_is_in_the_catalog(
    db: "asyncpg.Connection[Any]", migrated_url: str
) -> None:
    """R8: no row here would run it; without the catalog it were lost."""
    broker = RecordingBroker()
    broker.refuse = refusing(b"body", "unroutable")
    await emit(db, "k", b"body", kind="task", destination="tasks.elsewhere")
    async with relaying(migrated_url, broker) as relay:
        await eventually(lambda: relay.status().put_aside_count == 1)
    (row,) = await db.fetch(CATALOG)
    assert (row["kind"], row["payload"], row["source"]) == ("task", b"body", "tasks.elsewhere")


async def test_a_copy_that_cannot_be_published_is_noted_on_its_dead_letter(
    db: "asyncpg.Connection[Any]", migrated_url: str
) -> None:
    """D7: it is skipped and never becomes a dead letter itself."""
    id_ = await db.fetchval(
        """
        insert into towpath.dead_letter (consumer_group, message_id, stage, source, reason_code, fingerprint)
        values ('billing', gen_random_uuid(), 'handle', 'orders', 'bad', 'f') returning id
        """
    )
    broker = RecordingBroker()
    broker.refuse = lambda message: MessageRefused("unroutable") if message.payload == b"copy" else None
    headers = json.dumps([["ce_id", "x"], ["towpath-dead-letter", str(id_)]])
    await emit(db, "k", b"copy", kind="copy", destination="billing.orders.dlq", headers=headers)
    async with relaying(migrated_url, broker) as relay:
        await eventually(lambda: relay.status().put_aside_count == 1)
    (row,) = await db.fetch(CATALOG)
    assert row["id"] == id_
    assert "unroutable" in row["copy_error"]


async def test_a_missing_topic_of_a_copy_holds_up_no_event(
    db: "asyncpg.Connection[Any]", migrated_url: str
) -> None:
    """D7: a configuration failure counts against copies, and only waits for events."""
    broker = RecordingBroker()

    async def fail(_: int, window: Sequence[OutboundMessage]) -> None:
        if all(message.address.endswith(".dlq") for message in window):
            raise ConfigurationError("the topic does not exist")

    broker.before = fail
    await emit(db, "k", b"copy", kind="copy", destination="billing.orders.dlq")
    async with relaying(migrated_url, broker) as relay:
        await eventually(lambda: relay.status().put_aside_count == 1)
        await emit(db, "k", b"event")
        await eventually(lambda: broker.payloads == [b"event"])


async def test_headers_no_message_can_be_made_of_reach_the_catalog(
    db: "asyncpg.Connection[Any]", migrated_url: str
) -> None:
    """R8: JSON that is not pairs of name and value, written by hand, stops nobody."""
    broker = RecordingBroker()
    await emit(db, "k", b"bad", headers='{"not": "pairs"}')
    await emit(db, "k", b"good")
    async with relaying(migrated_url, broker):
        await eventually(lambda: broker.payloads == [b"good"])
    (row,) = await db.fetch(CATALOG)
    assert row["reason_code"] == "malformed_header"


async def test_a_copy_that_names_no_dead_letter_stops_nobody(
    db: "asyncpg.Connection[Any]", migrated_url: str
) -> None:
    """R8, X6: any producer may write one by hand; that it cannot be noted anywhere is not a reason to end."""
    broker = RecordingBroker()
    broker.refuse = lambda message: MessageRefused("too_large") if message.payload == b"bad" else None
    for headers in ('{"not": "pairs"}', json.dumps([["towpath-dead-letter", "9" * 30]])):
        await emit(db, "k", b"bad", kind="copy", headers=headers)
    await emit(db, "k", b"good")
    async with relaying(migrated_url, broker) as relay:
        await eventually(lambda: broker.payloads == [b"good"])
        await eventually(lambda: relay.status().put_aside_count == 2)


async def test_progress_moves_only_behind_acknowledged_messages(
    db: "asyncpg.Connection[Any]", migrated_url: str
) -> None:
    """R10: a message in the middle without an outcome keeps the journal before it."""
    broker = RecordingBroker()
    broker.refuse = lambda message: MessageRefused("refused") if message.payload == b"3" else None
    for number in range(6):
        await emit(db, f"k{number}", b"%d" % number)
    # All in one shard, different keys: the others are acknowledged.
    await db.execute("update towpath.outbox set shard = 5")
    options = replace(FAST, publish_attempts=1_000_000)
    async with relaying(migrated_url, broker, options):
        await eventually(lambda: len(broker.arrivals) == 5)
        deadline = time.monotonic() + 60
        third = await db.fetchval("select id from towpath.outbox where payload = '3'")
        while True:
            row = await db.fetchrow("select * from towpath.shard_progress where shard = 5")
            if row["last_id"] is not None:
                break
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)
        assert row["last_id"] == third - 1
        assert await pending(db) == 3  # the third and, until it is settled, what lies behind it
    assert Counter(broker.payloads) == Counter([b"0", b"1", b"2", b"4", b"5"])


async def test_a_shard_that_the_broker_keeps_waiting_holds_up_only_itself(
    db: "asyncpg.Connection[Any]", migrated_url: str
) -> None:
    """R7, R10: after the first failure it is published beside the others, and its own followers wait."""
    broker, tries, is_hanging, release = RecordingBroker(), Counter[str](), asyncio.Event(), asyncio.Event()

    async def one_partition_fails(_: int, window: Sequence[OutboundMessage]) -> None:
        if any(message.payload == b"slow" for message in window):
            tries["begun"] += 1
            if tries["begun"] == 1:
                raise BrokerUnavailable("one partition has no leader")
            is_hanging.set()
            try:
                await release.wait()
            finally:
                tries["ended"] += 1

    broker.before = one_partition_fails
    options = replace(FAST, lease=90.0, publish_deadline=60.0)
    async with relaying(migrated_url, broker, options) as relay:
        await eventually(lambda: len(relay.status().shards) == 16)
        await emit(db, "slow", b"slow")
        await is_hanging.wait()
        await emit(db, "slow", b"behind it")
        others = await db.fetch(
            """
            select 'k' || n as key from generate_series(1, 100) n
            where towpath.shard('orders', 'k' || n, gen_random_uuid())
                  <> towpath.shard('orders', 'slow', gen_random_uuid())
            limit 20
            """
        )
        for row in others:
            await emit(db, row["key"], row["key"].encode())
            await eventually(lambda key=row["key"]: key.encode() in broker.payloads)  # type: ignore[misc]
        assert tries == {"begun": 2}, "the others waited for its deadline"
        assert relay.status().problems[0].startswith("broker: one partition has no leader")
        release.set()
        await eventually(lambda: broker.payloads[-2:] == [b"slow", b"behind it"])
        await eventually(lambda: relay.status().is_ready)
    assert await pending(db) == 0
    assert tries == {"begun": 2, "ended": 1}


async def test_leases_are_renewed_while_a_publish_hangs(
    db: "asyncpg.Connection[Any]", migrated_url: str
) -> None:
    """R6: the heartbeat does not wait for the broker, and a hung publish ends at its deadline."""
    broker = RecordingBroker()
    is_hanging = True
    ends: list[float] = []

    async def hang(_: int, __: Sequence[OutboundMessage]) -> None:
        if is_hanging:
            began = time.monotonic()
            try:
                await asyncio.sleep(60)
            finally:
                ends.append(time.monotonic() - began)

    broker.before = hang
    await emit(db, "k", b"1")
    async with relaying(migrated_url, broker) as relay:
        await eventually(lambda: len(ends) >= 1)
        began = await db.fetchval(LEASED_UNTIL)
        await eventually(lambda: len(ends) >= 3)
        deadline = time.monotonic() + 60
        while await db.fetchval(LEASED_UNTIL) <= began:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)
        assert all(seconds < FAST.lease - FAST.margin for seconds in ends)
        assert (broker.payloads, len(relay.status().shards)) == ([], 16)
        is_hanging = False
        await eventually(lambda: broker.payloads == [b"1"])


async def test_payload_and_headers_arrive_unchanged(db: "asyncpg.Connection[Any]", migrated_url: str) -> None:
    """R17: repeated and binary headers, the trace context as stored, bytes as they are, None as None."""
    stored = [
        ["traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"],
        ["tag", "a"],
        ["tag", "ä"],
        ["bin", {"b64": base64.b64encode(b"\xff\x00").decode()}],
    ]
    broker = RecordingBroker()
    await emit(db, "", b"\x00\xff", headers=json.dumps(stored))
    await emit(db, None, None)
    async with relaying(migrated_url, broker):
        await eventually(lambda: len(broker.arrivals) == 2)
    first, second = sorted((each.message for each in broker.arrivals), key=lambda message: message.sequence)
    assert (first.key, first.payload) == ("", b"\x00\xff")
    assert (second.key, second.payload) == (None, None)
    assert first.headers[-4:] == (
        ("traceparent", b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"),
        ("tag", b"a"),
        ("tag", "ä".encode()),
        ("bin", b"\xff\x00"),
    )
    own = dict(first.headers[:-4])
    assert own["ce_id"] == str(first.message_id).encode()
    assert own["towpath-sequence"] == str(first.sequence).encode()
    assert own["towpath-body"] == b"inline"


async def test_an_immediate_restart_of_the_server_skips_nothing(scale: float) -> None:
    """R19: memory ahead of a server that lost asynchronous commits is dropped, not trusted."""
    with PostgresServer(fsync=True) as server:
        url = server.create_database("restarts")
        await asyncio.to_thread(migrate.upgrade, url)
        db = await asyncpg.connect(url)
        await prepare(db)
        await db.close()
        broker, committed = RecordingBroker(), list[tuple[str, int]]()
        # Somebody's asynchronous commits: those a crash undoes move transaction ids back.
        async with relaying(url, broker) as relay:
            for round_ in range(max(2, int(2 * scale))):
                until = time.monotonic() + 2
                noise = asyncio.create_task(asynchronous_commits(url))
                writers = [
                    asyncio.create_task(race(url, committed, writer=n, until=until, seed=round_))
                    for n in range(6)
                ]
                await asyncio.sleep(1)
                await asyncio.to_thread(server.restart, immediate=True)
                await asyncio.gather(noise, *writers, return_exceptions=True)
                await eventually(lambda: judge(committed, broker).lost == 0, seconds=60)
                await eventually(lambda: relay.status().is_ready)
        db = await asyncpg.connect(url)
        emitted = await db.fetch("select key, payload from towpath.outbox")
        survived = {(row["key"], int(row["payload"])) for row in emitted if row["payload"] != b"ghost"}
        await db.close()
    arrived = {(each.message.key, int(each.message.payload or b"0")) for each in broker.arrivals}
    assert survived <= arrived
    found = judge(survived, broker)
    assert (found.lost, found.inversions) == (0, 0)


async def asynchronous_commits(url: str) -> None:
    """Use up transaction ids that a crash takes back."""
    connection = await asyncpg.connect(url, server_settings={"synchronous_commit": "off"})
    while True:
        await connection.execute("select pg_current_xact_id()")


async def test_killed_connections_are_replaced_and_memory_reloaded(
    db: "asyncpg.Connection[Any]", migrated_url: str
) -> None:
    """R19: whichever of the relay's sessions dies, nothing is lost or inverted."""
    await prepare(db)
    committed: list[tuple[str, int]] = []
    broker = RecordingBroker()
    told = asyncio.Event()
    async with relaying(migrated_url, broker) as relay:
        await eventually(lambda: len(relay.status().shards) == 16)
        writers = [
            asyncio.create_task(race(migrated_url, committed, writer=number, until=told))
            for number in range(4)
        ]
        for session in ("reader", "journal", "leases") * 6:
            await asyncio.sleep(0.25)
            await db.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity "
                "where datname = current_database() and application_name = $1",
                f"towpath relay {session}",
            )
        told.set()
        await asyncio.gather(*writers)
        await eventually(lambda: judge(committed, broker).lost == 0)
    found = judge(committed, broker)
    assert (found.lost, found.ghosts, found.inversions) == (0, 0, 0)


async def test_a_journal_ahead_of_its_database_is_refused(
    db: "asyncpg.Connection[Any]", migrated_url: str
) -> None:
    """R20: it cannot be continued without skipping; the relay says so and ends."""
    await db.execute(
        "update towpath.journal set xid = pg_current_xact_id(), "
        "snapshot_to = format('%s:%s:', x, x)::pg_snapshot "
        "from (select pg_snapshot_xmax(pg_current_snapshot())::text::bigint + 1000000 as x) n"
    )
    with pytest.raises(BaseExceptionGroup) as raised:
        await Relay(migrated_url, RecordingBroker(), FAST).run(asyncio.Event())
    found = raised.value.split(ConfigurationError)[0]
    assert found is not None
    assert "ahead of this database" in str(found.exceptions[0])


async def test_a_journal_written_by_another_cluster_is_refused(
    db: "asyncpg.Connection[Any]", migrated_url: str
) -> None:
    """R20: a restored or copied database has rows whose recorded xid is not their own."""
    await db.execute("create table kept as select * from towpath.journal")
    await db.execute("delete from towpath.journal")
    await db.execute("select pg_current_xact_id()")
    await db.execute("insert into towpath.journal overriding system value select * from kept")
    with pytest.raises(BaseExceptionGroup) as raised:
        await Relay(migrated_url, RecordingBroker(), FAST).run(asyncio.Event())
    found = raised.value.split(ConfigurationError)[0]
    assert found is not None
    assert "another database cluster" in str(found.exceptions[0])


async def test_a_missing_schema_ends_the_relay_with_the_command_that_helps(database_url: str) -> None:
    """O2: one line that names the fix."""
    with pytest.raises(BaseExceptionGroup) as raised:
        await Relay(database_url, RecordingBroker(), FAST).run(asyncio.Event())
    found = raised.value.split(ConfigurationError)[0]
    assert found is not None
    assert "towpath db upgrade" in str(found.exceptions[0])


async def test_a_database_out_of_reach_is_waited_for(
    db: "asyncpg.Connection[Any]", migrated_url: str, postgres_proxy: Any
) -> None:
    """R7: nothing is lost while the link is cut, and it goes on by itself."""
    parts = urlsplit(migrated_url)
    proxied = urlunsplit(parts._replace(netloc=f"postgres@127.0.0.1:{postgres_proxy.port}"))
    broker = RecordingBroker()
    async with relaying(proxied, broker) as relay:
        await eventually(lambda: len(relay.status().shards) == 16)
        await emit(db, "k", b"1")
        await eventually(lambda: broker.payloads == [b"1"])
        await postgres_proxy.cut()
        await emit(db, "k", b"2")
        await eventually(lambda: not relay.status().is_ready)
        await postgres_proxy.restore()
        await eventually(lambda: broker.payloads[-1] == b"2")
        await eventually(lambda: relay.status().is_ready)


async def test_a_connection_that_died_silently_is_given_up(
    db: "asyncpg.Connection[Any]", migrated_url: str, postgres_proxy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R7, R13: a poll that is never answered ends when the database answers on new connections."""
    monkeypatch.setattr(engine, "_READ_SECONDS", 600.0)
    parts = urlsplit(migrated_url)
    proxied = urlunsplit(parts._replace(netloc=f"postgres@127.0.0.1:{postgres_proxy.port}"))
    broker = RecordingBroker()
    async with relaying(proxied, broker) as relay:
        await eventually(lambda: len(relay.status().shards) == 16)
        await emit(db, "k", b"1")
        await eventually(lambda: broker.payloads == [b"1"])
        await postgres_proxy.strand()
        await emit(db, "k", b"2")
        await eventually(lambda: broker.payloads[-1] == b"2")
        await eventually(lambda: relay.status().is_ready)
