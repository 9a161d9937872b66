"""The broker goes away while a group consumes: it restarts, freezes, or hangs during the shutdown."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.integration.engine import EFFECTS, Posted, effects, until
from tests.integration.test_effects import write
from tests.integration.wired import KAFKA, new_name, wired
from towpath.app import App
from towpath.context import Tx
from towpath.testing.proxy import TcpProxy
from towpath.testing.services import KafkaServer, RabbitServer

pytestmark = pytest.mark.services

RABBIT: Mapping[str, object] = {"heartbeat_seconds": 5}


@dataclass
class Far:
    """A broker that a test may take away."""

    server: KafkaServer | RabbitServer
    url: str
    options: Mapping[str, object]
    proxied_url: str
    proxy: TcpProxy


@pytest.fixture(params=["kafka", "rabbitmq"])
async def far(request: pytest.FixtureRequest) -> AsyncIterator[Far]:
    """Each broker in turn, and running afterwards."""
    async with AsyncExitStack() as stack:
        server: KafkaServer | RabbitServer
        if request.param == "kafka":
            server = kafka = request.getfixturevalue("kafka_server")
            proxy = TcpProxy("127.0.0.1", kafka.proxied_port, port=kafka.advertised_port)
            await stack.enter_async_context(proxy)
            far = f"kafka://127.0.0.1:{proxy.port}"
            yield Far(
                server, f"kafka://{kafka.bootstrap}", {**KAFKA, "request_timeout_ms": 15_000}, far, proxy
            )
        else:
            server = rabbit = request.getfixturevalue("rabbit_server")
            parts = urlsplit(rabbit.url)
            proxy = await stack.enter_async_context(TcpProxy("127.0.0.1", parts.port or 5672))
            netloc = f"{parts.username}:{parts.password}@127.0.0.1:{proxy.port}"
            yield Far(server, rabbit.url, RABBIT, parts._replace(netloc=netloc).geturl(), proxy)
        if not server.is_running:
            server.start()


def once_waiting(forever: asyncio.Event) -> tuple[App, list[int]]:
    """A group whose number 1 does not end at its first call."""
    app, calls = App(new_name("depot")), list[int]()

    @app.transactional()
    async def sort(parcel: Posted, tx: Tx) -> None:
        calls.append(parcel.number)
        await write(tx, parcel)
        if parcel.number == 1 and calls.count(1) == 1:
            await forever.wait()

    return app, calls


async def test_shutdown_ends_in_time_while_the_broker_hangs(migrated_url: str, far: Far) -> None:
    """S4: what finished is not run again though its acknowledgement is lost; the rest goes back unspent."""
    app, calls = once_waiting(asyncio.Event())
    brief = {"drain_timeout": timedelta(milliseconds=200)}
    async with wired(app, migrated_url, far.proxied_url, far.options, **brief) as depot:
        await depot.db.execute(EFFECTS)
        async with depot.member() as member:
            done = await depot.publish(Posted("a", 0))
            await depot.reaches(done, "SUCCEEDED")
            left = await depot.publish(Posted("b", 1))
            await until(lambda: calls == [0, 1])
            await far.proxy.hang()
            async with asyncio.timeout(60):
                await member.stop()
        row = await depot.row(left)
        assert (row["state"], row["attempt"], row["deliveries"]) == ("ACCEPTED", 0, 0)
        await far.proxy.restore()
        async with depot.member():
            await depot.reaches(left, "SUCCEEDED")
        assert (calls, await effects(depot)) == ([0, 1, 1], [("a", 0), ("b", 1)])


async def test_consumption_resumes_after_each_restart_of_the_broker(
    migrated_url: str, far: Far, scale: float
) -> None:
    """S5: without an operator, and readiness tells the truth meanwhile."""
    app, _ = once_waiting(asyncio.Event())
    restarts = max(1, round(2 * scale))
    async with wired(app, migrated_url, far.url, far.options) as depot:
        await depot.db.execute(EFFECTS)
        async with depot.member() as member:
            health = member.consumer.health
            for number in range(2, 2 + restarts):
                await depot.reaches(await depot.publish(Posted(f"before-{number}", number)), "SUCCEEDED")
                await asyncio.to_thread(far.server.stop)
                await _until(lambda: not health.is_ready)
                assert health.is_database_seen
                await asyncio.to_thread(far.server.start)
                await _until(lambda: health.is_ready)
                await depot.reaches(await depot.publish(Posted(f"after-{number}", number)), "SUCCEEDED")
            assert not health.stuck_loops()
            assert not member.task.done()
        assert len(await effects(depot)) == 2 * restarts


async def _until(condition: Callable[[], Any]) -> None:
    """A broker that restarts on a busy machine takes its time."""
    await until(lambda: bool(condition()), seconds=90)
