"""Relay processes on real brokers: killed, frozen, told to stop; what the broker then holds."""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import asyncpg
import pytest

from tests.acceptance.brokers import KafkaWire, RabbitWire, WireBroker
from tests.integration.relaying import Verdict, emit, prepare, race, verdict
from towpath.brokers.factory import broker_from_url
from towpath.crashpoints import CrashPoint
from towpath.testing.services import KafkaServer, RabbitServer

ROOT = Path(__file__).parents[2]
PATIENT = {"TOWPATH_RELAY__LEASE": "90s", "TOWPATH_RELAY__PUBLISH_DEADLINE": "60s"}
"""Where none dies: no lease lapses and no publish is given up because the machine is busy."""
RING = """
create or replace function towpath.rotate_seconds() returns integer language sql immutable
as $$ select {seconds} $$
"""
"""A relay looks at the ring twenty times a rotation."""
TURN = """
create or replace function towpath.ring_slot() returns smallint language sql volatile
as $$ select {slot}::smallint $$
"""
"""The slot that is written to."""


class RelayProcess:
    """`python -m outbox_relay` with short leases."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self._process = process
        self._log = log

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    async def exit_code(self, *, seconds: float = 60) -> int:
        """Wait until it is gone."""
        async with asyncio.timeout(seconds):
            return await self._process.wait()

    @property
    def is_running(self) -> bool:
        return self._process.returncode is None

    @property
    def mishaps(self) -> int:
        """How often the machine was too busy for its short leases, or for the broker to answer in time."""
        names = ("relay.lease_lost", "relay.broker_unavailable")
        return sum(each["event"] in names for each in self.events())

    def events(self) -> list[dict[str, Any]]:
        """What it logged."""
        lines = self._log.read_text().splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    async def logged(self, event: str, *, count: int = 1, seconds: float = 60) -> None:
        """Wait for a log event."""
        deadline = time.monotonic() + seconds
        while sum(each["event"] == event for each in self.events()) < count:
            assert self.is_running, self._log.read_text()
            assert time.monotonic() < deadline, self._log.read_text()
            await asyncio.sleep(0.05)


class Site:
    """One database, one address at one broker, and relay processes between them."""

    def __init__(self, url: str, wire: WireBroker, directory: Path) -> None:
        self.url = url
        self.wire = wire
        self.address = f"orders-{uuid4().hex[:8]}"
        self.committed: list[tuple[str, int]] = []
        self.heard: list[tuple[str | None, bytes | None]] = []
        self._directory = directory
        self._processes: list[RelayProcess] = []

    async def relay(self, **environment: str) -> RelayProcess:
        """Start a process."""
        log = self._directory / f"relay-{len(self._processes)}.log"
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "outbox_relay",
                cwd=ROOT,
                stdout=output,
                stderr=output,
                env={
                    **{name: value for name, value in os.environ.items() if not name.startswith("TOWPATH_")},
                    "TOWPATH_DATABASE_URL": self.url,
                    "TOWPATH_BROKER_URL": self.wire.url,
                    "TOWPATH_RELAY__LEASE": "5s",
                    "TOWPATH_RELAY__RENEW_EVERY": "500ms",
                    "TOWPATH_RELAY__PUBLISH_DEADLINE": "3s",
                    "TOWPATH_RELAY__MARGIN": "300ms",
                    "TOWPATH_RELAY__WINDOW_ROWS": "50",
                    **environment,
                },
            )
        relay = RelayProcess(process, log)
        self._processes.append(relay)
        return relay

    async def write(self, until: float | asyncio.Event, *, writers: int = 6, seed: int = 0) -> None:
        """Race until a monotonic time or an event."""
        async with asyncio.TaskGroup() as tasks:
            for number in range(writers):
                tasks.create_task(
                    race(
                        self.url,
                        self.committed,
                        writer=number,
                        until=until,
                        seed=seed,
                        destination=self.address,
                    )
                )

    async def listen(self) -> None:
        """Hear what has come to the broker."""
        self.heard += [_key_and_payload(message.body) for message in await self.wire.heard(self.address)]

    async def verdict(self, *, seconds: float = 60) -> Verdict:
        """Listen until everything committed was heard, then a little longer."""
        deadline = time.monotonic() + seconds
        while True:
            await self.listen()
            found = verdict(self.committed, self.heard)
            if found.lost == 0 or time.monotonic() > deadline:
                return found
            await asyncio.sleep(0.2)

    async def aclose(self) -> None:
        """End every process, frozen ones too."""
        for process in self._processes:
            if process.is_running:
                process.signal(signal.SIGCONT)
                process.signal(signal.SIGKILL)
                await process.exit_code()


def _key_and_payload(body: bytes | None) -> tuple[str, bytes]:
    key, _, payload = (body or b"").partition(b":")
    return key.decode(), payload


@asynccontextmanager
async def site_at(
    wire: WireBroker, db: "asyncpg.Connection[Any]", url: str, directory: Path
) -> AsyncIterator[Site]:
    """Hot rows, an address that is listened to, no relay yet."""
    async with AsyncExitStack() as stack:
        await prepare(db)
        site = Site(url, wire, directory)
        stack.push_async_callback(site.aclose)
        admin = broker_from_url(wire.url).admin()
        await admin.apply([site.address], [], partitions=3)
        await admin.aclose()
        await wire.listen(site.address)
        yield site


@pytest.fixture
async def site(
    db: "asyncpg.Connection[Any]", migrated_url: str, wire: WireBroker, tmp_path: Path
) -> AsyncIterator[Site]:
    """At each broker in turn."""
    async with site_at(wire, db, migrated_url, tmp_path) as site:
        yield site


@asynccontextmanager
async def writing(site: Site) -> AsyncIterator[None]:
    """Race in the background, a little longer than what is done meanwhile."""
    told = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(site.write(told))
        yield
        await asyncio.sleep(0.5)
        told.set()


@pytest.mark.parametrize(
    "point",
    [
        CrashPoint.READ_BEFORE_PUBLISH,
        CrashPoint.PUBLISHED_BEFORE_JOURNAL,
        CrashPoint.JOURNALED_PARTIAL,
        CrashPoint.JOURNALED,
    ],
)
async def test_a_relay_killed_at_any_step_loses_nothing(
    site: Site, db: "asyncpg.Connection[Any]", point: CrashPoint
) -> None:
    """R4: another relay owns the shards within the lease time; duplicates are at most two windows."""
    async with db.transaction():  # more than a window, so that it is read in chunks
        for key in range(1, 21):
            for _ in range(10):
                value = await db.fetchval("update hot set v = v + 1 where id = $1 returning v", key)
                await emit(db, str(key), b"%d:%d" % (key, value), destination=site.address)
                site.committed.append((str(key), value))
    dying = await site.relay(TOWPATH_CRASH_AT=f"{point}:2")
    async with writing(site):
        assert await dying.exit_code() == -signal.SIGKILL
        successor = await site.relay()
        await successor.logged("relay.lease_acquired")
    found = await site.verdict()
    assert (found.lost, found.ghosts, found.inversions) == (0, 0, 0)
    assert found.duplicates <= 100 * (1 + successor.mishaps)


async def test_a_relay_killed_while_it_hands_shards_over_loses_nothing(site: Site) -> None:
    """R4: what it had settled and not released yet goes on elsewhere when its lease is over."""
    dying = await site.relay(TOWPATH_CRASH_AT=CrashPoint.JOURNALED_BEFORE_RELEASE)
    async with writing(site):
        await dying.logged("relay.lease_acquired")
        successor = await site.relay()
        assert await dying.exit_code() == -signal.SIGKILL
        await successor.logged("relay.lease_acquired")
    found = await site.verdict()
    assert (found.lost, found.ghosts, found.inversions) == (0, 0, 0)
    assert found.duplicates <= 100 * (1 + successor.mishaps)


@pytest.mark.parametrize(
    ("point", "rows_left"), [(CrashPoint.CLEARING_SLOT, 20), (CrashPoint.CLEARED_SLOT, 0)]
)
async def test_a_relay_killed_while_it_clears_a_slot_leaves_the_rest_to_the_next(
    site: Site, db: "asyncpg.Connection[Any]", point: CrashPoint, rows_left: int
) -> None:
    """R4, R22: what a slot held was sent and written down, so nothing of it is lost or comes again."""
    rows = "select count(*) from towpath.outbox"
    clearing = {"TOWPATH_RELAY__RETENTION": "300ms", "TOWPATH_RELAY__CANARIES": "false"}
    await db.execute(RING.format(seconds=40))
    await db.execute(TURN.format(slot=0))
    async with db.transaction():
        for key in range(1, 21):
            await emit(db, str(key), b"%d:1" % key, destination=site.address)
            site.committed.append((str(key), 1))
    await db.execute(TURN.format(slot=2))
    dying = await site.relay(TOWPATH_CRASH_AT=point, **clearing)
    assert await dying.exit_code() == -signal.SIGKILL
    assert await db.fetchval(rows) == rows_left
    await db.execute(TURN.format(slot=0))
    await emit(db, "1", b"1:2", destination=site.address)
    site.committed.append(("1", 2))
    await db.execute(TURN.format(slot=2))
    successor = await site.relay(**clearing)
    await successor.logged("relay.lease_acquired")
    deadline = time.monotonic() + 60
    while await db.fetchval(rows):
        assert time.monotonic() < deadline, "the next relay does not clear the slot"
        await asyncio.sleep(0.1)
    found = await site.verdict()
    assert (found.lost, found.ghosts, found.inversions) == (0, 0, 0)
    if dying.mishaps == 0:
        assert found.duplicates == 0


async def test_relays_killed_at_random_lose_and_invert_nothing(site: Site, scale: float) -> None:
    """R4, P2: SIGKILL at any moment, two relays sharing the shards."""
    async with writing(site):
        for round_ in range(max(2, int(2 * scale))):
            relays = [await site.relay(), await site.relay()]
            await relays[0].logged("relay.lease_acquired")
            await asyncio.sleep(1 + round_ * 0.37)
            for relay in relays:
                relay.signal(signal.SIGKILL)
                await relay.exit_code()
        await site.relay()
    found = await site.verdict()
    assert (found.lost, found.ghosts, found.inversions) == (0, 0, 0)


async def until(db: "asyncpg.Connection[Any]", query: str, *given: object) -> None:
    """Wait until a query says true."""
    deadline = time.monotonic() + 60
    while not await db.fetchval(query, *given):
        assert time.monotonic() < deadline, query
        await asyncio.sleep(0.05)


NOTE_JOURNAL_ROWS = """
create table journaled (seq bigint, relay uuid, shard smallint, epoch bigint);
create function note_journal_row() returns trigger language plpgsql as $$
begin
  insert into journaled select new.seq, new.relay, p.* from unnest(new.shards, new.epochs) p;
  return null;
end $$;
create trigger note after insert on towpath.journal for each row execute function note_journal_row();
"""
"""Journal rows are trimmed; these notes of them stay."""


async def test_a_frozen_relay_that_wakes_has_lost_its_shards_and_says_nothing_more(
    site: Site, db: "asyncpg.Connection[Any]"
) -> None:
    """R5: it publishes nothing beyond the write it had begun and journals nothing of what it lost."""
    await db.execute(NOTE_JOURNAL_ROWS)
    frozen = await site.relay()
    await frozen.logged("relay.lease_acquired")
    relay = next(each["relay"] for each in frozen.events() if each["event"] == "relay.lease_acquired")
    async with writing(site):
        await until(db, "select exists (select from journaled where relay = $1::text::uuid)", relay)
        await asyncio.sleep(1)
        frozen.signal(signal.SIGSTOP)
        successor = await site.relay()
        await successor.logged("relay.lease_acquired")
        await until(
            db, "select not exists (select from towpath.shard_lease where relay = $1::text::uuid)", relay
        )
        await db.execute(
            "create table lost as select shard, epoch, (select max(seq) from journaled) as seq "
            "from towpath.shard_lease"
        )
        frozen.signal(signal.SIGCONT)
        await frozen.logged("relay.lease_lost")
    found = await site.verdict()
    assert (found.lost, found.ghosts, found.inversions) == (0, 0, 0)
    assert found.duplicates <= 100 * (1 + successor.mishaps)
    frozen.signal(signal.SIGTERM)
    assert await frozen.exit_code() == 0  # it writes no more
    late = await db.fetch(  # by then it may own shards again, under epochs of its own
        "select j.* from journaled j join lost using (shard) "
        "where j.relay = $1::text::uuid and j.seq > lost.seq and j.epoch <= lost.epoch",
        relay,
    )
    assert late == []


async def test_sigterm_hands_the_shards_over_without_a_duplicate(site: Site) -> None:
    """R5: a released shard starts at once elsewhere, from where it was left."""
    async with writing(site):
        first = await site.relay(**PATIENT)
        await first.logged("relay.lease_acquired")
        await asyncio.sleep(1)
        second = await site.relay(**PATIENT)
        await second.logged("relay.lease_acquired")
        first.signal(signal.SIGTERM)
        assert await first.exit_code() == 0
        third = await site.relay(**PATIENT)
        await third.logged("relay.lease_acquired")
    assert await site.verdict() == Verdict(lost=0, ghosts=0, duplicates=0, inversions=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["kafka", "rabbitmq"])
async def test_a_relay_outlives_a_broker_that_is_killed_under_load(
    name: str,
    request: pytest.FixtureRequest,
    db: "asyncpg.Connection[Any]",
    migrated_url: str,
    tmp_path: Path,
) -> None:
    """R7, R14: the same process publishes again when it is back, nothing lost and each key in order."""
    server: KafkaServer | RabbitServer
    wire: WireBroker
    if name == "kafka":
        server = kafka = request.getfixturevalue("kafka_server")
        wire = KafkaWire(kafka.bootstrap)
    else:
        server = rabbit = request.getfixturevalue("rabbit_server")
        wire = RabbitWire(rabbit.url)
    async with site_at(wire, db, migrated_url, tmp_path) as site:
        relay = await site.relay(TOWPATH_RELAY__CANARIES="false")
        try:
            async with writing(site):
                while not site.heard:  # it publishes
                    assert relay.is_running
                    await site.listen()
                await asyncio.to_thread(server.kill)
                await relay.logged("relay.broker_unavailable")
                await asyncio.to_thread(server.start)
                await relay.logged("relay.broker_recovered", seconds=90)
        finally:
            if not server.is_running:
                server.start()
        found = await site.verdict()
        assert (found.lost, found.ghosts, found.inversions) == (0, 0, 0)
        assert relay.is_running
    assert await db.fetchval("select count(*) from towpath.dead_letter") == 0


async def test_bytes_and_headers_reach_the_broker_unchanged(
    site: Site, db: "asyncpg.Connection[Any]"
) -> None:
    """R17, R26: repeated and binary headers, the stored trace context, empty and NUL bytes."""
    trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    headers = json.dumps([["traceparent", trace], ["bin", {"b64": "/wA="}], ["text", "ä"]])
    await emit(db, "k", b"\x00\xff:1", destination=site.address, headers=headers)
    await emit(db, "k", b"", destination=site.address)
    await site.relay(**PATIENT)
    heard: list[Any] = []
    deadline = time.monotonic() + 60
    while len(heard) < 2:
        assert time.monotonic() < deadline
        heard += await site.wire.heard(site.address)
        await asyncio.sleep(0.1)
    first, second = heard
    assert first.body == b"\x00\xff:1"
    assert second.body == b""
    assert dict(first.headers)["bin"] == b"\xff\x00"
    assert dict(first.headers)["text"] == "ä".encode()
    assert first.header("traceparent") == trace
    assert first.header("ce_type") == "order.placed"


async def test_a_message_too_large_for_the_broker_reaches_the_catalog(
    site: Site, db: "asyncpg.Connection[Any]"
) -> None:
    """R8, R25: its neighbours arrive, and it is never taken for an outage."""
    limit = broker_from_url(site.wire.url).max_message_bytes
    await emit(db, "1", b"1:1", destination=site.address)
    await emit(db, "1", b"1:2" + bytes(limit + 10), destination=site.address)
    await emit(db, "1", b"1:3", destination=site.address)
    site.committed += [("1", 1), ("1", 3)]
    await site.relay(**PATIENT)
    assert await site.verdict() == Verdict(lost=0, ghosts=0, duplicates=0, inversions=0)
    (row,) = await db.fetch("select reason_code, attempts, stage from towpath.dead_letter")
    assert tuple(row) == ("too_large", 1, "publish")


async def test_an_unroutable_message_is_a_failure_and_not_a_silent_loss(
    db: "asyncpg.Connection[Any]", migrated_url: str, rabbit_url: str, tmp_path: Path
) -> None:
    """R9: RabbitMQ returns what no queue is bound for; after the tries it is in the catalog."""
    site = Site(migrated_url, RabbitWire(rabbit_url), tmp_path)
    admin = broker_from_url(rabbit_url).admin()
    await admin.apply([site.address], [], partitions=1)
    await admin.aclose()
    await emit(db, "k", b"1:1", destination=site.address)
    await site.relay()
    deadline = time.monotonic() + 60
    while not (rows := await db.fetch("select reason_code, attempts from towpath.dead_letter")):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.1)
    await site.aclose()
    assert [tuple(row) for row in rows] == [("unroutable", 3)]
