"""A traced producer as a process: one span, one transaction, one event and one task that will die.

Prints their ids as JSON.
"""

import asyncio
import json
import os
import sys

from opentelemetry import trace
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from tests.acceptance.apps.messages import declare
from towpath.outbox import emit, submit
from towpath.settings import load
from towpath.store.database import sqlalchemy_url
from towpath.telemetry.setup import setup


async def place(group: str) -> dict[str, str]:
    """The business transaction."""
    step, work, _ = declare(group)
    engine = create_async_engine(sqlalchemy_url(load().database_url.get_secret_value()))
    try:
        with trace.get_tracer("business").start_as_current_span("place order"):
            async with AsyncSession(engine) as session, session.begin():
                event_id = emit(session, step(key="a", n=1, fate="fails_while_caused"))
                handle = await submit(session, work(key="a", n=1, fate="fails_while_caused"))
        return {"step": str(event_id), "work": str(handle.id)}
    finally:
        await engine.dispose()


def main() -> None:
    """Place one order."""
    telemetry = setup("producer")
    try:
        ids = asyncio.run(place(os.environ["TOWPATH_TEST_GROUP"]))
    finally:
        telemetry.shutdown()
    sys.stdout.write(f"{json.dumps(ids)}\n")


if __name__ == "__main__":
    main()
