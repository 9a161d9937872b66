"""Producing as a user writes it; type-checked, never run."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import assert_type
from uuid import UUID

import asyncpg
import msgspec
import psycopg
from pydantic import BaseModel
from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, async_scoped_session
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, scoped_session

from towpath import Outbox, RawMessage, TaskHandle, TaskId, emit, emit_many, event, send, submit, task, tasks
from towpath.tasks import SyncTaskHandle, Task


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"

    id: Mapped[str] = mapped_column(primary_key=True)


@event("order.placed", destination="orders", key="order_id")
class OrderPlaced(BaseModel):
    order_id: str
    amount: int


@event("page.viewed", destination="views")
class PageViewed(msgspec.Struct):
    url: str


@event("invoice.created", destination="invoices", key="order_id")
@dataclass(frozen=True)
class InvoiceCreated:
    order_id: str


@event("blob.stored", destination="blobs")
class Blob(bytes):
    pass


@task("payment.charge", group="billing", key="order_id", unique=("order_id",))
class Charge(BaseModel):
    order_id: str
    amount: int


assert_type(OrderPlaced, type[OrderPlaced])
assert_type(InvoiceCreated("1").order_id, str)
assert_type(PageViewed(url="/").url, str)
assert_type(Charge(order_id="1", amount=2).amount, int)


async def place(session: AsyncSession, order_id: str, amount: int) -> TaskId:
    async with session.begin():
        session.add(Order(id=order_id))
        emit(session, OrderPlaced(order_id=order_id, amount=amount))
        handle = await submit(
            session, Charge(order_id=order_id, amount=amount), owner="u1", deadline=timedelta(hours=1)
        )
    return handle.id


def place_in_a_thread(session: Session, scoped: scoped_session[Session]) -> None:
    with session.begin():
        assert_type(emit(session, PageViewed(url="/")), UUID)
        assert_type(emit(scoped, InvoiceCreated("1"), key=None, headers={"a": b"b"}, destination="d"), UUID)
        assert_type(
            emit_many(session, [PageViewed(url="/"), Blob(b"x")], headers=[("a", "1"), ("a", "2")]),
            list[UUID],
        )
        assert_type(emit(session, PageViewed(url="/"), delay="90s"), UUID)
        assert_type(send(session, Charge(order_id="1", amount=1)), UUID)
        assert_type(submit(session, Charge(order_id="1", amount=1), deadline="1h"), SyncTaskHandle)
    assert_type(tasks.get(session, UUID(int=1), group="billing"), Task | None)


async def read(
    session: AsyncSession, engine: AsyncEngine, scoped: async_scoped_session[AsyncSession], task_id: UUID
) -> None:
    assert_type(emit(scoped, RawMessage("t", b"", destination="d")), UUID)
    assert_type(await submit(scoped, Charge(order_id="1", amount=1), dedupe_key="k"), TaskHandle)
    assert_type(await tasks.get(session, task_id, group="billing"), Task | None)
    for found in await tasks.list(session, group="billing", owner="u1", limit=10):
        assert_type(found, Task)
    state = await tasks.cancel(session, task_id, group="billing", actor="ann")
    if state is not None:
        assert_type(state.is_final, bool)
    await tasks.result(engine, task_id, group="billing", timeout=timedelta(seconds=5))
    Outbox(schema="other", max_payload_bytes=10).emit(session, PageViewed(url="/"))


async def on_a_connection(connection: asyncpg.Connection) -> None:
    async with connection.transaction():
        await emit(connection, PageViewed(url="/"))
        await emit_many(connection, [PageViewed(url="/")])
        await emit(connection, PageViewed(url="/"), at=datetime(2030, 1, 1, tzinfo=UTC))
        await emit_many(connection, [PageViewed(url="/")], delay=timedelta(days=1))
        await submit(connection, Charge(order_id="1", amount=1), delay="1h")
        handle = await submit(connection, Charge(order_id="1", amount=1))
    await handle.result("10s")


def on_sync_connections(core: Connection, connection: psycopg.Connection[tuple[int]]) -> None:
    assert_type(emit(core, PageViewed(url="/")), UUID)
    assert_type(emit_many(connection, [PageViewed(url="/")]), list[UUID])
    assert_type(send(connection, Charge(order_id="1", amount=1)), UUID)
    handle = submit(connection, Charge(order_id="1", amount=1))
    assert_type(handle, SyncTaskHandle)
    assert_type(tasks.get(core, handle.id, group="billing"), Task | None)


async def on_async_connections(
    core: AsyncConnection, connection: psycopg.AsyncConnection[dict[str, int]]
) -> None:
    assert_type(await emit(core, PageViewed(url="/")), UUID)
    assert_type(await emit_many(connection, [PageViewed(url="/")]), list[UUID])
    assert_type(await submit(core, Charge(order_id="1", amount=1)), TaskHandle)
    handle = await submit(connection, Charge(order_id="1", amount=1))
    assert_type(await tasks.get(connection, handle.id, group="billing"), Task | None)
    await tasks.result(connection, handle.id, group="billing")
