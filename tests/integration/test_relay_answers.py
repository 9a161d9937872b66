"""Real brokers whose answers stop: a relay killed before it hears of them, and one that waits for them."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import pytest

from tests.acceptance.brokers import KafkaWire, WireBroker
from tests.integration.relaying import emit, eventually, relaying
from tests.integration.test_relay_processes import site_at
from towpath.brokers.factory import broker_from_url
from towpath.relay import RelayOptions
from towpath.relay.hooks import RelayHooks
from towpath.testing.proxy import Direction, TcpProxy

CAPPED = 8
"""Failures after which the waits have reached their cap of 3 s for some time."""


@asynccontextmanager
async def proxied(wire: WireBroker, request: pytest.FixtureRequest) -> AsyncIterator[tuple[str, TcpProxy]]:
    """The URL of the broker behind a proxy, and the proxy."""
    if isinstance(wire, KafkaWire):
        kafka = request.getfixturevalue("kafka_server")
        async with TcpProxy("127.0.0.1", kafka.proxied_port, port=kafka.advertised_port) as proxy:
            yield f"kafka://127.0.0.1:{proxy.port}", proxy
    else:
        parts = urlsplit(wire.url)
        async with TcpProxy("127.0.0.1", parts.port or 5672) as proxy:
            netloc = f"{parts.username}:{parts.password}@127.0.0.1:{proxy.port}"
            yield parts._replace(netloc=netloc).geturl(), proxy


async def test_a_relay_killed_between_send_and_acknowledgement_loses_nothing(
    request: pytest.FixtureRequest,
    db: "asyncpg.Connection[Any]",
    migrated_url: str,
    wire: WireBroker,
    tmp_path: Path,
) -> None:
    """R4: the broker has taken what the relay never heard of; it comes again, and in order."""
    async with proxied(wire, request) as (url, proxy), site_at(wire, db, migrated_url, tmp_path) as site:
        dying = await site.relay(TOWPATH_BROKER_URL=url, TOWPATH_RELAY__CANARIES="false")
        site.committed.append(("1", 1))
        await emit(db, "1", b"1:1", destination=site.address)
        found = await site.verdict()
        assert found.lost == 0
        await proxy.hang(Direction.REPLIES)
        async with db.transaction():
            for value in (2, 3):
                for key in range(1, 21):
                    await emit(db, str(key), b"%d:%d" % (key, value), destination=site.address)
                    site.committed.append((str(key), value))
        already, deadline = len(site.heard), time.monotonic() + 60
        while len(site.heard) == already:
            assert time.monotonic() < deadline, "nothing reached the broker"
            await site.listen()
        assert dying.is_running
        dying.signal(signal.SIGKILL)
        assert await dying.exit_code() == -signal.SIGKILL
        successor = await site.relay()
        deadline = time.monotonic() + 60
        while await db.fetchval("select count(*) from towpath.outbox_message where status = 'PENDING'"):
            assert time.monotonic() < deadline, "it is not sent again"
            await asyncio.sleep(0.1)
        found = await site.verdict()
    assert (found.lost, found.ghosts, found.inversions) == (0, 0, 0)
    assert found.duplicates >= 1, "what was not acknowledged comes again"
    assert found.duplicates <= 100 * (1 + dying.mishaps + successor.mishaps)


@pytest.mark.slow
async def test_publishing_resumes_soon_after_a_broker_is_back(
    request: pytest.FixtureRequest,
    db: "asyncpg.Connection[Any]",
    migrated_url: str,
    wire: WireBroker,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Any,
) -> None:
    """R7: by itself; it is back right after a try failed, with the whole of the longest wait to come."""
    failures = 0
    unavailable = RelayHooks.broker_unavailable

    def count(self: RelayHooks, error: BaseException, number: int, wait_seconds: float) -> None:
        nonlocal failures
        failures = number
        unavailable(self, error, number, wait_seconds)

    monkeypatch.setattr(RelayHooks, "broker_unavailable", count)
    options = replace(RelayOptions(), publish_deadline=3.0)
    async with (
        proxied(wire, request) as (url, proxy),
        site_at(wire, db, migrated_url, tmp_path) as site,
        relaying(migrated_url, broker_from_url(url), options) as relay,
    ):
        await emit(db, "1", b"1:1", destination=site.address)
        site.committed.append(("1", 1))
        assert (await site.verdict()).lost == 0
        await proxy.cut()
        await emit(db, "1", b"1:2", destination=site.address)
        site.committed.append(("1", 2))
        await eventually(lambda: failures >= CAPPED)
        assert not relay.status().is_ready
        assert relay.status().problems[0].startswith("broker:")
        await proxy.restore()
        restored_at = time.monotonic()
        while (await site.verdict(seconds=0)).lost:
            assert time.monotonic() < restored_at + 60, "it does not resume"
            await asyncio.sleep(0.02)
        seconds = time.monotonic() - restored_at
        await eventually(lambda: relay.status().is_ready)
    record_property("resumed_after_seconds", round(seconds, 2))
    print(f"resumed after {seconds:.2f} s")
    assert seconds < 15
