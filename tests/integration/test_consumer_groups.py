"""The groups of `consumers/` from commit to effect, and one trace all along: Postgres, memory broker."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import pytest
import pytest_asyncio
from opentelemetry import trace
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine

from consumers.__main__ import business_schema
from consumers.groups.agents.app import app as agents
from consumers.groups.agents.messages import ModelCall, Retrieval, ToolCall
from consumers.groups.agents.provider import Provider
from consumers.groups.orders.app import app as orders
from consumers.groups.orders.messages import OrderChanged
from towpath.brokers.factory import broker_from_url
from towpath.brokers.ports import GroupTopology, dead_letter_address
from towpath.consumer.engine import Consumer
from towpath.deadletters.criteria import Filter
from towpath.deadletters.plan import make_plan
from towpath.deadletters.replay import carry_out
from towpath.outbox import emit, submit
from towpath.relay.engine import Relay
from towpath.store.database import Database, sqlalchemy_url
from towpath.telemetry.context import trace_id_of

DEADLINE_SECONDS = 60
FINAL = "('SUCCEEDED', 'FAILED', 'DEAD', 'CANCELLED', 'EXPIRED')"
CANARY = "c4n4ry-s3cr3t"

pytestmark = pytest.mark.timeout(180)


@dataclass
class Running:
    db: "asyncpg.Connection[Any]"
    engine: AsyncEngine

    async def submit(self, *tasks: object) -> list[UUID]:
        async with AsyncSession(self.engine) as session, session.begin():
            return [(await submit(session, task)).id for task in tasks]

    async def emit(self, *events: object) -> list[UUID]:
        async with AsyncSession(self.engine) as session, session.begin():
            return [emit(session, event) for event in events]

    async def states(self, ids: list[UUID]) -> list[str]:
        """Where each message ended, in the order given."""
        try:
            await until(lambda: self._all_final(ids))
        except TimeoutError:
            columns = "type, key, state, attempt, deliveries, due_at, waiting_for, reason_code, error_message"
            raise AssertionError(await self.db.fetch(f"select {columns} from towpath.task")) from None
        rows = await self.db.fetch("select id, state from towpath.task where id = any($1)", ids)
        found = {row["id"]: row["state"] for row in rows}
        return [found[message_id] for message_id in ids]

    async def _all_final(self, ids: list[UUID]) -> bool:
        count = await self.db.fetchval(
            f"select count(*) from towpath.task where id = any($1) and state in {FINAL}", ids
        )
        return bool(count == len(ids))

    async def row(self, message_id: UUID) -> asyncpg.Record:
        row = await self.db.fetchrow("select * from towpath.task where id = $1", message_id)
        assert row is not None
        return row


async def until(is_true: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(DEADLINE_SECONDS):
        while not await is_true():  # noqa: ASYNC110 - the database is asked
            await asyncio.sleep(0.05)


@pytest_asyncio.fixture
async def running(
    migrated_url: str, db: "asyncpg.Connection[Any]", monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Running]:
    monkeypatch.setenv("TOWPATH_DATABASE_URL", migrated_url)
    for group in ("agents", "orders"):
        await db.execute(business_schema(group))
        await db.execute(business_schema(group))  # it can be run again
    broker = broker_from_url(f"memory://{uuid4()}")
    topologies = [GroupTopology(app.name, app.destinations) for app in (agents, orders)]
    addresses = sorted({address for topology in topologies for address in topology.addresses})
    await broker.admin().apply(addresses, topologies, partitions=2)
    stop = asyncio.Event()
    engine = create_async_engine(sqlalchemy_url(migrated_url))
    async with _disposed(engine), asyncio.TaskGroup() as tasks:
        tasks.create_task(Relay(migrated_url, broker).run(stop))
        for app in (agents, orders):
            tasks.create_task(Consumer(app, Database(migrated_url), broker).run(stop))
        try:
            yield Running(db, engine)
        finally:
            stop.set()


@asynccontextmanager
async def _disposed(engine: AsyncEngine) -> AsyncIterator[None]:
    try:
        yield
    finally:
        await engine.dispose()


@pytest.mark.parametrize("app", [agents, orders], ids=lambda app: app.name)
def test_a_group_is_declared_without_problems(app: Any) -> None:
    assert app.problems() == []


async def test_agent_steps_end_as_their_scripts_say_each_effect_once(running: Running) -> None:
    """C4, C10"""
    ids = await running.submit(
        ModelCall(agent_id="a", step=1, prompt="hello", script=("timeout", "error")),
        Retrieval(agent_id="a", step=2, query="q", script=("rate_limit",)),
        ToolCall(agent_id="a", step=3, tool="mail", script=("refuse",)),
        ToolCall(agent_id="a", step=4, tool="mail", script=("bad_request",)),
        ToolCall(agent_id="a", step=5, tool="mail"),
    )
    assert await running.states(ids) == ["SUCCEEDED", "SUCCEEDED", "FAILED", "DEAD", "SUCCEEDED"]
    rows = [await running.row(message_id) for message_id in ids]
    assert [row["attempt"] for row in rows] == [3, 2, 1, 1, 1]
    assert [row["reason_code"] for row in rows[2:4]] == ["provider_refused", "http_400"]
    effects = await running.db.fetch("select message_id, step, attempt from agent_effect order by id")
    assert [effect["message_id"] for effect in effects] == [ids[0], ids[1], ids[4]]
    assert [effect["step"] for effect in effects] == [1, 2, 5]
    assert [effect["attempt"] for effect in effects] == [3, 2, 1]


async def test_orders_are_projected_billed_and_rejected(running: Running) -> None:
    """C6"""
    ids = await running.emit(
        OrderChanged(order_id="o", position=1, status="placed", amount=500, failing_attempts=1),
        OrderChanged(order_id="o", position=2, status="paid", amount=500),
        OrderChanged(order_id="o", position=3, status="shipped", amount=0),
    )
    assert await running.states(ids) == ["SUCCEEDED", "SUCCEEDED", "FAILED"]
    assert (await running.row(ids[2]))["reason_code"] == "bad_amount"
    await until(lambda: running.db.fetchval("select count(*) = 1 from invoice"))
    steps = await running.db.fetch("select position from order_effect order by id")
    assert [step["position"] for step in steps] == [1, 2]
    projection = await running.db.fetchrow("select status, amount from order_projection")
    assert projection is not None
    assert tuple(projection) == ("paid", 500)


async def test_an_outage_kills_and_a_replay_heals_within_one_trace(
    running: Running, spans: InMemorySpanExporter
) -> None:
    """O4, X3"""
    await running.db.execute("insert into provider_status (provider, is_up) values ('search:archive', false)")
    with trace.get_tracer("shop").start_as_current_span("checkout") as business:
        (message_id,) = await running.submit(
            Retrieval(agent_id="b", step=1, collection="archive", query=f"password={CANARY}")
        )
    trace_id = trace.format_trace_id(business.get_span_context().trace_id)
    assert await running.states([message_id]) == ["DEAD"]
    letter = await running.db.fetchrow("select * from towpath.dead_letter where message_id = $1", message_id)
    assert letter is not None
    assert trace_id_of(letter["trace"]) == trace_id
    assert trace_id_of((await running.row(message_id))["trace"]) == trace_id

    await running.db.execute("update provider_status set is_up = true")
    plan = await make_plan(running.db, Filter(groups=("agents",)))
    _, counts = await carry_out(running.db, plan, actor="ann", reason="the archive is back")
    assert counts.done == 1
    assert await running.states([message_id]) == ["SUCCEEDED"]
    assert await running.db.fetchval("select count(*) from agent_effect") == 1

    attempts = agents.handlers["agent.retrieval"].retry.attempts
    await until(lambda: _async(_process_count(spans, message_id) == attempts + 1))
    copy_sent = f"send {dead_letter_address('agents', 'tasks.agents')}"
    mine = [span for span in spans.get_finished_spans() if _message(span) == str(message_id)]
    assert [span.name.partition(" ")[0] for span in mine] == [
        "create",
        *["process"] * attempts,
        "replay",
        "process",
    ]
    assert {trace.format_trace_id(span.context.trace_id) for span in mine if span.context} == {trace_id}
    create = mine[0].context
    assert create is not None
    assert {span.parent.span_id for span in mine[1:] if span.parent} == {create.span_id}
    # The message and its dead letter's copy; a window with several destinations names none of them.
    await until(lambda: _async(len(_linked_to(spans, create.span_id)) == 2))
    assert set(_linked_to(spans, create.span_id)) <= {"send", "send tasks.agents", copy_sent}
    triggers = [(span.attributes or {}).get("towpath.trigger") for span in mine[1:]]
    assert triggers == ["broker", *["retry"] * (attempts - 1), None, "replay"]
    assert all(CANARY not in span.to_json() for span in spans.get_finished_spans())


async def _async(value: bool) -> bool:
    return value


def _message(span: Any) -> object:
    return (span.attributes or {}).get("messaging.message.id")


def _linked_to(spans: InMemorySpanExporter, span_id: int) -> list[str]:
    finished = spans.get_finished_spans()
    return [span.name for span in finished if span_id in {link.context.span_id for link in span.links}]


def _process_count(spans: InMemorySpanExporter, message_id: UUID) -> int:
    finished = spans.get_finished_spans()
    return sum(_message(span) == str(message_id) and span.name.startswith("process") for span in finished)


async def test_a_provider_forgets_nothing_and_answers_the_same_key_alike(
    database_url: str,
) -> None:
    connection = await asyncpg.connect(database_url)
    await connection.execute(business_schema("agents"))
    engine = create_async_engine(sqlalchemy_url(database_url), isolation_level="AUTOCOMMIT")
    provider = Provider(engine)
    with pytest.raises(TimeoutError):
        await provider.ask("model:small", "hi", key="k", script=("timeout",))
    first = await provider.ask("model:small", "hi", key="k", script=("timeout",))
    assert first == await provider.ask("model:small", "hi", key="k")
    await connection.execute("insert into provider_status (provider, is_up) values ('model:small', false)")
    with pytest.raises(ConnectionError, match="model:small cannot be reached"):
        await provider.ask("model:small", "hi", key="k")
    assert await connection.fetchval("select calls from provider_call where idempotency_key = 'k'") == 4
    with pytest.raises(ValueError, match="unknown step 'dance'"):
        await provider.ask("model:large", "hi", key="other", script=("dance",))
    await connection.close()
    await engine.dispose()
