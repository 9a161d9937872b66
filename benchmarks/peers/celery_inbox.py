"""celery over RabbitMQ: for each message a transaction with INSERT … ON CONFLICT, then acknowledged.

Acknowledged late, without which a killed worker loses messages. Documented for short tasks: a prefork
pool, a large `worker_prefetch_multiplier`, results ignored, no events, gossip, mingling or rate limits.
"""

import psycopg
from celery import Celery

from benchmarks.peers.inbox import BROKER, DATABASE, INSERT, NAME, produced, run

PROCESSES = 4
PREFETCH_MULTIPLIER = 128

app = Celery("peers", broker=BROKER)
app.conf.update(
    task_default_queue=NAME or "orders",
    task_acks_late=True,
    task_ignore_result=True,
    worker_prefetch_multiplier=PREFETCH_MULTIPLIER,
    worker_disable_rate_limits=True,
    worker_send_task_events=False,
    broker_connection_retry_on_startup=True,
)
connections: list[psycopg.Connection] = []


@app.task(name="order")
def order(id_: str) -> None:
    if not connections:
        connections.append(psycopg.connect(DATABASE))
    with connections[0].transaction():
        connections[0].execute(INSERT.format("%s"), (id_,))


def fill() -> int:
    ids = produced()
    with app.producer_or_acquire() as producer:
        for id_ in ids:
            order.apply_async((str(id_),), producer=producer)
    return len(ids)


def work() -> None:
    app.worker_main(
        [
            *("worker", "--pool", "prefork", "--concurrency", str(PROCESSES), "--loglevel", "ERROR"),
            *("--without-gossip", "--without-mingle", "--without-heartbeat"),
        ]
    )


if __name__ == "__main__":
    run(fill, work)
