"""Held keys and blocked shards on real brokers, with relay processes that are killed meanwhile."""

import asyncio
import signal
import time
from pathlib import Path
from typing import Any, Protocol

import aio_pika
import asyncpg
import pytest
import pytest_asyncio
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType

from tests.acceptance.brokers import KafkaWire, RabbitWire, WireBroker
from tests.integration.test_publish_gates import GATES, PARKED, decide, policy, until
from tests.integration.test_relay_processes import Site

GOOD, POISON = "order.placed", "order.poison"
BIG = b"P" + bytes(5000)


class Ward(Protocol):
    """A broker that takes a site's messages but those of type POISON, until it is cured."""

    wire: WireBroker

    async def admit(self, address: str) -> None:
        """Make the address, and keep what is sent to it."""
        ...

    async def cure(self, address: str) -> None:
        """From now on everything is taken."""
        ...


class KafkaWard:
    """The topic's limit is below the poison's size."""

    def __init__(self, bootstrap: str) -> None:
        self._bootstrap = bootstrap
        self.wire: WireBroker = KafkaWire(bootstrap)

    async def admit(self, address: str) -> None:
        admin = AIOKafkaAdminClient(bootstrap_servers=self._bootstrap)
        await admin.start()
        await admin.create_topics([NewTopic(address, 1, 1, topic_configs={"max.message.bytes": "3000"})])
        await admin.close()

    async def cure(self, address: str) -> None:
        admin = AIOKafkaAdminClient(bootstrap_servers=self._bootstrap)
        await admin.start()
        limit = ConfigResource(ConfigResourceType.TOPIC, address, {"max.message.bytes": "1000000"})
        await admin.alter_configs([limit])
        await admin.close()


class RabbitWard:
    """No queue is bound for the poison's type."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.wire: WireBroker = RabbitWire(url)

    async def _bind(self, address: str, types: str) -> None:
        async with await aio_pika.connect(self._url) as connection:
            channel = await connection.channel()
            await channel.declare_exchange(address, aio_pika.ExchangeType.TOPIC, durable=True)
            queue = await channel.declare_queue(f"heard.{address}", durable=True)
            await queue.bind(address, routing_key=f"*.{types}")

    async def admit(self, address: str) -> None:
        await self._bind(address, GOOD)

    async def cure(self, address: str) -> None:
        await self._bind(address, POISON)


@pytest.fixture(params=["kafka", "rabbitmq"])
def ward(request: pytest.FixtureRequest) -> Ward:
    """Once per broker."""
    if request.param == "kafka":
        return KafkaWard(request.getfixturevalue("kafka_bootstrap"))
    return RabbitWard(request.getfixturevalue("rabbit_url"))


@pytest_asyncio.fixture
async def site(migrated_url: str, ward: Ward, tmp_path: Path) -> Any:
    """An address that takes no poison; no relay yet."""
    site = Site(migrated_url, ward.wire, tmp_path)
    await ward.admit(site.address)
    yield site
    await site.aclose()


async def write(db: "asyncpg.Connection[Any]", site: Site, *payloads: bytes, key: str = "k") -> None:
    """One row each; BIG is the poison."""
    for payload in payloads:
        await db.execute(
            """
            insert into towpath.outbox
              (shard, message_id, kind, destination, type, key, content_type, payload)
            select towpath.shard($1, $2, m.id), m.id, 'event', $1, $3, $2, 'text/plain', $4
            from (select gen_random_uuid() as id) m
            """,
            site.address,
            key,
            POISON if payload is BIG else GOOD,
            payload,
        )


async def heard(site: Site, count: int, so_far: list[bytes], *, seconds: float = 60) -> list[bytes]:
    """Everything heard, once it is so much that differs; the poison by its first byte."""
    deadline = time.monotonic() + seconds
    while len(set(so_far)) < count:
        assert time.monotonic() < deadline, so_far
        so_far += [(message.body or b"")[:1] for message in await site.wire.heard(site.address)]
        await asyncio.sleep(0.1)
    return so_far


async def test_a_held_key_survives_its_relay_and_is_released_in_order_by_another(
    site: Site, ward: Ward, db: "asyncpg.Connection[Any]"
) -> None:
    """R8, R9, R23, R4: SIGKILL while it is held; nothing of the key is confirmed before the decision."""
    await policy(db, "park_key", site.address)
    await write(db, site, b"1", BIG, b"2", b"3")
    await write(db, site, b"a", key="other")
    first = await site.relay()
    await until(db, PARKED, 2, seconds=60)
    first.signal(signal.SIGKILL)
    await first.exit_code()
    await write(db, site, b"4")
    await write(db, site, b"b", key="other")
    await site.relay()
    await until(db, PARKED, 3, seconds=60)
    so_far = await heard(site, 3, [])
    assert sorted(set(so_far)) == [b"1", b"a", b"b"]
    await ward.cure(site.address)
    await decide(db)
    await until(db, GATES, 0, seconds=60)
    so_far = await heard(site, 3 + 4, so_far)
    assert [body for body in dict.fromkeys(so_far) if body in b"P234"] == [b"P", b"2", b"3", b"4"]


async def test_a_blocked_shard_stays_blocked_on_another_relay_until_it_is_discarded(
    site: Site, db: "asyncpg.Connection[Any]"
) -> None:
    """R8, R9, R4: the other keys of the shard wait in the outbox, other shards go on."""
    await policy(db, "block", site.address)
    neighbour, stranger = await db.fetchrow(
        """
        select min(n) filter (where same) as neighbour, min(n) filter (where not same) as stranger
        from (select n::text as n, towpath.shard($1, n::text, m.id) = towpath.shard($1, 'k', m.id) as same
              from generate_series(1, 500) n, (select gen_random_uuid() as id) m) s
        """,
        site.address,
    )
    await write(db, site, BIG, b"2")
    first = await site.relay()
    await until(db, GATES, 1, seconds=60)
    first.signal(signal.SIGKILL)
    await first.exit_code()
    await write(db, site, b"n", key=neighbour)
    await write(db, site, b"s", key=stranger)
    await site.relay()
    assert set(await heard(site, 1, [])) == {b"s"}
    await until(db, "select count(*) from towpath.outbox_message where status = 'PENDING'", 2)
    await decide(db, "discard")
    assert set(await heard(site, 3, [b"s"])) == {b"s", b"2", b"n"}
    assert await db.fetchval(GATES) == 0
