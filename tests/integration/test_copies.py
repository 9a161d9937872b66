"""The relay on databases that are not the ones its journal was written in: restored, promoted, moved."""

import asyncio
import json
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias
from uuid import uuid4

import asyncpg
import pytest
from aiokafka import AIOKafkaConsumer
from aiokafka.admin import AIOKafkaAdminClient, NewPartitions, NewTopic

from tests.fixtures.fix_cli import Run
from tests.fixtures.json_documents import check_document
from tests.integration.relaying import (
    FAST,
    RecordingBroker,
    emit,
    eventually,
    relaying,
)
from towpath.brokers.factory import broker_from_url
from towpath.brokers.kafka.murmur2 import partition_of
from towpath.cli.root import run
from towpath.errors import ConfigurationError
from towpath.relay import Relay
from towpath.store import migrate
from towpath.testing.services import PostgresServer

Rebase: TypeAlias = Callable[..., Awaitable[dict[str, Any]]]


@pytest.fixture(scope="module")
def other_cluster() -> Iterator[PostgresServer]:
    """A second cluster, with transaction ids of its own."""
    with PostgresServer() as server:
        yield server


async def refusal(url: str) -> str:
    """What a relay says that does not start."""
    with pytest.raises(BaseExceptionGroup) as raised:
        async with asyncio.timeout(30):
            await Relay(url, RecordingBroker(), FAST).run(asyncio.Event())
    db = await asyncpg.connect(url)  # a beat that was cut short may have taken shards at the last moment
    await until(
        db,
        "select not exists (select from towpath.shard_lease "
        "where relay is not null and lease_until > towpath.clock())",
    )
    await db.close()
    found = raised.value.split(ConfigurationError)[0]
    assert found is not None
    return str(found.exceptions[0])


@pytest.fixture
def rebase(clean_environment: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Rebase:
    """`towpath outbox rebase --json …` on a database."""

    async def command(url: str, *arguments: str) -> dict[str, Any]:
        clean_environment.setenv("TOWPATH_DATABASE_URL", url)
        capsys.readouterr()
        code = await asyncio.to_thread(run, ("outbox", "rebase", "--json", *arguments))
        out, err = capsys.readouterr()
        assert code == 0, err
        found: dict[str, Any] = json.loads(out)
        return found

    return command


async def sent(url: str, count: int) -> list[bytes | None]:
    """What a relay sends there, when it has sent that much and then a sentinel."""
    broker = RecordingBroker()
    async with relaying(url, broker):
        await eventually(lambda: len(broker.arrivals) >= count)
        db = await asyncpg.connect(url)
        await emit(db, None, b"sentinel")
        await db.close()
        await eventually(lambda: b"sentinel" in broker.payloads)
    return [payload for payload in broker.payloads if payload != b"sentinel"]


@pytest.fixture
def dump(postgres_server: PostgresServer) -> Iterator[Path]:
    """Where a test's dump goes; the servers' owner may write there."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o777)
        yield Path(directory) / "dump"


async def restored(
    migrated_url: str, postgres_server: PostgresServer, other_cluster: PostgresServer, dump: Path, name: str
) -> str:
    """The database, dumped and restored into the other cluster."""
    await asyncio.to_thread(postgres_server.run, "pg_dump", "-Fc", "-f", str(dump), migrated_url)
    url = await asyncio.to_thread(other_cluster.create_database, name)
    await asyncio.to_thread(postgres_server.run, "pg_restore", "-d", url, str(dump))
    return url


async def test_a_restored_database_goes_on_where_the_copied_journal_stood(
    db: "asyncpg.Connection[Any]",
    migrated_url: str,
    postgres_server: PostgresServer,
    other_cluster: PostgresServer,
    dump: Path,
    rebase: Rebase,
) -> None:
    """R20: sent stays sent, the rest is sent, also what was written since in a savepoint, or for later."""
    # Ids far from those of the other cluster, whose first rows would count as seen.
    await db.execute(
        "do $$ begin for i in 1..3000 loop perform pg_current_xact_id(); commit; end loop; end $$"
    )
    broker = RecordingBroker()
    async with relaying(migrated_url, broker):
        for number in range(20):
            await emit(db, str(number), b"sent %d" % number)
        await eventually(lambda: len(broker.arrivals) == 20)
    for number in range(20):
        await emit(db, str(number), b"pending %d" % number)
    await db.execute(
        """
        insert into towpath.scheduled (due_at, message_id, destination, type, key, content_type, payload)
        values (towpath.clock() + interval '3 seconds', gen_random_uuid(), 'orders', 't', 'k', 'text/plain',
                'later')
        """
    )
    url = await restored(migrated_url, postgres_server, other_cluster, dump, "continued")
    copy = await asyncpg.connect(url)
    await copy.execute(
        "do $$ begin perform 1; begin "
        "insert into towpath.outbox (shard, message_id, kind, destination, type, key, content_type, payload) "
        "select 3, gen_random_uuid(), 'event', 'orders', 't', 'k', 'text/plain', 'since'; "
        "exception when division_by_zero then null; end; end $$"
    )
    assert "towpath outbox rebase" in await refusal(url)
    plan = await rebase(url, "--to", "journal", "--dry-run")
    assert (plan["unsent"], plan["sent"], plan["dropped"]) == (21, 20, 0)
    assert "towpath outbox rebase" in await refusal(url)
    assert (await rebase(url, "--to", "now", "--dry-run"))["dropped"] == 1
    await rebase(url, "--to", "journal", "--yes", "--reason", "restored", "--actor", "ann")
    payloads = await sent(url, 22)
    assert sorted(payloads, key=str) == sorted(
        [*(b"pending %d" % number for number in range(20)), b"since", b"later"], key=str
    )
    audit = await copy.fetchrow("select actor, reason, filter, counts from towpath.audit")
    assert (audit["actor"], audit["reason"], json.loads(audit["filter"])) == (
        "ann", "restored", {"to": "journal"},
    )  # fmt: skip
    await copy.close()


async def test_the_point_says_what_a_copy_sends(
    db: "asyncpg.Connection[Any]",
    migrated_url: str,
    postgres_server: PostgresServer,
    other_cluster: PostgresServer,
    dump: Path,
    rebase: Rebase,
) -> None:
    """R20: nothing, everything in order, or what was written since a time, sent before or not."""
    broker = RecordingBroker()
    async with relaying(migrated_url, broker):
        for number in range(5):
            await emit(db, "k", b"%d" % number)
        await eventually(lambda: len(broker.arrivals) == 5)
    await db.execute("update towpath.outbox set created_at = towpath.clock() - interval '1 hour'")
    for number in range(5, 8):
        await emit(db, "k", b"%d" % number)
    url = await restored(migrated_url, postgres_server, other_cluster, dump, "pointed")
    await rebase(url, "--to", "now", "--yes")
    assert await sent(url, 0) == []
    await rebase(url, "--to", "30m", "--yes")
    assert (await sent(url, 4))[:3] == [b"5", b"6", b"7"]
    await rebase(url, "--to", "oldest", "--yes")
    assert await sent(url, 8) == [b"%d" % number for number in range(8)]


async def test_a_starting_point_is_not_set_under_a_running_relay(
    db: "asyncpg.Connection[Any]", migrated_url: str, towpath: Run
) -> None:
    """R20: its memory would write over it."""
    async with relaying(migrated_url, RecordingBroker()) as relay:
        await eventually(lambda: len(relay.status().shards) == 16)
        ran = await asyncio.to_thread(towpath, "outbox", "rebase", "--to", "oldest", "--yes")
    assert ran.code == 2
    assert "stop the relays" in ran.err
    assert await db.fetchval("select count(*) from towpath.audit") == 0


async def test_a_copy_reached_elsewhere_publishes_nothing_before_a_person_confirms(
    db: "asyncpg.Connection[Any]", migrated_url: str, towpath: Run
) -> None:
    """R27: the journal of a snapshot is the original's; a changed list of hosts is no copy."""
    broker = RecordingBroker(cluster="c-1")
    production = replace(FAST, environment="shop-1:5432,shop-2:5432/shop")
    failed_over = replace(FAST, environment="shop-2:5432,shop-3:5432/shop")
    staging = replace(FAST, environment="staging:5432/shop")
    for number, options in enumerate((production, failed_over)):
        async with relaying(migrated_url, broker, options):
            await emit(db, "k", b"%d" % number)
            await eventually(lambda wanted=number + 1: len(broker.arrivals) == wanted)
    await emit(db, "k", b"2")
    await emit(db, "k", b"copy of a dead letter", kind="copy")
    async with relaying(migrated_url, broker, staging) as relay:
        await eventually(lambda: any("towpath outbox confirm" in each for each in relay.status().problems))
        await eventually(lambda: broker.attempts >= 2)
        assert len(broker.arrivals) == 2
        assert "staging:5432/shop" in relay.status().problems[0]
        ran = await asyncio.to_thread(towpath, "outbox", "confirm", "--reason", "moved")
        assert "was c-1, published from shop-1:5432,shop-2:5432/shop" in ran.out
        await eventually(lambda: len(broker.arrivals) == 4)
        await eventually(lambda: relay.status().is_ready)
    assert await db.fetchval("select home from towpath.broker") == "staging:5432/shop"
    assert await db.fetchval("select action from towpath.audit") == "outbox.confirm"


async def test_another_broker_gets_nothing_before_a_person_confirms(
    db: "asyncpg.Connection[Any]", migrated_url: str, towpath: Run
) -> None:
    """R27: also when the broker behind the address is replaced while the relay runs."""
    broker = RecordingBroker(cluster="c-1")
    async with relaying(migrated_url, broker) as relay:
        await emit(db, "k", b"1")
        await eventually(lambda: len(broker.arrivals) == 1)
        broker.is_available = False
        await emit(db, "k", b"2")
        await eventually(lambda: not relay.status().is_ready)
        broker.cluster, broker.is_available = "c-2", True
        await eventually(lambda: any("and this is c-2" in each for each in relay.status().problems))
        assert len(broker.arrivals) == 1
        assert (await asyncio.to_thread(towpath, "outbox", "confirm")).code == 0
        await eventually(lambda: len(broker.arrivals) == 2)


@pytest.mark.parametrize("url_of", ["kafka", "rabbitmq"])
async def test_a_real_broker_says_which_cluster_it_is(request: pytest.FixtureRequest, url_of: str) -> None:
    """R27: another connection hears the same."""
    if url_of == "kafka":
        url = f"kafka://{request.getfixturevalue('kafka_bootstrap')}"
    else:
        url = request.getfixturevalue("rabbit_url")
    names = set()
    for _ in range(2):
        publisher = broker_from_url(url).publisher()
        await publisher.start()
        names.add(await publisher.cluster())
        await publisher.aclose()
    assert len(names) == 1
    assert None not in names


async def test_partitions_added_under_a_running_relay_leave_the_order_of_keys_alone(
    db: "asyncpg.Connection[Any]",
    migrated_url: str,
    kafka_bootstrap: str,
    towpath: Run,
    clean_environment: pytest.MonkeyPatch,
) -> None:
    """R28: keys stay in their partitions, also for the next relay, until an operator rolls over."""
    topic = f"grown-{uuid4().hex[:8]}"
    broker = broker_from_url(f"kafka://{kafka_bootstrap}", {"metadata_max_age_ms": 100})
    clean_environment.setenv("TOWPATH_BROKER_URL", f"kafka://{kafka_bootstrap}")
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka_bootstrap)
    await admin.start()
    await admin.create_topics([NewTopic(topic, 3, 1)])

    async def emitted(round_: int) -> None:
        for number in range(30):
            await emit(db, str(number), b"%d" % round_, destination=topic)
        await db_sent(db)

    options = replace(FAST, publish_deadline=5)
    async with relaying(migrated_url, broker, options):
        await emitted(0)
        await admin.create_partitions({topic: NewPartitions(5)})
        await eventually_grown(topic, kafka_bootstrap, 5)
        await emitted(1)
    async with relaying(migrated_url, broker, options):
        await emitted(2)
        refused = await asyncio.to_thread(towpath, "broker", "rollover", topic)
        assert (refused.code, "stop the relays" in refused.err) == (2, True)
    warned = await asyncio.to_thread(towpath, "broker", "check", "--address", topic)
    assert f"{topic} has 5 partitions, keys are placed by 3" in warned.out
    command = ("broker", "rollover", topic, "--reason", "grown", "--json")
    ran = await asyncio.to_thread(towpath, *command)
    assert json.loads(ran.out) == {"address": topic, "before": 3, "partitions": 5}
    check_document(command, ran.out)
    again = await asyncio.to_thread(towpath, "broker", "rollover", topic, "--reason", "grown")
    assert again.out == f"{topic}: keys are placed by 5 partitions, 5 before\n"
    async with relaying(migrated_url, broker, options):
        await emitted(3)
    await admin.close()
    places = await placed(topic, kafka_bootstrap, 120)
    for key, by_round in places.items():
        assert by_round[0] == by_round[1] == by_round[2] == partition_of(key, 3)
        assert by_round[3] == partition_of(key, 5)
    assert {by_round[3] for by_round in places.values()} - {0, 1, 2}


async def db_sent(db: "asyncpg.Connection[Any]") -> None:
    """Wait until nothing is pending."""
    deadline = time.monotonic() + 60
    pending = "select exists (select from towpath.outbox_message where status = 'PENDING')"
    while await db.fetchval(pending):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


async def eventually_grown(topic: str, bootstrap: str, count: int) -> None:
    """Wait until the broker shows the partitions to clients that ask anew."""
    admin = broker_from_url(f"kafka://{bootstrap}").admin()
    deadline = time.monotonic() + 60
    while len(await admin.bounds(topic)) < count:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.1)
    await admin.aclose()


async def placed(topic: str, bootstrap: str, count: int) -> dict[bytes, dict[int, int]]:
    """The partition of each key in each round."""
    consumer = AIOKafkaConsumer(
        topic, bootstrap_servers=bootstrap, auto_offset_reset="earliest", enable_auto_commit=False
    )
    await consumer.start()
    found: dict[bytes, dict[int, int]] = {}
    seen = 0
    async with asyncio.timeout(60):
        while seen < count:
            record = await consumer.getone()
            found.setdefault(record.key, {})[int(record.value)] = record.partition
            seen += 1
    await consumer.stop()
    return found


async def test_a_logical_copy_is_refused_until_a_person_says_where_it_begins(
    other_cluster: PostgresServer, rebase: Rebase
) -> None:
    """R20: its rows have ids of another cluster, and its sequences know nothing of them."""
    tables = (
        "select string_agg(format('towpath.%I', tablename), ', ') from pg_tables where schemaname = 'towpath'"
    )
    url = await asyncio.to_thread(other_cluster.create_database, "replicated")
    await asyncio.to_thread(migrate.upgrade, url)
    copy = await asyncpg.connect(url)
    await copy.execute(f"truncate {await copy.fetchval(tables)}")
    with PostgresServer(settings={"wal_level": "logical"}) as origin:
        original = await asyncio.to_thread(origin.create_database, "original")
        await asyncio.to_thread(migrate.upgrade, original)
        db = await asyncpg.connect(original)
        # Ids far from those of the other cluster, whose first rows would count as seen.
        await db.execute(
            "do $$ begin for i in 1..3000 loop perform pg_current_xact_id(); commit; end loop; end $$"
        )
        await db.execute("create publication everything for tables in schema towpath")
        await copy.execute(
            f"create subscription everything connection 'host=127.0.0.1 port={origin.port} user=postgres "
            "dbname=original' publication everything"
        )
        await until(copy, "select not exists (select from pg_subscription_rel where srsubstate <> 'r')")
        broker = RecordingBroker()
        async with relaying(original, broker):
            for number in range(5):
                await emit(db, "k", b"sent %d" % number)
            await eventually(lambda: len(broker.arrivals) == 5)
        for number in range(5):
            await emit(db, "k", b"pending %d" % number)
        await db.close()
        await until(copy, "select count(*) = 5 from towpath.outbox where payload like 'pending%'")
        await copy.execute("drop subscription everything")
    assert "towpath outbox rebase" in await refusal(url)
    await rebase(url, "--to", "journal", "--yes")
    await emit(copy, "k", b"since")
    assert await sent(url, 6) == [*(b"pending %d" % number for number in range(5)), b"since"]
    await copy.close()


async def until(db: "asyncpg.Connection[Any]", is_so: str) -> None:
    """Wait until a query says so."""
    deadline = time.monotonic() + 60
    while not await db.fetchval(is_so):
        assert time.monotonic() < deadline, is_so
        await asyncio.sleep(0.05)
