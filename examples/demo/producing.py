"""The producing service: concurrent writers that change business rows and write messages with them.

    python -m examples.demo.producing --promises promises.json

It knows Postgres and towpath, and no broker. What a transaction meant to do is written down only
after its COMMIT or ROLLBACK, so the promises are an account of their own.
"""

import argparse
import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from uuid import UUID

from opentelemetry import trace
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine

from consumers.groups.agents.messages import AgentTask, ModelCall, Retrieval, ToolCall
from consumers.groups.orders.messages import OrderChanged
from examples.demo import promises
from examples.demo.promises import AGENTS, ORDERS, Promise, Promises
from examples.demo.script import FAULTY, OUTAGE, Act, AgentStep, OrderStep, Transaction, write_script
from towpath.outbox import emit, submit
from towpath.settings import load
from towpath.store.database import sqlalchemy_url
from towpath.telemetry.setup import setup

WRITER_COUNT: Final = 6

_tracer = trace.get_tracer("shop")
_NEXT_AGENT_STEP: Final = text("""
    insert into shop_agent as a (agent_id, steps) values (:key, 1)
    on conflict (agent_id) do update set steps = a.steps + 1 returning steps
""")
_NEXT_ORDER_STEP: Final = text("""
    insert into shop_order as o (order_id, steps) values (:key, 1)
    on conflict (order_id) do update set steps = o.steps + 1 returning steps
""")


class ChangedMind(Exception):
    """Why a transaction is rolled back."""


@dataclass(slots=True)
class Producer:
    """Carries out a script with several writers at once."""

    sessions: async_sessionmaker[AsyncSession]
    transactions: Iterator[Transaction]
    made: list[Promise] = field(default_factory=list)
    transaction_count: int = 0
    rolled_back_count: int = 0
    savepoint_count: int = 0
    repeat_count: int = 0

    async def run(self) -> None:
        """Until the script is done; the first error ends it."""
        async with asyncio.TaskGroup() as writers:
            for _ in range(WRITER_COUNT):
                writers.create_task(self._write())

    async def _write(self) -> None:
        for transaction in self.transactions:
            with _tracer.start_as_current_span("business transaction"):
                written = await self._carry_out(transaction)
            if transaction.has_repeat:
                with _tracer.start_as_current_span("repeated request"):
                    await self._repeat(transaction.acts[0], written[0])

    async def _carry_out(self, transaction: Transaction) -> list[Promise]:
        """What was committed; nothing after a rollback."""
        written: list[Promise] = []
        given_up: list[Promise] = []
        self.transaction_count += 1
        async with self.sessions() as session:
            try:
                async with session.begin():
                    written += [await _perform(session, act) for act in transaction.acts]
                    if transaction.ending == "savepoint":
                        given_up = await self._give_up(session, transaction.given_up)
                    if transaction.ending == "rollback":
                        raise ChangedMind
            except ChangedMind:
                self.rolled_back_count += 1
                self.made += [_never(promise) for promise in written]
                return []
        self.made += written + [_never(promise) for promise in given_up]
        return written

    async def _give_up(self, session: AsyncSession, acts: tuple[Act, ...]) -> list[Promise]:
        self.savepoint_count += 1
        savepoint = await session.begin_nested()
        written = [await _perform(session, act) for act in acts]
        await savepoint.rollback()
        return written

    async def _repeat(self, act: Act, first: Promise) -> None:
        """A client that lost the answer asks again: the same task."""
        assert isinstance(act, AgentStep)
        async with self.sessions() as session, session.begin():
            handle = await submit(session, _task(act, first.step))
        if handle.created or handle.id != first.message_id:
            raise AssertionError(f"a repeated submit made another task: {handle.id} after {first.message_id}")
        self.repeat_count += 1


async def _perform(session: AsyncSession, act: Act) -> Promise:
    """Lock and change the business row first, then write the message: commit order is message order."""
    if isinstance(act, AgentStep):
        step: int = (await session.execute(_NEXT_AGENT_STEP, {"key": act.key})).scalar_one()
        handle = await submit(session, _task(act, step))
        return Promise(handle.id, AGENTS, act.key, step, act.scene, is_committed=True)
    step = (await session.execute(_NEXT_ORDER_STEP, {"key": act.key})).scalar_one()
    event = _event(act, step)
    message_id = emit(session, event)
    assert isinstance(message_id, UUID)
    invoice = act.amount_cents if event.status == "paid" and act.scene != "rejected" else None
    return Promise(message_id, ORDERS, act.key, step, act.scene, is_committed=True, invoice_cents=invoice)


def _task(act: AgentStep, step: int) -> AgentTask:
    subject = f"{act.key}, step {step}"
    match act.kind:
        case "model_call":
            return ModelCall(agent_id=act.key, step=step, prompt=subject, script=act.script)
        case "retrieval":
            collection = FAULTY if act.scene == "exhausted" else "docs"
            return Retrieval(act.key, step, subject, collection, act.script)
        case "tool_call":
            tool = OUTAGE if act.scene == "outage" else "calculator"
            return ToolCall(act.key, step, tool, subject, act.script)


def _event(act: OrderStep, step: int) -> OrderChanged:
    return OrderChanged(
        order_id=act.key,
        position=step,
        status="placed" if step == 1 else "paid" if step == 2 else "shipped",
        amount=act.amount_cents,
        failing_attempts=act.failing_attempts,
    )


def _never(promise: Promise) -> Promise:
    return Promise(promise.message_id, promise.group, promise.key, promise.step, promise.scene, False)


async def produce(database_url: str, seed: int) -> Promises:
    """Everything in the script, against the database at the URL."""
    engine = create_async_engine(sqlalchemy_url(database_url), pool_size=WRITER_COUNT)
    began = time.monotonic()
    try:
        producer = Producer(async_sessionmaker(engine), iter(write_script(seed)))
        await producer.run()
    finally:
        await engine.dispose()
    return Promises(
        tuple(producer.made),
        transaction_count=producer.transaction_count,
        rolled_back_count=producer.rolled_back_count,
        savepoint_count=producer.savepoint_count,
        repeat_count=producer.repeat_count,
        seconds=time.monotonic() - began,
    )


def main() -> None:
    """Produce, and leave the promises in a file."""
    parser = argparse.ArgumentParser(description="Commit 200 agent tasks and 300 order events.")
    parser.add_argument("--promises", type=Path, help="where to write down what was promised")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    settings = load()
    telemetry = setup("shop", traces_file=settings.telemetry.traces_file)
    try:
        made = asyncio.run(produce(settings.database_url.get_secret_value(), options.seed))
    finally:
        telemetry.shutdown()
    if options.promises is not None:
        promises.write(options.promises, made)
    print(
        f"committed {len(made.committed)} messages in {made.transaction_count - made.rolled_back_count} "
        f"transactions, rolled back {made.rolled_back_count}, in {made.seconds:.1f} s"
    )


if __name__ == "__main__":
    main()
