"""A small shop whose transactions emit, for the tests of producing."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import sqlalchemy as sa
from pydantic import BaseModel
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from towpath.messages import event, task
from towpath.store.database import sqlalchemy_url

T = TypeVar("T")

ACCOUNT_DDL = "create table account (id text primary key, version integer not null)"


class Base(DeclarativeBase):
    pass


class Account(Base):
    __tablename__ = "account"

    id: Mapped[str] = mapped_column(primary_key=True)
    version: Mapped[int] = mapped_column(default=0)


@event("order.placed", destination="orders", key="order_id")
class OrderPlaced(BaseModel):
    order_id: str
    amount: int = 1


@event("page.viewed", destination="views")
class PageViewed(msgspec.Struct):
    url: str


@task("payment.charge", group="billing", key="order_id", unique=("order_id",))
@dataclass(frozen=True)
class Charge:
    order_id: str
    amount: int = 1


@task("report.build", group="reports")
class BuildReport(BaseModel):
    name: str


Target = Session | AsyncSession
Work = Callable[[Target, Session], T]
Runner = Callable[..., Awaitable[Any]]
"""`await run(work)` calls `work(target, session)`: what to emit on, and the plain session behind it."""

KINDS = ("sync psycopg", "async psycopg", "async asyncpg")


@asynccontextmanager
async def sessions(kind: str, url: str) -> AsyncIterator[Runner]:
    """Run work on fresh sessions of one kind, all on one engine."""
    flavour, driver = kind.split()
    if flavour == "sync":
        engine = sa.create_engine(sqlalchemy_url(url, driver), pool_size=1, max_overflow=0)

        async def run(work: Work[T], **options: Any) -> T:
            with Session(engine, **options) as session:
                return work(session, session)

        yield run
        engine.dispose()
    else:
        async_engine = create_async_engine(sqlalchemy_url(url, driver), pool_size=1, max_overflow=0)

        async def run_async(work: Work[T], **options: Any) -> T:
            async with AsyncSession(async_engine, **options) as session:
                return await session.run_sync(lambda plain: work(session, plain))

        yield run_async
        await async_engine.dispose()
