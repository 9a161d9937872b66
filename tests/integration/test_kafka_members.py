"""Members of a group at Kafka: handlers that outlast what the broker waits for, and partitions that come."""

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiokafka.admin import AIOKafkaAdminClient, NewPartitions
from sqlalchemy import text

from tests.integration.engine import EFFECTS, Note, Posted, effects, until
from tests.integration.test_effects import write
from tests.integration.wired import KAFKA, Wired, new_name, wired
from towpath.app import App
from towpath.context import SyncTx, Tx

pytestmark = pytest.mark.services

SHORT = {**KAFKA, "session_timeout_ms": 6_000, "rebalance_timeout_ms": 6_000}


@pytest.fixture
async def admin(kafka_bootstrap: str) -> AsyncIterator[Any]:
    client = AIOKafkaAdminClient(bootstrap_servers=kafka_bootstrap)
    await client.start()
    yield client
    await client.close()


@pytest.mark.parametrize("is_thread", [False, True])
async def test_a_handler_longer_than_the_rebalance_timeout_is_handed_over(
    migrated_url: str, kafka_bootstrap: str, is_thread: bool
) -> None:
    """S1, S2, C2: after its share of the timeout it is cancelled, or a thread is left to itself.

    It runs again unspent, ahead of its followers; what the thread still does is rolled back.
    """
    app, calls, forever, go = App(new_name("depot")), list[int](), asyncio.Event(), threading.Event()

    if is_thread:

        @app.transactional()
        def sort(parcel: Posted, tx: SyncTx) -> None:
            calls.append(parcel.number)
            values = {"parcel": parcel.parcel, "number": parcel.number}
            statement = "insert into public.effect (parcel, number) values (:parcel, :number)"
            tx.session.execute(text(statement), values)
            if len(calls) == 1:
                assert go.wait(60)
    else:

        @app.transactional()
        async def sort_too(parcel: Posted, tx: Tx) -> None:
            calls.append(parcel.number)
            await write(tx, parcel)
            if len(calls) == 1:
                await forever.wait()

    async with wired(app, migrated_url, f"kafka://{kafka_bootstrap}", SHORT, partitions=2) as depot:
        await depot.db.execute(EFFECTS)
        async with depot.member() as first:
            ids = [await depot.publish(Posted("a", number)) for number in range(3)]
            await until(lambda: calls == [0])
            async with depot.member():
                rows = [await depot.reaches(id_, "SUCCEEDED") for id_ in ids]
            go.set()
            await first.stop()
        assert calls == [0, 0, 1, 2]
        assert await effects(depot) == [("a", 0), ("a", 1), ("a", 2)]
        assert [(row["attempt"], row["deliveries"]) for row in rows] == [(1, 1)] * 3


async def test_a_handler_of_three_poll_intervals_causes_no_rebalance_and_runs_once(
    migrated_url: str, kafka_bootstrap: str
) -> None:
    """C1: also while the intake is full and nothing may be fetched."""
    app, calls = App(new_name("depot"), ordering="none"), list[int]()

    @app.idempotent()
    async def read(note: Note) -> None:
        calls.append(note.number)
        await asyncio.sleep(6 if len(calls) <= 4 else 0)

    options = {**KAFKA, "max_poll_interval_ms": 2_000}
    limits = {"concurrency": 4, "max_in_flight": 4}
    async with wired(app, migrated_url, f"kafka://{kafka_bootstrap}", options, **limits) as depot:
        ids = [await depot.publish(Note(number)) for number in range(6)]
        async with depot.member() as member:
            subscriber: Any = member.consumer.health.subscriber
            await until(lambda: len(calls) == 4)
            epoch = subscriber._assignments._epoch
            rows = [await depot.reaches(id_, "SUCCEEDED") for id_ in ids]
            assert (subscriber._assignments._epoch, member.consumer.health.subscriber) == (epoch, subscriber)
        assert sorted(calls) == list(range(6))
        assert [row["deliveries"] for row in rows] == [1] * 6


async def test_new_partitions_are_picked_up(migrated_url: str, kafka_bootstrap: str, admin: Any) -> None:
    """S1: without a restart, and from their beginning."""
    app = App(new_name("depot"), ordering="none")

    @app.idempotent()
    async def sort(parcel: Posted) -> None: ...

    options = {**KAFKA, "metadata_max_age_ms": 500}
    async with (
        wired(app, migrated_url, f"kafka://{kafka_bootstrap}", options) as depot,
        depot.member() as one,
    ):
        await depot.reaches(await depot.publish(Posted("a")), "SUCCEEDED")
        await admin.create_partitions({depot.addresses["parcels"]: NewPartitions(4)})
        await until(lambda: len(_partitions(one)) == 4)
        ids = [await depot.publish(Posted(f"k{number}")) for number in range(12)]
        for id_ in ids:
            await depot.reaches(id_, "SUCCEEDED")
        await until(lambda: _is_committed(depot, admin, partitions=2))


def _partitions(member: Any) -> set[Any]:
    subscriber = member.consumer.health.subscriber
    return set() if subscriber is None else set(subscriber._assignments.partitions)


async def _is_committed(depot: Wired, admin: Any, *, partitions: int) -> bool:
    """Whether the group has come on in so many partitions."""
    offsets = await admin.list_consumer_group_offsets(depot.app.name)
    return sum(each.offset > 0 for each in offsets.values()) >= partitions
