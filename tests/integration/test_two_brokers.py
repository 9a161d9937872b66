"""One outbox, two brokers: each has shards and relays of its own."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.brokers import KafkaWire, RabbitWire, WireBroker
from tests.integration.relaying import (
    FAST,
    RecordingBroker,
    Verdict,
    emit,
    eventually,
    judge,
    prepare,
    relaying,
)
from tests.integration.test_relay_processes import PATIENT, Site
from towpath.brokers.factory import broker_from_url
from towpath.errors import ConfigurationError, UsageError
from towpath.relay import Relay
from towpath.store.destinations import add_broker, all_brokers, set_destination
from towpath.store.statements import DEFAULT_SCHEMA
from towpath.testing.proxy import TcpProxy

Db = Any
SECOND = replace(FAST, broker_number=1)


async def move(db: Db, name: str, broker: str) -> None:
    """Like the command."""
    async with db.transaction():
        await set_destination(db, name, None, None, broker, DEFAULT_SCHEMA)


@pytest.fixture
async def second(db: Db) -> Db:
    """A database with another broker, `events`, for the destination of that name."""
    async with db.transaction():
        assert await add_broker(db, "events", DEFAULT_SCHEMA) == 1
    await move(db, "events", "events")
    return db


async def both(db: Db, number: int) -> None:
    """A message to each broker."""
    for destination in ("orders", "events"):
        await emit(db, f"k{number % 5}", b"%d" % number, destination=destination)


async def test_one_broker_that_is_down_does_not_delay_the_other(second: Db, migrated_url: str) -> None:
    """R24: nothing of the first is tried by the second's relay, and all of it arrives in order afterwards."""
    orders, events = RecordingBroker(), RecordingBroker()
    orders.is_available = False
    async with (
        relaying(migrated_url, orders) as first_relay,
        relaying(migrated_url, events, SECOND) as second_relay,
    ):
        for number in range(50):
            await both(second, number)
        await eventually(lambda: len(events.arrivals) == 50)
        await eventually(lambda: not first_relay.status().is_ready)
        await eventually(lambda: second_relay.status().problems == [])
        assert orders.arrivals == []
        orders.is_available = True
        await eventually(lambda: len(orders.arrivals) == 50)
        assert first_relay.status().shards == list(range(16)), "all of its broker: it shares with no other"
        assert second_relay.status().shards == list(range(16, 32))
    expected = [(f"k{number % 5}", number) for number in range(50)]
    for broker in (orders, events):
        found = judge(expected, broker)
        assert (found.lost, found.ghosts, found.inversions) == (0, 0, 0)
    assert {each.message.address for each in orders.arrivals} == {"orders"}
    assert {each.message.address for each in events.arrivals} == {"events"}


@pytest.fixture
async def sites(
    second: Db, migrated_url: str, kafka_bootstrap: str, rabbit_url: str, tmp_path: Path
) -> AsyncIterator[tuple[Site, Site]]:
    """An address at Kafka and one at RabbitMQ, which is the second broker."""
    await prepare(second)
    wires: tuple[WireBroker, WireBroker] = KafkaWire(kafka_bootstrap), RabbitWire(rabbit_url)
    async with AsyncExitStack() as stack:
        sites = []
        for wire in wires:
            directory = tmp_path / wire.url.partition(":")[0]
            directory.mkdir()
            site = Site(migrated_url, wire, directory)
            stack.push_async_callback(site.aclose)
            admin = broker_from_url(wire.url).admin()
            await admin.apply([site.address], [], partitions=3)
            await admin.aclose()
            await wire.listen(site.address)
            sites.append(site)
        await move(second, sites[1].address, "events")
        yield sites[0], sites[1]


async def test_kafka_away_delays_nothing_at_rabbitmq(sites: tuple[Site, Site], kafka_proxy: TcpProxy) -> None:
    """R24: relay processes on the real ones."""
    at_kafka, at_rabbit = sites
    common = {"TOWPATH_RELAY__CANARIES": "false"}
    far = f"kafka://127.0.0.1:{kafka_proxy.port}"
    for_kafka = await at_kafka.relay(TOWPATH_BROKER_URL=far, **common)
    for_rabbit = await at_rabbit.relay(TOWPATH_RELAY__BROKER_NUMBER="1", **common, **PATIENT)
    for relay in (for_kafka, for_rabbit):
        await relay.logged("relay.lease_acquired")
    await kafka_proxy.cut()
    async with asyncio.TaskGroup() as tasks:
        for site in sites:
            tasks.create_task(site.write(time.monotonic() + 3, writers=3))
    assert await at_rabbit.verdict() == Verdict(lost=0, ghosts=0, duplicates=0, inversions=0)
    assert at_rabbit.committed
    await for_kafka.logged("relay.broker_unavailable")
    assert await at_kafka.wire.heard(at_kafka.address) == []
    await kafka_proxy.restore()
    found = await at_kafka.verdict()
    assert (found.lost, found.ghosts, found.inversions) == (0, 0, 0)
    assert "relay.broker_unavailable" not in {event["event"] for event in for_rabbit.events()}


async def test_a_relay_of_a_broker_that_nobody_added_ends_with_the_command(db: Db, migrated_url: str) -> None:
    """O2"""
    with pytest.raises(BaseExceptionGroup) as raised:
        await Relay(migrated_url, RecordingBroker(), replace(FAST, broker_number=3)).run(asyncio.Event())
    assert raised.group_contains(ConfigurationError, match="no broker has the number 3.*towpath broker add")


async def test_a_name_is_given_once_and_a_broker_must_be_there(second: Db) -> None:
    """O2"""
    async with second.transaction():
        with pytest.raises(UsageError, match="there is a broker events already"):
            await add_broker(second, "events", DEFAULT_SCHEMA)
    with pytest.raises(UsageError, match="no broker 'typo', only default, events"):
        await move(second, "orders", "typo")
    assert [row["name"] for row in await all_brokers(second, DEFAULT_SCHEMA)] == ["default", "events"]


async def test_a_destination_moves_when_nothing_of_it_is_on_its_way(second: Db, migrated_url: str) -> None:
    """R10: what the old broker has not confirmed could be overtaken at the new one."""
    await emit(second, "k", b"1", destination="orders")
    with pytest.raises(UsageError, match="messages to orders are not published yet: stop its producers"):
        await move(second, "orders", "events")
    await move(second, "orders", "default")  # where it is
    broker = RecordingBroker()
    async with relaying(migrated_url, broker):
        await eventually(lambda: len(broker.arrivals) == 1)
    await move(second, "orders", "events")
    await emit(second, "k", b"2", destination="orders")
    assert await second.fetchval("select max(shard) from towpath.outbox") >= 16
