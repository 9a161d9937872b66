"""The launcher starts real servers, keeps their data over restarts, and leaves nothing behind."""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import aio_pika
import asyncpg
import psutil
import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from towpath.testing.proxy import TcpProxy
from towpath.testing.services import (
    EmbeddedKafka,
    KafkaServer,
    PostgresServer,
    RabbitServer,
    ServiceFailed,
    ServiceMissing,
    java,
    kafka,
    postgres,
    run_sql,
)
from towpath.testing.services.processes import Command, ProcessGroup, make_cached

LAUNCHER = """
import signal, sys
from towpath.testing.services import EmbeddedKafka, KafkaServer, PostgresServer, RabbitServer
server = {name}().start()
print(server.pid, server.group.directory, flush=True)
signal.pause()
"""

BUSY = """
import os, signal, threading, zlib
data = bytes(1 << 20)
def work():
    while True:
        zlib.crc32(data)
for _ in range(8):
    threading.Thread(target=work).start()
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
signal.pause()
"""
"""Its main thread, which gets the signals, is given a processor when no other wants one."""


@pytest.fixture
def postgres_own() -> Iterator[PostgresServer]:
    with PostgresServer(fsync=True, settings={"max_connections": "17"}) as server:
        yield server


def wait_for_end(pids: set[int], directory: Path, seconds: float = 60) -> set[int]:
    """The processes that are left when the directory is gone or time is up."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        left = {pid for pid in pids if psutil.pid_exists(pid)}
        if not left and not directory.exists():
            return left
        time.sleep(0.02)
    return left


async def send_and_receive(bootstrap: str, topic: str, value: bytes, *, idempotent: bool = True) -> bytes:
    """Puts one record into a one-partition topic and reads the last one."""
    producer = AIOKafkaProducer(bootstrap_servers=bootstrap, enable_idempotence=idempotent)
    await producer.start()
    try:
        sent = await producer.send_and_wait(topic, value, partition=0)
    finally:
        await producer.stop()
    consumer = AIOKafkaConsumer(bootstrap_servers=bootstrap)
    await consumer.start()
    try:
        partition = TopicPartition(topic, 0)
        consumer.assign([partition])
        consumer.seek(partition, sent.offset)
        return (await consumer.getone()).value
    finally:
        await consumer.stop()


async def create_topic(bootstrap: str) -> str:
    topic = f"topic-{uuid.uuid4().hex[:8]}"
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    try:
        await admin.create_topics([NewTopic(topic, 1, 1)])
    finally:
        await admin.close()
    return topic


async def test_postgres_takes_settings(postgres_own: PostgresServer) -> None:
    connection = await asyncpg.connect(postgres_own.url())
    assert await connection.fetchval("SHOW max_connections") == "17"
    assert await connection.fetchval("SHOW fsync") == "on"
    await connection.close()


@pytest.mark.parametrize("way", ["restart", "immediate", "kill"])
def test_postgres_keeps_committed_rows_over(way: str, postgres_own: PostgresServer) -> None:
    url = postgres_own.create_database("kept")
    run_sql(url, "CREATE TABLE t (a int)", "INSERT INTO t VALUES (1)")
    if way == "kill":
        postgres_own.kill()
        postgres_own.start()
    else:
        postgres_own.restart(immediate=way == "immediate")
    assert run_sql(url, "SELECT a FROM t") == "1"


def test_a_stopped_postgres_refuses_connections(postgres_own: PostgresServer) -> None:
    postgres_own.stop()
    with pytest.raises(ServiceFailed, match="Connection refused"):
        run_sql(postgres_own.url(), "SELECT 1")


async def test_a_frozen_postgres_does_not_answer(postgres_own: PostgresServer) -> None:
    connection = await asyncpg.connect(postgres_own.url())
    postgres_own.suspend()
    with pytest.raises(TimeoutError):
        await connection.fetchval("SELECT 1", timeout=0.2)
    postgres_own.resume()
    await connection.close()


def test_who_suspends_a_busy_server_finds_it_suspended() -> None:
    """The thread that gets the signal may wait for a processor while the others run on."""
    group = ProcessGroup("busy")
    try:
        pid = group.spawn(Command("busy", [sys.executable, "-c", BUSY], {}))
        group.wait_until("busy", lambda: os.sched_getscheduler(pid) == os.SCHED_IDLE, 60)
        group.send_signal("busy", signal.SIGSTOP, is_for_tree=True)
        threads = Path(f"/proc/{pid}/task").iterdir()
        states = [Path(thread, "stat").read_text().rpartition(")")[2].split()[0] for thread in threads]
        assert states == ["T"] * 9
    finally:
        group.close()


def test_a_server_that_cannot_start_shows_its_log() -> None:
    server = PostgresServer(settings={"max_connections": "nonsense"})
    with pytest.raises(ServiceFailed, match="max_connections"), server:
        pass


async def test_databases_are_made_from_a_template(postgres_own: PostgresServer) -> None:
    run_sql(postgres_own.create_database("model"), "CREATE TABLE t AS SELECT 42 AS a")
    copy = postgres_own.create_database("copy", template="model")
    assert run_sql(copy, "SELECT a FROM t") == "42"


async def test_each_test_gets_an_empty_database(database_url: str) -> None:
    connection = await asyncpg.connect(database_url)
    tables = await connection.fetchval("SELECT count(*) FROM pg_tables WHERE schemaname = 'public'")
    await connection.close()
    assert tables == 0


def test_programs_the_server_user_cannot_reach_are_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres, "_is_reachable_by_all", lambda _: False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with PostgresServer() as server:
        assert run_sql(server.url(), "SELECT 1") == "1"


@pytest.mark.parametrize("name", ["PostgresServer", "KafkaServer", "EmbeddedKafka", "RabbitServer"])
def test_nothing_survives_a_killed_launcher(name: str) -> None:
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER.format(name=name)], stdout=subprocess.PIPE)
    with launcher:
        assert launcher.stdout is not None
        pid, directory = launcher.stdout.readline().split(maxsplit=1)
        started = {process.pid for process in psutil.Process(launcher.pid).children(recursive=True)}
        assert int(pid) in started
        launcher.kill()
    assert wait_for_end(started, Path(os.fsdecode(directory.strip()))) == set()


def test_nothing_survives_a_killed_supervisor() -> None:
    with PostgresServer() as server:
        pid = server.pid
        supervisor = psutil.Process(pid).parent()
        assert supervisor is not None
        started = {process.pid for process in supervisor.children(recursive=True)}
        supervisor.kill()
        assert wait_for_end(started, Path("/nonexistent")) == set()


async def test_kafka_carries_records_over_a_restart(kafka_server: KafkaServer) -> None:
    topic = await create_topic(kafka_server.bootstrap)
    assert await send_and_receive(kafka_server.bootstrap, topic, b"before") == b"before"
    kafka_server.kill()
    kafka_server.start()
    assert await send_and_receive(kafka_server.bootstrap, topic, b"after") == b"after"


async def test_a_kafka_client_stays_on_the_proxy(kafka_server: KafkaServer, kafka_proxy: TcpProxy) -> None:
    topic = await create_topic(kafka_server.bootstrap)
    producer = AIOKafkaProducer(bootstrap_servers=f"127.0.0.1:{kafka_proxy.port}")
    await producer.start()
    await producer.send_and_wait(topic, b"x")
    assert kafka_proxy.connection_count >= 1
    await producer.stop()


async def test_the_embedded_broker_carries_records(embedded_kafka: EmbeddedKafka) -> None:
    topic = await create_topic(embedded_kafka.bootstrap)
    received = await send_and_receive(embedded_kafka.bootstrap, topic, b"x", idempotent=False)
    assert received == b"x"


async def test_rabbitmq_keeps_a_quorum_queue_over_a_kill(rabbit_server: RabbitServer) -> None:
    name = f"queue-{uuid.uuid4().hex[:8]}"
    arguments = {"x-queue-type": "quorum", "x-delivery-limit": 1000, "x-single-active-consumer": True}
    async with await aio_pika.connect(rabbit_server.url) as connection:
        channel = await connection.channel()
        await channel.declare_queue(name, durable=True, arguments=arguments)
        await channel.default_exchange.publish(aio_pika.Message(b"kept", delivery_mode=2), name)
    rabbit_server.sync_metadata()
    rabbit_server.kill()
    rabbit_server.start()
    async with await aio_pika.connect(rabbit_server.url) as connection:
        channel = await connection.channel()
        queue = await channel.declare_queue(name, durable=True, arguments=arguments)
        async with queue.iterator(timeout=60) as messages:
            message = await anext(messages)
            await message.ack()
        await queue.delete(if_unused=False, if_empty=False)
    assert message.body == b"kept"


def test_rabbitmq_is_controlled_by_its_own_node_only(rabbit_server: RabbitServer) -> None:
    assert "towpath@localhost" in rabbit_server.ctl("cluster_status")


def test_the_command_line_starts_shows_and_ends_servers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "towpath.testing.services", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    assert call("status").returncode == 3
    up = call("up", "postgres", "embedded-kafka", "--detach", "--output", "json")
    addresses = {line["name"]: line["url"] for line in map(json.loads, up.stdout.splitlines())}
    assert set(addresses) == {"postgres", "embedded-kafka"}, up.stderr
    assert run_sql(addresses["postgres"], "SELECT 1") == "1"
    assert call("status").stdout.splitlines() == [
        f"export TOWPATH_TEST_POSTGRES={addresses['postgres']}",
        f"export TOWPATH_TEST_KAFKA={addresses['embedded-kafka']}",
    ]
    assert call("up", "postgres", "--detach").returncode == 1
    assert call("down").returncode == 0
    assert call("status").returncode == 3
    with pytest.raises(ServiceFailed, match="Connection refused"):
        run_sql(addresses["postgres"], "SELECT 1")


def test_a_foreground_launcher_ends_on_interrupt_also_where_a_script_started_it() -> None:
    command = ["sh", "-c", 'trap "" INT; exec "$@"', "sh", sys.executable, "-m", "towpath.testing.services"]
    with subprocess.Popen([*command, "up", "postgres"], stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline().startswith("export TOWPATH_TEST_POSTGRES=postgresql://")
        started = {process.pid for process in psutil.Process(launcher.pid).children(recursive=True)}
        launcher.send_signal(signal.SIGINT)
        assert launcher.wait(60) == 0
    assert wait_for_end(started, Path("/nonexistent")) == set()


def test_a_missing_service_names_the_line_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ServiceMissing, match=r"services install kafka"), KafkaServer():
        pass


def test_installing_again_downloads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*_: object) -> None:
        raise AssertionError("it is there")

    monkeypatch.setattr(java, "copy_artifacts", download)
    kafka.install()


def test_an_interrupted_cache_entry_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def half(target: Path) -> None:
        (target / "first").touch()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_cached("entry", half)
    entry = make_cached("entry", lambda target: (target / "all").touch())
    assert [path.name for path in entry.iterdir()] == ["all"]
