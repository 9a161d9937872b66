"""One rig per broker."""

from collections.abc import AsyncIterator
from urllib.parse import urlsplit

import pytest

from tests.contract.rigs import KAFKA_OPTIONS, RABBIT_OPTIONS, Rig, memory_rig, proxied_rig
from towpath.testing.proxy import TcpProxy
from towpath.testing.services import KafkaServer


async def _prepared(rig: Rig) -> AsyncIterator[Rig]:
    await rig.apply()
    try:
        yield rig
    finally:
        await rig.restore()
        await rig.aclose()


@pytest.fixture
async def kafka_rig(kafka_server: KafkaServer, kafka_proxy: TcpProxy) -> AsyncIterator[Rig]:
    """Apache Kafka behind a proxy."""
    url = f"kafka://127.0.0.1:{kafka_proxy.port}"
    async with proxied_rig("kafka", url, kafka_proxy, KAFKA_OPTIONS, shares_partitions=True) as rig:
        async for prepared in _prepared(rig):
            yield prepared


@pytest.fixture
async def rabbit_rig(rabbit_url: str, rabbit_proxy: TcpProxy) -> AsyncIterator[Rig]:
    """RabbitMQ behind a proxy."""
    parts = urlsplit(rabbit_url)
    url = parts._replace(netloc=f"{parts.username}:{parts.password}@127.0.0.1:{rabbit_proxy.port}").geturl()
    async with proxied_rig("rabbitmq", url, rabbit_proxy, RABBIT_OPTIONS, shares_partitions=False) as rig:
        async for prepared in _prepared(rig):
            yield prepared


@pytest.fixture
async def memory_broker_rig() -> AsyncIterator[Rig]:
    """The memory broker."""
    async with memory_rig() as rig:
        async for prepared in _prepared(rig):
            yield prepared


@pytest.fixture(
    params=[
        "memory",
        pytest.param("kafka", marks=pytest.mark.services),
        pytest.param("rabbitmq", marks=pytest.mark.services),
    ]
)
def rig(request: pytest.FixtureRequest) -> Rig:
    """Each broker in turn."""
    fixtures = {"memory": "memory_broker_rig", "kafka": "kafka_rig", "rabbitmq": "rabbit_rig"}
    prepared: Rig = request.getfixturevalue(fixtures[request.param])
    return prepared
