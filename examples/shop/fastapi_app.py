"""FastAPI: one transaction for each request, committed before the answer leaves.

DATABASE_URL=postgresql+asyncpg://… uvicorn examples.shop.fastapi_app:app
"""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, TypedDict
from uuid import UUID

from fastapi import Depends, FastAPI, HTTPException, Request
from pydantic import BaseModel
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine

from examples.shop.messages import Charge, OrderPlaced
from towpath import emit, submit, tasks


class State(TypedDict):
    """What lives as long as the process."""

    sessions: async_sessionmaker[AsyncSession]


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncIterator[State]:
    """One engine: its pool belongs to the event loop that serves."""
    engine = create_async_engine(os.environ["DATABASE_URL"])
    yield {"sessions": async_sessionmaker(engine)}
    await engine.dispose()


async def transaction(request: Request) -> AsyncIterator[AsyncSession]:
    """Begins with the request; commits when the endpoint returns, rolls back when it raises."""
    async with request.state.sessions.begin() as session:
        yield session


# scope="function": COMMIT comes before the response. By default it would come behind, and a client would be
# told of an order that a failing COMMIT then takes back.
Transaction = Annotated[AsyncSession, Depends(transaction, scope="function")]

app = FastAPI(lifespan=lifespan)


class Order(BaseModel):
    """What a client sends."""

    id: str
    amount: int


@app.post("/orders", status_code=201)
async def place(order: Order, session: Transaction) -> dict[str, str]:
    """The order, the event and the task exist together, or none of them."""
    await session.execute(text("insert into shop_order values (:id, :amount)"), order.model_dump())
    emit(session, OrderPlaced(order.id, order.amount))
    handle = await submit(session, Charge(order.id, order.amount))
    return {"charge": str(handle.id)}


@app.get("/charges/{charge_id}")
async def charge(charge_id: UUID, session: Transaction) -> dict[str, str]:
    """How far the charge is."""
    found = await tasks.get(session, charge_id, group="billing")
    if found is None:
        raise HTTPException(404)
    return {"state": found.state}
