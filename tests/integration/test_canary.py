"""A secret in a payload, an exception or a URL shows up nowhere but in the payload itself."""

import asyncio
import io
import logging
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import asyncpg
import pydantic
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine

from towpath.app import App
from towpath.backoff import RetryPolicy
from towpath.brokers.factory import broker_from_url
from towpath.brokers.ports import Broker, GroupTopology
from towpath.consumer.engine import Consumer
from towpath.context import Call, Tx
from towpath.messages import RawMessage, event
from towpath.outbox import emit
from towpath.outcomes import Dead, Reject
from towpath.relay.engine import Relay
from towpath.store.database import Database, sqlalchemy_url
from towpath.telemetry.files import line_of
from towpath.telemetry.logging import JsonFormatter

CANARY = "c4n4ry-s3cr3t"
DEADLINE_SECONDS = 60


class Leaky(pydantic.BaseModel):
    """What each message makes its handler do."""

    case: str
    secret: str = CANARY


@event("canary.sql", destination="canary")
class SqlLeak(Leaky):
    """Fails in the database."""


@event("canary.call", destination="canary")
class CallLeak(Leaky):
    """Fails outside."""


@event("canary.shape", destination="canary")
class ShapeLeak(pydantic.BaseModel):
    """Cannot be decoded."""

    amount: int


app = App("canary", ordering="none", retry=RetryPolicy(attempts=2, base="10ms", cap="20ms"))


@app.transactional()
async def into_sql(leak: SqlLeak, tx: Tx) -> Reject | None:
    if leak.case == "reject":
        return Reject("no", f"password={leak.secret}\0")
    statement = {
        "unique": "insert into secret_thing values (:secret), (:secret)",
        "check": "insert into secret_thing values (repeat(:secret, 20))",
        "value": "select (:secret)::text::integer",
    }[leak.case]
    await tx.session.execute(text(statement), {"secret": leak.secret})
    return None


@app.idempotent()
async def outside(leak: CallLeak, call: Call) -> None:
    if leak.case == "url":
        raise ConnectionError(f"cannot reach https://app:{leak.secret}@api.example/x?api_key={leak.secret}")
    if leak.case == "header":
        raise RuntimeError(f"401 for Authorization: Bearer {leak.secret}")
    if leak.case == "dead":
        raise Dead("gone", f"token={leak.secret}")
    if leak.case == "group":
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_fail(leak.secret))
    if leak.case == "cause":
        try:
            raise ValueError(f"secret={leak.secret}")
        except ValueError as error:
            raise RuntimeError("wrapped") from error
    pydantic.TypeAdapter(int).validate_python(leak.secret)


async def _fail(secret: str) -> None:
    raise OSError(f"amqp://u:{secret}@rabbit")


@app.transactional()
async def shaped(leak: ShapeLeak) -> None:
    raise AssertionError(leak)


@pytest.fixture
def logs() -> Iterator[io.StringIO]:
    """Everything any logger says, as the deployables would write it."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    yield stream
    root.removeHandler(handler)
    root.setLevel(level)


@pytest.mark.timeout(180)
async def test_a_secret_stays_in_the_payload(
    migrated_url: str, db: "asyncpg.Connection[Any]", logs: io.StringIO, spans: InMemorySpanExporter
) -> None:
    """X3"""
    await db.execute("create table secret_thing (secret text primary key check (length(secret) < 100))")
    broker = broker_from_url(f"memory://{uuid4()}")
    topology = GroupTopology(app.name, app.destinations)
    await broker.admin().apply(app.destinations, [topology], partitions=1)
    engine = create_async_engine(sqlalchemy_url(migrated_url))
    sql = [SqlLeak(case=case) for case in ("unique", "check", "value", "reject")]
    calls = [CallLeak(case=case) for case in ("url", "header", "dead", "group", "cause", "validation")]
    shape = RawMessage(
        "canary.shape", f'{{"amount": "{CANARY}"}}'.encode(), "canary", None, "application/json"
    )
    try:
        await _run(migrated_url, broker, engine, db, [*sql, *calls, shape])
    finally:
        await engine.dispose()

    states = dict(await db.fetch("select state, count(*) from towpath.task group by 1"))
    assert states == {"DEAD": len(sql) + len(calls), "FAILED": 1}
    stored = await db.fetch(
        """select to_jsonb(t) - 'payload' as row from towpath.task t
           union all select to_jsonb(e) from towpath.task_event e
           union all select to_jsonb(d) - 'payload' from towpath.dead_letter d
           union all select to_jsonb(o) - 'payload' from towpath.outbox o where kind = 'copy'"""
    )
    assert len(stored) > 3 * len(calls)
    assert [row["row"] for row in stored if CANARY in row["row"]] == []
    kept = await db.fetch(
        "select 1 from towpath.dead_letter where position($1::bytea in payload) > 0", CANARY.encode()
    )
    assert len(kept) == states["DEAD"]

    shown = logs.getvalue()
    assert shown.count('"task.died"') == states["DEAD"]
    assert CANARY not in shown
    finished = spans.get_finished_spans()
    assert len(finished) > 2 * len(calls)
    assert [span.name for span in finished if CANARY in span.to_json() + line_of(span)] == []


async def _run(
    url: str, broker: Broker, engine: AsyncEngine, db: "asyncpg.Connection[Any]", payloads: list[object]
) -> None:
    """Commit the messages together and wait until each has ended."""
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(Relay(url, broker).run(stop))
        tasks.create_task(Consumer(app, Database(url), broker).run(stop))
        try:
            async with AsyncSession(engine) as session, session.begin():
                for payload in payloads:
                    emit(session, payload)
            async with asyncio.timeout(DEADLINE_SECONDS):
                while await _unfinished(db, len(payloads)):  # noqa: ASYNC110 - the database is asked
                    await asyncio.sleep(0.05)
        finally:
            stop.set()


async def _unfinished(db: "asyncpg.Connection[Any]", count: int) -> bool:
    ended = await db.fetchval(
        "select count(*) from towpath.task where state in ('DEAD', 'FAILED', 'SUCCEEDED')"
    )
    return bool(ended < count)
