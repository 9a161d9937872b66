"""A group whose place in a Kafka topic is gone: nothing runs again and nothing is skipped without a word."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic, RecordsToDelete
from aiokafka.protocol.admin import DeleteGroupsRequest
from aiokafka.structs import OffsetAndMetadata

from tests.fixtures.fix_cli import Run
from tests.fixtures.json_documents import check_document
from tests.integration.engine import Posted, until
from tests.integration.wired import KAFKA, Wired, new_name, wired
from towpath.app import App
from towpath.telemetry import names
from towpath.telemetry.logging import facts
from towpath.telemetry.metrics import Telemetry
from towpath.telemetry.names import Metric

pytestmark = pytest.mark.services

REFUSED = "select refused from towpath.group_offset"


@pytest.fixture
async def kafka_admin(kafka_bootstrap: str) -> AsyncIterator[AIOKafkaAdminClient]:
    """Another client's."""
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka_bootstrap)
    await admin.start()
    yield admin
    await admin.close()


@pytest.fixture
def cli(towpath: Run, clean_environment: pytest.MonkeyPatch, kafka_bootstrap: str) -> Callable[..., Any]:
    """`worker offsets …` with --json at this broker, in a thread; its answer, or code and complaint."""
    clean_environment.setenv("TOWPATH_BROKER_URL", f"kafka://{kafka_bootstrap}")

    async def command(*arguments: str) -> Any:
        command = ("worker", "offsets", *arguments, "--json")
        ran = await asyncio.to_thread(towpath, *command)
        check_document(command, ran.out)
        return json.loads(ran.out) if ran.code == 0 else (ran.code, ran.err)

    return command


class Counts(Telemetry):
    """Counters, added up."""

    def __init__(self) -> None:
        self.of: dict[Metric, float] = {}

    def add(self, metric: Metric, amount: float = 1, /, **labels: str | None) -> None:
        self.of[metric] = self.of.get(metric, 0) + amount


def _sorting() -> tuple[App, list[int]]:
    app, seen = App(new_name("depot")), list[int]()

    @app.transactional()
    async def sort(parcel: Posted) -> None:
        seen.append(parcel.number)

    return app, seen


async def _publish(engine: Wired, *numbers: int) -> None:
    for number in numbers:
        await engine.publish(Posted("a", number))


async def _read_and_forget(engine: Wired, count: int) -> None:
    """Let a member read so many, and let the retention of their rows pass."""
    async with engine.member():
        await until(lambda: _answers(engine, count, "select position from towpath.group_offset"))
    await engine.db.execute("delete from towpath.task")


async def _answers(engine: Wired, expected: object, query: str) -> bool:
    return bool(expected == await engine.db.fetchval(query))


async def _forget_group(admin: AIOKafkaAdminClient, group: str) -> None:
    coordinator = await admin.find_coordinator(group)

    async def is_forgotten() -> bool:
        """Not while the broker still takes somebody for a member."""
        response = await admin._send_request(DeleteGroupsRequest([group]), coordinator)
        return bool(response.results == [(group, 0)])

    await until(is_forgotten)


def _refused(health: Any) -> bool:
    return bool(health.refused_partitions)


async def test_a_group_whose_offsets_are_gone_waits_for_a_word_and_goes_on_where_it_was(
    migrated_url: str,
    kafka_bootstrap: str,
    kafka_admin: AIOKafkaAdminClient,
    cli: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """C25: its rows are forgotten, so reading from the beginning would repeat every effect."""
    app, seen = _sorting()
    async with wired(app, migrated_url, f"kafka://{kafka_bootstrap}", KAFKA) as engine:
        topic = engine.addresses["parcels"]
        about = ("--group", app.name, "--topic", topic)
        await _publish(engine, 1, 2, 3)
        await _read_and_forget(engine, 3)
        assert (await cli(*about, "--to", "earliest", "--yes"))[0] == 1, "it goes on by itself"
        await _publish(engine, 4, 5)
        await _forget_group(kafka_admin, app.name)
        async with engine.member(awaits=_refused) as member:
            health = member.consumer.health
            assert (health.refused_partitions, health.is_ready) == ([f"{topic}:0"], False)
            told = [facts(record) for record in caplog.records if record.levelno == logging.ERROR]
            (told_once,) = [fact for fact in told if fact["event"] == "broker.partition_refused"]
            assert (
                f"towpath worker offsets --group {app.name} --topic {topic} --to recorded" in told_once["fix"]
            )
            await until(
                lambda: _answers(engine, "offset_missing", "select refused from towpath.group_offset")
            )
            (row,) = await cli("--group", app.name)
            assert (row["topic"], row["partition"], row["position"]) == (topic, 0, 3)
            planned = await cli(*about, "--to", "recorded", "--dry-run")
            assert (planned["given"], planned["partitions"][0]["resume_from"]) == (0, 3)
            await asyncio.sleep(1.5)  # it asks for a word every second
            assert seen == [1, 2, 3], "nothing runs again, and nothing goes on"

            said = await cli(
                *about, "--to", "recorded", "--yes", "--reason", "the broker forgot", "--actor", "ada"
            )

            assert said["given"] == 1
            await until(lambda: seen == [1, 2, 3, 4, 5])
            await until(lambda: health.is_ready)
            await until(lambda: _answers(engine, 5, "select position from towpath.group_offset"))
        audit = await engine.db.fetchrow("select actor, action, reason, filter from towpath.audit")
        assert tuple(audit)[:3] == ("ada", "worker.offsets", "the broker forgot")
        assert json.loads(audit["filter"]) == {"group": app.name, "topic": topic, "to": "recorded"}
        (row,) = await cli("--group", app.name)
        assert (row["position"], row["refused"], row["resume_from"]) == (5, None, None)
        async with engine.member():
            await _publish(engine, 6)
            await until(lambda: seen == [1, 2, 3, 4, 5, 6])


async def test_a_topic_made_again_waits_for_a_word_and_its_records_are_new(
    migrated_url: str, kafka_bootstrap: str, kafka_admin: AIOKafkaAdminClient, cli: Callable[..., Any]
) -> None:
    """C24, C25: the record of the old topic says nothing about the new one."""
    app, seen = App(new_name("depot")), list[bytes]()

    @app.transactional(type="scan", destination="scans")
    async def scan(data: bytes) -> None:
        seen.append(data)

    app.foreign("scans", type="scan")
    async with wired(app, migrated_url, f"kafka://{kafka_bootstrap}", KAFKA) as engine:
        topic = engine.addresses["scans"]
        about = ("--group", app.name, "--topic", topic)
        for data in (b"1", b"2", b"3"):
            await engine.publish_raw("scans", data)
        async with engine.member():
            await until(lambda: sorted(seen) == [b"1", b"2", b"3"])
            await until(lambda: _answers(engine, 3, "select position from towpath.group_offset"))
        await kafka_admin.delete_topics([topic])

        async def is_there(expected: bool) -> bool:
            return (topic in await kafka_admin.list_topics()) is expected

        await until(lambda: is_there(False))
        await kafka_admin.create_topics([NewTopic(topic, 1, 1)])
        await until(lambda: is_there(True))
        await engine.publish_raw("scans", b"1")
        async with engine.member(awaits=_refused) as member:
            health = member.consumer.health
            await until(
                lambda: _answers(engine, True, "select refused is not null from towpath.group_offset")
            )
            code, complaint = await cli(*about, "--to", "recorded", "--yes")
            assert code == 1
            assert "was read up to 3 and ends at 1" in complaint
            await cli(*about, "--to", "earliest", "--yes")
            await until(lambda: sorted(seen) == [b"1", b"1", b"2", b"3"])
            await until(lambda: health.is_ready)
        assert await _answers(engine, 4, "select count(distinct id) from towpath.task")


async def test_a_committed_offset_beyond_the_end_is_refused(
    migrated_url: str, kafka_bootstrap: str, cli: Callable[..., Any]
) -> None:
    """C24, C25: the client would begin anew at one end."""
    app, seen = _sorting()
    async with wired(app, migrated_url, f"kafka://{kafka_bootstrap}", KAFKA) as engine:
        topic = engine.addresses["parcels"]
        await _publish(engine, 1, 2)
        await _commit(kafka_bootstrap, app.name, topic, 100)
        async with engine.member(awaits=_refused) as member:
            await until(lambda: _answers(engine, "offset_out_of_range", REFUSED))
            assert seen == []
            await cli("--group", app.name, "--topic", topic, "--to", "1h", "--yes")
            await until(lambda: seen == [1, 2])
            await until(lambda: member.consumer.health.is_ready)


async def _commit(bootstrap: str, group: str, topic: str, offset: int) -> None:
    """As another client would."""
    consumer = AIOKafkaConsumer(bootstrap_servers=bootstrap, group_id=group, enable_auto_commit=False)
    await consumer.start()
    partition = TopicPartition(topic, 0)
    consumer.assign([partition])
    await consumer.commit({partition: OffsetAndMetadata(offset, "")})
    await consumer.stop()


async def test_records_deleted_before_they_were_read_are_reported_and_the_group_goes_on(
    migrated_url: str,
    kafka_bootstrap: str,
    kafka_admin: AIOKafkaAdminClient,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """C25: a gap that nobody can close is told, in the log and as a metric; once."""
    app, seen = _sorting()
    counts = Counts()
    async with wired(app, migrated_url, f"kafka://{kafka_bootstrap}", KAFKA) as engine:
        await _publish(engine, 1)
        await _read_and_forget(engine, 1)
        await _publish(engine, 2, 3, 4)
        partition = TopicPartition(engine.addresses["parcels"], 0)
        await kafka_admin.delete_records({partition: RecordsToDelete(before_offset=3)})
        for _ in range(2):
            async with engine.member(telemetry=counts):
                await until(lambda: seen == [1, 4])
        told = [facts(record) for record in caplog.records if record.levelno == logging.ERROR]
        (gap,) = [fact for fact in told if fact["event"] == "broker.records_lost"]
        assert (gap["first_offset"], gap["count"], counts.of[names.RECORDS_LOST]) == (1, 2, 2)


async def test_a_new_group_may_be_told_where_to_begin(
    migrated_url: str, kafka_bootstrap: str, cli: Callable[..., Any]
) -> None:
    """C25: its place is committed before anything is read, so that it has one to come back to."""
    app, seen = _sorting()
    async with wired(app, migrated_url, f"kafka://{kafka_bootstrap}", KAFKA, partitions=2) as engine:
        await _publish(engine, 1, 2)
        await cli("--group", app.name, "--topic", engine.addresses["parcels"], "--to", "latest", "--yes")
        async with engine.member():
            await _publish(engine, 3)
            await until(lambda: seen == [3])
            positions = "select array_agg(position order by position) from towpath.group_offset"
            await until(lambda: _answers(engine, [0, 3], positions))


GROUP = """
from towpath.app import App

app = App("ringers", retention="7d")

@app.idempotent(type="bell", destination="{topic}")
async def hear(data: bytes) -> None: ...
"""


@pytest.mark.parametrize(
    ("settings", "how_long"),
    [
        ({"retention.ms": "604800000"}, None),
        ({"retention.ms": "2592000000"}, "for 30 days"),
        ({"retention.ms": "-1"}, "for ever"),
        ({"cleanup.policy": "compact"}, "for ever"),
    ],
)
@pytest.mark.usefixtures("cli")
async def test_a_check_warns_where_a_topic_remembers_longer_than_the_group(
    towpath: Run,
    kafka_admin: AIOKafkaAdminClient,
    clean_environment: pytest.MonkeyPatch,
    tmp_path: Path,
    settings: dict[str, str],
    how_long: str | None,
) -> None:
    """C25, O3: what is read again after its row has gone runs again; a warning is no failed check."""
    topic, module = new_name("bells"), new_name("bells").replace("-", "_")
    (tmp_path / f"{module}.py").write_text(GROUP.format(topic=topic))
    clean_environment.syspath_prepend(tmp_path)
    clean_environment.setenv("TOWPATH_RELAY__CANARIES", "false")  # or their topic is missing too
    await kafka_admin.create_topics(
        [NewTopic(topic, 1, 1, topic_configs=settings), NewTopic(f"ringers.{topic}.dlq", 1, 1)]
    )

    async def is_visible() -> bool:
        return {topic, f"ringers.{topic}.dlq"} <= set(await kafka_admin.list_topics())

    await until(is_visible)
    ran = await asyncio.to_thread(towpath, "broker", "check", "--app", f"{module}:app")
    assert ran.code == 0, ran.err
    first, *warnings = ran.out.splitlines()
    assert first == "everything is there"
    expected = [] if how_long is None else [f"warning: {topic} keeps messages {how_long} and group ringers"]
    assert [line[: len(expected[0])] for line in warnings] == expected
