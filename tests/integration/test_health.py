"""What both deployables say of themselves while what they need is taken away: the table on probes."""

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import aiormq
import asyncpg
import pytest
import pytest_asyncio

from tests.fixtures.fix_cli import Ran, Run
from tests.fixtures.json_documents import check_document
from tests.integration.deployables import Deployable, Noun, at_port, deployed, until
from tests.integration.relaying import emit
from towpath import App, OnceCall, StillUnknown, event
from towpath.brokers.factory import broker_from_url
from towpath.brokers.memory.broker import MemoryBroker
from towpath.brokers.ports import GroupTopology, OutboundMessage
from towpath.brokers.rabbitmq.topology import group_queue
from towpath.cli import health
from towpath.cli.exits import OK, SAYS_NO, UNREACHABLE
from towpath.consumer.health import Health, round_seconds
from towpath.consumer.service import _Probe as WorkerProbe
from towpath.messages.envelope import Envelope, wire_headers
from towpath.relay import Relay, RelayOptions
from towpath.relay.service import _Probe as RelayProbe
from towpath.settings import WorkerSettings
from towpath.testing.proxy import Direction, TcpProxy

APP = """
import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from towpath import App, event

@event("order.placed", destination="{address}")
@dataclass
class Rung:
    how: str

app = App("{address}")

@app.idempotent()
async def hear(bell: Rung) -> None:
    Path("begun").touch()
    while not Path("go").exists():
        if bell.how == "blocking":
            time.sleep(0.05)
        else:
            await asyncio.sleep(0.05)
"""

# A fault is found within seconds; every wait of a test is for a condition.
QUICK = {
    "TOWPATH_RELAY__LEASE": "6s",
    "TOWPATH_RELAY__RENEW_EVERY": "1s",
    "TOWPATH_RELAY__PUBLISH_DEADLINE": "2s",
    "TOWPATH_RELAY__CANARIES": "false",
    "TOWPATH_WORKER__LEASE": "6s",
    "TOWPATH_WORKER__BEAT_EVERY": "1s",
}
PATIENT = {
    "TOWPATH_BROKER_OPTIONS": '{"heartbeat_seconds": 600}',
    "TOWPATH_RELAY__LEASE": "1h",
    "TOWPATH_RELAY__PUBLISH_DEADLINE": "10m",
    "TOWPATH_WORKER__DRAIN_TIMEOUT": "10m",
}

# The minutes a loop may take are seconds in a process that finds this in its path.
HASTY = """
from towpath.consumer import census, health
from towpath.relay import engine as relay

health._STALL_SECONDS = relay._STALLED_SECONDS = 4.0
relay._PUBLISHES = 0
census._EVERY_SECONDS = 0.5
"""


@dataclass
class Site:
    """A database and a broker, each behind a proxy."""

    db: "asyncpg.Connection[Any]"
    database: TcpProxy
    broker: TcpProxy
    address: str
    directory: Path
    environment: dict[str, str]
    broker_url: str
    """Past the proxy."""

    def deployed(self, noun: Noun, **environment: str) -> AbstractAsyncContextManager[Deployable]:
        app = ("bells:app",) if noun == "worker" else ()
        return deployed(noun, self.directory, {**self.environment, **environment}, *app)

    async def ring(self, how: str = "once") -> None:
        """Write an event into the outbox."""
        await emit(self.db, "k", b'{"how": "%s"}' % how.encode(), destination=self.address)

    async def deliver(self, how: str) -> None:
        """Put an event at the broker, as the relay would."""
        envelope = Envelope(
            message_id=uuid4(),
            type="order.placed",
            source="/bells",
            occurred_at=datetime.now(UTC),
            content_type="application/json",
            sequence=1,
            installation="elsewhere",
            headers=(),
        )
        message = OutboundMessage(
            envelope.message_id,
            1,
            self.address,
            "order.placed",
            "k",
            0,
            wire_headers(envelope),
            b'{"how": "%s"}' % how.encode(),
        )
        publisher = broker_from_url(self.environment["TOWPATH_BROKER_URL"]).publisher()
        result = await publisher.publish([message], timeout_seconds=60)
        await publisher.aclose()
        assert {0} == result.acknowledged

    async def have_arrived(self, count: int) -> bool:
        """Whether the broker has so many messages that nobody has taken yet."""
        connection = await aiormq.connect(self.broker_url)
        channel = await connection.channel()
        queue = await channel.queue_declare(group_queue(self.address, self.address, 0), passive=True)
        await connection.close()
        return queue.message_count == count

    async def set_schema_version(self, version: int) -> None:
        """And the oldest library that works with it."""
        names = "('schema_version', 'compatible_from')"
        await self.db.execute(f"update towpath.meta set value = $1 where name in {names}", str(version))


@pytest_asyncio.fixture
async def site(
    db: "asyncpg.Connection[Any]",
    migrated_url: str,
    rabbit_url: str,
    postgres_proxy: TcpProxy,
    rabbit_proxy: TcpProxy,
    tmp_path: Path,
) -> AsyncIterator[Site]:
    address = f"bells-{uuid4().hex[:8]}"
    admin = broker_from_url(rabbit_url).admin()
    await admin.apply([address], [GroupTopology(address, (address,))], partitions=1)
    await admin.aclose()
    (tmp_path / "bells.py").write_text(APP.format(address=address))
    environment = {
        "TOWPATH_DATABASE_URL": at_port(migrated_url, postgres_proxy.port),
        "TOWPATH_BROKER_URL": at_port(rabbit_url, rabbit_proxy.port),
        "TOWPATH_BROKER_OPTIONS": '{"heartbeat_seconds": 1}',
        **QUICK,
    }
    yield Site(db, postgres_proxy, rabbit_proxy, address, tmp_path, environment, rabbit_url)


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong, what `/readyz` says of it, and how it is mended."""

    name: str
    begin: Callable[[Site], Awaitable[None]]
    says: tuple[str, ...]
    mend: Callable[[Site], Awaitable[None]]


FAULTS = (
    Fault(
        "broker frozen",
        lambda site: site.broker.hang(),
        ("broker: ", "TOWPATH_BROKER_URL"),
        lambda site: site.broker.restore(),
    ),
    Fault(
        "broker refused",
        lambda site: site.broker.cut(),
        ("broker: ", "TOWPATH_BROKER_URL"),
        lambda site: site.broker.restore(),
    ),
    Fault(
        "database down",
        lambda site: site.database.cut(),
        ("database: ", "TOWPATH_DATABASE_URL"),
        lambda site: site.database.restore(),
    ),
    Fault(
        "database frozen",
        lambda site: site.database.hang(),
        ("database: ", "TOWPATH_DATABASE_URL"),
        lambda site: site.database.restore(),
    ),
)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("noun", ["relay", "worker"])
async def test_readiness_names_what_is_missing_and_liveness_does_not_mind(
    site: Site, noun: Noun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S5, R5, C8: each fault alone, from before the start on; readiness comes back by itself."""
    monkeypatch.setattr(health, "_SECONDS", 1)
    (site.directory / "go").touch()
    await site.broker.cut()
    async with site.deployed(noun) as service:
        await service.until_problem("broker: ", "TOWPATH_BROKER_URL")
        assert (await service.facts("/livez"))["ok"]
        await site.broker.restore()
        await service.until_ready()
        for fault in FAULTS:
            await fault.begin(site)
            await site.ring()  # an idle relay learns of its broker from its canaries only
            await service.until_problem(*fault.says)
            live = await service.facts("/livez")
            assert (live["ok"], live["stuck_loops"]) == (True, []), fault.name
            await service.until_check(SAYS_NO)
            await fault.mend(site)
            await service.until_ready()
        await (_lose_shards if noun == "relay" else _lose_the_worker)(site, service)
        await service.until_ready()
        service.signal(signal.SIGSTOP)
        assert await service.check() == UNREACHABLE
        assert await service.check(is_live=True) == UNREACHABLE
        service.signal(signal.SIGCONT)
        await service.until_check(OK)
        await service.until_check(OK, is_live=True)


async def _lose_shards(site: Site, relay: Deployable) -> None:
    """Another relay has them for a while; this one stands by."""
    await until("shards", lambda: _shards(relay))
    taken = "relay = gen_random_uuid(), epoch = epoch + 1, lease_until = 'infinity'"
    await site.db.execute(f"update towpath.shard_lease set {taken}")
    await relay.logged("relay.lease_lost")
    await relay.until_ready()
    await site.db.execute("update towpath.shard_lease set lease_until = '-infinity'")
    await until("shards again", lambda: _shards(relay))


async def _lose_the_worker(site: Site, worker: Deployable) -> None:
    """It begins anew under another id."""
    before = await site.db.fetchval("select id from towpath.worker order by lease_until desc limit 1")
    await site.db.execute("delete from towpath.worker")
    await worker.logged("worker.lease_lost")
    await until("another id", lambda: _other_worker(site, before))


async def _shards(service: Deployable) -> bool:
    return bool((await service.facts("/readyz")).get("shards"))


async def _other_worker(site: Site, before: object) -> bool:
    return bool(await site.db.fetchval("select count(*) from towpath.worker where id <> $1", before))


@pytest.mark.parametrize(
    ("noun", "version", "says", "code"),
    [
        ("relay", None, ("draining: ",), 0),
        ("worker", None, ("draining: ",), 0),
        ("relay", 2, ("schema: ", "install a newer towpath"), 1),
        ("worker", 0, ("schema: ", "run towpath db upgrade"), 1),
    ],
)
async def test_a_process_that_drains_is_alive_and_says_why_it_is_not_ready(
    site: Site, noun: Noun, version: int | None, says: tuple[str, ...], code: int
) -> None:
    """S4: told to stop, or left with a schema older or newer than it can work with."""
    if noun == "worker":
        await site.deliver("once")
    async with site.deployed(noun, **PATIENT) as service:
        await service.until_ready()
        if noun == "relay":
            await site.ring()
            await until("a publish", lambda: site.have_arrived(1))  # what has to be asked before is asked
            await site.broker.hang(Direction.REPLIES)
            await site.ring()
            await until("a publish without an answer", lambda: site.have_arrived(2))
        else:
            await until("a handler that runs", lambda: _exists(site.directory / "begun"))
        if version is None:
            service.signal(signal.SIGTERM)
        else:
            await site.set_schema_version(version)
        await service.until_problem(*says)
        assert (await service.facts("/livez"))["ok"]
        await service.until_check(SAYS_NO)
        await site.broker.restore()
        (site.directory / "go").touch()
        assert await service.exit_code() == code


async def _exists(path: Path) -> bool:
    return path.exists()


async def test_a_handler_that_blocks_the_event_loop_is_seen_by_both_probes(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C2"""
    monkeypatch.setattr(health, "_SECONDS", 1)
    await site.deliver("blocking")
    async with site.deployed("worker") as service:
        await until("a handler that blocks", lambda: _exists(site.directory / "begun"))
        assert await service.check() == UNREACHABLE
        assert await service.check(is_live=True) == UNREACHABLE
        (site.directory / "go").touch()
        await service.until_ready()
        await service.until_check(OK, is_live=True)


@pytest.mark.parametrize(("noun", "loop"), [("relay", "publishing"), ("worker", "due")])
async def test_a_process_whose_loop_stopped_fails_its_liveness_until_it_comes_round(
    site: Site, noun: Noun, loop: str, towpath: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S6: a publish, or a look for due tasks, that does not end for longer than a loop may take."""
    (site.directory / "sitecustomize.py").write_text(HASTY)
    environment = {**PATIENT, "TOWPATH_WORKER__LEASE": "1h", "TOWPATH_WORKER__REAP_EVERY": "1s"}
    async with site.deployed(noun, **environment, PYTHONPATH=str(site.directory)) as service:
        monkeypatch.setenv(f"TOWPATH_{noun.upper()}__HEALTH_PORT", str(service.port))
        command = (noun, "check", "--live", "--json")
        ran = Ran(OK, "", "")

        async def ends_with(code: int) -> bool:
            nonlocal ran
            ran = await asyncio.to_thread(towpath, *command)
            return ran.code == code

        await service.until_ready()
        ready = (noun, "check", "--json")
        check_document(ready, (await asyncio.to_thread(towpath, *ready)).out)
        async with _stopped(site, noun):
            await until("the loop is named", lambda: _is_stuck(service, loop))
            await until("the check says no", lambda: ends_with(SAYS_NO))
            check_document(command, ran.out)
        await until("the check says yes", lambda: ends_with(OK))
        check_document(command, ran.out)
        await service.until_ready()


@asynccontextmanager
async def _stopped(site: Site, noun: Noun) -> AsyncIterator[None]:
    """The broker does not answer a publish, or a lock is in the way of every look at tasks."""
    if noun == "worker":
        async with site.db.transaction():
            await site.db.execute("lock table towpath.task")
            yield
        return
    await site.ring()
    await until("a publish", lambda: site.have_arrived(1))  # what has to be asked before is asked
    await site.broker.hang(Direction.REPLIES)
    await site.ring()
    yield
    await site.broker.restore()


async def _is_stuck(service: Deployable, loop: str) -> bool:
    return loop in (await service.facts("/livez")).get("stuck_loops", [])


def test_liveness_names_the_loop_that_is_stuck() -> None:
    """S6"""
    relay = Relay("postgresql://nobody@127.0.0.1/none", MemoryBroker("memory://nobody"))
    assert RelayProbe(relay).liveness()["ok"] is True
    relay._dispatch.ticked_at -= 151
    assert RelayProbe(relay).liveness()["stuck_loops"] == ["publishing"]
    assert RelayProbe(relay).liveness()["ok"] is False
    worker = Health("billing")
    worker.note("receive")
    worker.note("due")
    assert WorkerProbe("billing", worker).liveness()["ok"] is True
    worker.progressed_at["due"] -= 61
    assert WorkerProbe("billing", worker).liveness()["stuck_loops"] == ["due"]
    assert WorkerProbe("billing", worker).liveness()["ok"] is False


def test_a_loop_that_takes_as_long_as_its_settings_let_it_is_not_stuck() -> None:
    """S6: a broker that takes minutes for each publish, rare beats, a provider that is slow to answer."""
    options = RelayOptions(lease=3600, renew_every=600, publish_deadline=600, poll_max=600)
    relay = Relay("postgresql://nobody@127.0.0.1/none", MemoryBroker("memory://nobody"), options)
    relay._dispatch.ticked_at -= 1300
    relay._heartbeat.ticked_at -= 700
    relay._reading.ticked_at -= 700
    assert RelayProbe(relay).liveness()["stuck_loops"] == []

    long = timedelta(minutes=10)
    settings = WorkerSettings(lease=3 * long, beat_every=long, reap_every=long, due_poll_max=long)
    worker = Health("billing", round_seconds=round_seconds(_asking("20m").handlers, settings))
    for loop, minutes in {"beat": 30, "bookmarks": 10, "due": 12, "reap": 15, "reconcile": 35}.items():
        worker.note(loop)
        worker.progressed_at[loop] -= 60 * minutes + 50
        assert worker.stuck_loops() == [], loop
        worker.progressed_at[loop] -= 60 * 3
        assert worker.stuck_loops() == [loop]
        del worker.progressed_at[loop]


def _asking(timeout: str) -> App:
    """A group that asks a provider what happened."""
    app = App("billing")

    @event("order.billed", destination="orders")
    @dataclass
    class Billed: ...

    async def ask(call: OnceCall) -> StillUnknown:
        return StillUnknown()

    @app.at_most_once(timeout=timeout, reconcile=ask)
    async def bill(billed: Billed, call: OnceCall) -> None: ...

    return app


def test_a_loop_that_ended_for_a_long_drain_is_not_stuck() -> None:
    """S6: liveness would end the handlers that the drain waits for."""
    worker = Health("billing", is_draining=True)
    for loop in ("receive", "beat"):
        worker.note(loop)
        worker.progressed_at[loop] -= 61
    assert worker.stuck_loops() == ["beat"]
