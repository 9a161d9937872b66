"""A consumer group in this process: an App on real Postgres, fed through the memory broker."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any, Final
from uuid import UUID

import asyncpg
from uuid_utils.compat import uuid7

from towpath.app import App
from towpath.brokers.memory.broker import MemoryBroker
from towpath.brokers.memory.hub import Record
from towpath.brokers.ports import OutboundMessage, dead_letter_address
from towpath.consumer.engine import Consumer
from towpath.consumer.health import Health
from towpath.messages import Envelope, Headers, encode, event, spec_of, task, wire_headers
from towpath.messages.registry import key_of
from towpath.settings import WorkerSettings
from towpath.store.database import Database
from towpath.telemetry.metrics import NO_TELEMETRY, Telemetry

PATIENCE_SECONDS: Final = 60.0
INSTALLATION: Final = "0d9a8a30-7e7c-4b0f-8a58-3f3f1f1f7f10"


@event("parcel.posted", destination="parcels", key="parcel")
@dataclass(frozen=True)
class Posted:
    """What most tests send: `number` tells messages of one key apart."""

    parcel: str
    number: int = 0


@event("parcel.sorted", destination="sorted", key="parcel")
@dataclass(frozen=True)
class Sorted:
    """What handlers emit."""

    parcel: str


@event("note.left", destination="notes")
@dataclass(frozen=True)
class Note:
    """A message without a key."""

    number: int = 0


@task("parcel.weigh", group="depot", key="parcel")
@dataclass(frozen=True)
class Weigh:
    """A task for the group of these tests."""

    parcel: str
    number: int = 0


def depot(**options: Any) -> App:
    """The group of these tests."""
    return App("depot", **options)


def brisk(**changes: Any) -> WorkerSettings:
    """Settings in which nothing waits long, and no lease lapses because the machine is busy."""
    defaults: dict[str, Any] = {
        "lease": timedelta(seconds=30),
        "beat_every": timedelta(milliseconds=200),
        "due_poll_min": timedelta(milliseconds=5),
        "due_poll_max": timedelta(milliseconds=40),
        "reap_every": timedelta(milliseconds=100),
        "drain_timeout": timedelta(seconds=5),
        "concurrency": 16,
    }
    return WorkerSettings(**(defaults | changes))


@dataclass
class Engine:
    """One broker and one database, with as many members as a test starts."""

    app: App
    url: str
    """For looking at the database; members may use another way to it."""
    broker: MemoryBroker
    db: "asyncpg.Connection[Any]"
    settings: WorkerSettings
    _sequence: Any = field(default_factory=lambda: count(1))

    @asynccontextmanager
    async def member(
        self,
        *,
        app: App | None = None,
        url: str | None = None,
        settings: WorkerSettings | None = None,
        telemetry: Telemetry = NO_TELEMETRY,
        session_lease_seconds: float = 30,
        awaits: Callable[[Health], object] = lambda health: health.is_ready,
    ) -> AsyncIterator["Running"]:
        """Start a member, wait until it is ready, stop it at the end, and raise what it raised.

        Its handlers' sessions are bounded as by a lease of `session_lease_seconds`: those of tests are short.
        """
        settings = settings or self.settings
        database = Database(
            url or self.url,
            pool_size=6,
            session_count=settings.sessions,
            lease_seconds=session_lease_seconds,
        )
        consumer = Consumer(app or self.app, database, self.broker, settings, telemetry=telemetry)
        running = Running(consumer, asyncio.Event())
        running.task = asyncio.create_task(consumer.run(running.told))
        try:
            await until(lambda: running.task.done() or bool(awaits(consumer.health)))
            yield running
        finally:
            running.told.set()
            async with asyncio.timeout(PATIENCE_SECONDS):
                await running.task

    async def publish(
        self,
        payload: object,
        *,
        message_id: UUID | None = None,
        body: str = "inline",
        headers: Headers = (),
        times: int = 1,
        address: str | None = None,
    ) -> UUID:
        """What the relay would publish for an event, a sent task, or with `body="row"` a submitted one."""
        spec = spec_of(payload)
        data, content_type = encode(payload)
        id_: UUID = message_id or uuid7()
        sequence = next(self._sequence)
        envelope = Envelope(
            message_id=id_,
            type=spec.type,
            source=f"/towpath/{INSTALLATION}/{spec.destination}",
            occurred_at=datetime.now(UTC),
            content_type=content_type,
            kind=spec.kind,
            body="row" if body == "row" else "inline",
            sequence=sequence,
            installation=INSTALLATION,
            headers=headers,
        )
        value = None if body == "row" else data
        for _ in range(times):
            await self.publish_raw(
                address or spec.destination,
                value,
                wire_headers(envelope),
                key=key_of(spec, payload),
                message_id=id_,
            )
        return id_

    async def publish_raw(
        self,
        address: str,
        value: bytes | None,
        headers: Headers = (),
        *,
        key: str | None = None,
        message_id: UUID | None = None,
    ) -> None:
        """Bytes as they are, as any producer could publish them."""
        message = OutboundMessage(message_id or uuid7(), 0, address, "raw", key, 0, headers, value)
        result = await self.broker.publisher().publish([message], timeout_seconds=5)
        assert {0} == result.acknowledged

    async def publish_bytes(
        self,
        cls: type,
        value: bytes | None,
        *,
        key: str | None = None,
        content_type: str = "application/json",
        message_id: UUID | None = None,
    ) -> UUID:
        """A well-formed envelope of a declared class around any bytes."""
        spec = spec_of(cls)
        id_: UUID = message_id or uuid7()
        envelope = Envelope(
            id_, spec.type, "/elsewhere", datetime.now(UTC), content_type, sequence=next(self._sequence)
        )
        await self.publish_raw(spec.destination, value, wire_headers(envelope), key=key, message_id=id_)
        return id_

    async def submit(self, payload: object, **options: Any) -> UUID:
        """Commit a task and publish its message, as producer and relay would; options are columns."""
        spec = spec_of(payload)
        data, content_type = encode(payload)
        id_: UUID = uuid7()
        columns = {
            "consumer_group": spec.group,
            "id": id_,
            "type": spec.type,
            "kind": "task",
            "source": spec.destination,
            "key": key_of(spec, payload),
            "state": "ACCEPTED",
            "held_by": "broker",
            "payload": data,
            "content_type": content_type,
        } | options
        marks = ", ".join(f"${number}" for number in range(1, len(columns) + 1))
        await self.db.execute(
            f"insert into towpath.task ({', '.join(columns)}) values ({marks})", *columns.values()
        )
        return await self.publish(payload, message_id=id_, body="row")

    async def submit_due(self, payload: object) -> UUID:
        """An event that waits in the database and is due now."""
        spec = spec_of(payload)
        data, content_type = encode(payload)
        id_: UUID = uuid7()
        await self.db.execute(
            "insert into towpath.task (consumer_group, id, type, kind, source, key, lane, state, held_by,"
            " due_at, waiting_for, payload, content_type) values ($1, $2, $3, 'event', $4, $5, $5, 'WAITING',"
            " 'database', towpath.clock(), 'retry', $6, $7)",
            self.app.name,
            id_,
            spec.type,
            spec.destination,
            key_of(spec, payload),
            data,
            content_type,
        )
        return id_

    async def row(self, message_id: UUID) -> Any:
        """The task's row, or None."""
        return await self.db.fetchrow(
            "select * from towpath.task where consumer_group = $1 and id = $2", self.app.name, message_id
        )

    async def state(self, message_id: UUID) -> str | None:
        """The task's state, or None."""
        row = await self.row(message_id)
        return None if row is None else row["state"]

    async def reaches(self, message_id: UUID, *states: str) -> Any:
        """Wait until the task is in one of the states; its row."""
        last: Any = None

        async def is_there() -> bool:
            nonlocal last
            last = await self.row(message_id)
            return last is not None and last["state"] in states

        await until(is_there, told=lambda: f"{message_id} is not {states}: {dict(last) if last else None}")
        return last

    async def events(self, message_id: UUID) -> list[Any]:
        """The task's history."""
        return await self.db.fetch(
            "select * from towpath.task_event where consumer_group = $1 and task_id = $2 order by seq",
            self.app.name,
            message_id,
        )

    async def outbox(self, kind: str = "event") -> list[Any]:
        """Rows of the outbox in their order."""
        return await self.db.fetch("select * from towpath.outbox where kind = $1 order by id", kind)

    async def letters(self) -> list[Any]:
        """The dead-letter catalog, oldest first."""
        return await self.db.fetch("select * from towpath.dead_letter order by id")

    async def gates(self) -> int:
        """How many lanes are gated."""
        return int(await self.db.fetchval("select count(*) from towpath.key_gate"))

    def unacknowledged(self, address: str = "parcels") -> int:
        """Messages of an address that the group has not acknowledged."""
        hub = self.broker.hub
        committed = hub.group(self.app.name).committed
        return sum(len(hub.log(each)) - committed.get(each, 0) for each in hub.partitions(address))

    async def is_drained(self, *addresses: str) -> None:
        """Wait until everything is acknowledged."""
        await until(lambda: not any(self.unacknowledged(each) for each in addresses or ("parcels",)))

    def copies(self, address: str = "parcels") -> Sequence[Record]:
        """What is in the broker's dead-letter queue."""
        return self.broker.hub.records(dead_letter_address(self.app.name, address))


@dataclass
class Running:
    """A started member."""

    consumer: Consumer
    told: asyncio.Event
    task: "asyncio.Task[None]" = field(init=False)

    async def stop(self) -> None:
        """As SIGTERM would."""
        self.told.set()
        async with asyncio.timeout(PATIENCE_SECONDS):
            await self.task


async def until(
    condition: Callable[[], bool | Awaitable[bool]],
    *,
    seconds: float = PATIENCE_SECONDS,
    told: Callable[[], str] = lambda: "it did not become true",
) -> None:
    """Wait for a condition. Raises AssertionError after the time."""
    deadline = time.monotonic() + seconds
    while True:
        found = condition()
        if found if isinstance(found, bool) else await found:
            return
        assert time.monotonic() < deadline, told()
        await asyncio.sleep(0.005)


@asynccontextmanager
async def bench(app: App, url: str, **settings: Any) -> AsyncIterator[Engine]:
    """A broker and a look at the database, without a member."""
    db = await asyncpg.connect(url, timeout=30)
    try:
        yield Engine(app, url, MemoryBroker(f"memory://{uuid7()}"), db, brisk(**settings))
    finally:
        await db.close(timeout=30)


@asynccontextmanager
async def running(app: App, url: str, **settings: Any) -> AsyncIterator[Engine]:
    """The same with one member."""
    async with bench(app, url, **settings) as engine, engine.member():
        yield engine


EFFECTS: Final = "create table public.effect (n bigserial primary key, parcel text, number int, note text)"


async def effects(engine: Engine) -> list[tuple[str, int]]:
    """What transactional handlers of a test wrote, in their order."""
    rows = await engine.db.fetch("select parcel, number from public.effect order by n")
    return [(row["parcel"], row["number"]) for row in rows]
