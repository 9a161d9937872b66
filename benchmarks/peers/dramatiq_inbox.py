"""dramatiq over RabbitMQ: for each message a transaction with INSERT … ON CONFLICT, then acknowledged.

One process for each core with eight threads (its defaults), a connection to Postgres for each thread,
`dramatiq_queue_prefetch` raised for short messages, no results, INFO logging off.
"""

import os
import sys
import threading

import dramatiq
import psycopg
from dramatiq.brokers.rabbitmq import RabbitmqBroker

from benchmarks.peers.inbox import BROKER, DATABASE, INSERT, NAME, produced, run

PROCESSES = 2
THREADS = 8
PREFETCH = 500

broker = RabbitmqBroker(url=BROKER)
dramatiq.set_broker(broker)
local = threading.local()


@dramatiq.actor(queue_name=NAME or "orders", max_retries=0)
def order(id_: str) -> None:
    connection = getattr(local, "connection", None)
    if connection is None:
        connection = local.connection = psycopg.connect(DATABASE)
    with connection.transaction():
        connection.execute(INSERT.format("%s"), (id_,))


def fill() -> int:
    ids = produced()
    for id_ in ids:
        order.send(str(id_))
    return len(ids)


def work() -> None:
    os.environ["dramatiq_queue_prefetch"] = str(PREFETCH)  # noqa: SIM112 - its spelling
    os.execv(
        sys.executable,
        [
            *(sys.executable, "-m", "dramatiq", "benchmarks.peers.dramatiq_inbox", "--skip-logging"),
            *("--processes", str(PROCESSES), "--threads", str(THREADS)),
        ],
    )


if __name__ == "__main__":
    run(fill, work)
