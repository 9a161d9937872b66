"""A producer that kills itself, or waits to be killed: run with a URL, how it produces, and where it dies."""

import asyncio
import itertools
import os
import signal
import sys

import asyncpg
from sqlalchemy import create_engine, event
from sqlalchemy.orm import Session

from tests.integration.shop import Account, OrderPlaced
from towpath.outbox import emit
from towpath.store.database import sqlalchemy_url


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def with_session(url: str, where: str) -> None:
    with Session(create_engine(sqlalchemy_url(url, "psycopg"))) as session:
        for number in itertools.count():
            with session.begin():
                session.add(Account(id=str(number)))
                emit(session, OrderPlaced(order_id=str(number)))
                if number == 3:
                    if where == "before COMMIT":  # behind our own listener, so the row is inserted
                        event.listen(session.connection(), "commit", lambda _: die())
                    elif where == "after COMMIT":
                        event.listen(session, "after_commit", lambda _: die())
            if number == 1:
                print("producing", flush=True)


async def with_connection(url: str, where: str) -> None:
    connection = await asyncpg.connect(url)
    for number in range(5):
        async with connection.transaction():
            await connection.execute("insert into account values ($1, 0)", str(number))
            await emit(connection, OrderPlaced(order_id=str(number)))
            if number == 3 and where == "before COMMIT":
                die()
        if number == 3:
            die()


if __name__ == "__main__":
    url, how, where = sys.argv[1:]
    if how == "asyncpg":
        asyncio.run(with_connection(url, where))
    else:
        with_session(url, where)
