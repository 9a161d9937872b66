"""The trace context at the call goes into the row, and from there to the broker and the consumer."""

from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from tests.integration.shop import Charge, OrderPlaced
from towpath.errors import NoTransaction, PayloadTooLarge
from towpath.messages import load_headers
from towpath.outbox import emit, submit
from towpath.store.database import sqlalchemy_url
from towpath.telemetry.tracing import extract

HEADERS = "select headers::text from towpath.outbox order by id"


async def test_the_row_carries_the_context_of_its_creation(
    db: Any, migrated_url: str, spans: InMemorySpanExporter
) -> None:
    """O4 R17"""
    engine = create_async_engine(sqlalchemy_url(migrated_url))
    tracer = trace.get_tracer("shop")
    async with AsyncSession(engine) as session, session.begin():
        with tracer.start_as_current_span("place order") as span:
            emit(session, OrderPlaced(order_id="a"), headers={"mine": "1"})
            await submit(session, Charge("a"))
    await engine.dispose()

    rows = [load_headers(row[0]) for row in await db.fetch(HEADERS)]
    assert rows[0][0] == ("mine", b"1")
    for headers in rows:
        carried = trace.get_current_span(extract(headers)).get_span_context()
        created = [s for s in spans.get_finished_spans() if s.context.span_id == carried.span_id]
        assert [s.name.split()[0] for s in created] == ["create"]
        assert created[0].parent is not None
        assert created[0].parent.span_id == span.get_span_context().span_id
    stored = await db.fetchrow("select trace, headers::text from towpath.task")
    assert stored["trace"] == dict(rows[1])["traceparent"].decode()
    assert load_headers(stored["headers"]) == rows[1]


async def test_without_tracing_a_context_from_outside_is_passed_on(db: Any) -> None:
    """O4"""
    context = trace.SpanContext(0xA, 0xB, is_remote=True, trace_flags=trace.TraceFlags(1))
    async with db.transaction():
        await emit(db, OrderPlaced(order_id="untraced"))
        with trace.use_span(trace.NonRecordingSpan(context)):
            await emit(db, OrderPlaced(order_id="traced"))

    untraced, traced = [load_headers(row[0]) for row in await db.fetch(HEADERS)]
    assert untraced == ()
    assert traced == (("traceparent", f"00-{0xA:032x}-{0xB:016x}-01".encode()),)


async def test_a_refused_call_leaves_no_span(db: Any, spans: InMemorySpanExporter) -> None:
    with pytest.raises(NoTransaction):
        await emit(db, OrderPlaced(order_id="a"))
    async with db.transaction():
        with pytest.raises(PayloadTooLarge):
            await emit(db, OrderPlaced(order_id="a" * 2_000_000), key="a")

    assert spans.get_finished_spans() == ()
