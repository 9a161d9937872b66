"""What peers share: where they find their servers, and the row that each writes for a message."""

import asyncio
import os
import sys
from collections.abc import Callable, Coroutine
from typing import Any
from uuid import UUID

import psycopg

DATABASE = os.environ.get("PEER_DATABASE", "")
BROKER = os.environ.get("PEER_BROKER", "")
NAME = os.environ.get("PEER_NAME", "")
"""Of a topic or a queue that nobody used before."""
INSERT = "insert into public.inbox (id) values ({}) on conflict do nothing"


def produced() -> list[UUID]:
    """The ids to hand over."""
    with psycopg.connect(DATABASE) as connection:
        return [row[0] for row in connection.execute("select id from public.produced order by id")]


def run(fill: Callable[[], int], work: Callable[[], None]) -> None:
    """`fill` prints how many messages were handed over; `work` runs until it is ended."""
    if sys.argv[1] == "fill":
        print(f'{{"produced": {fill()}}}')
    else:
        work()


def waited(function: Callable[[], Coroutine[Any, Any, Any]]) -> Callable[[], Any]:
    """A coroutine function as a plain one."""
    return lambda: asyncio.run(function())
