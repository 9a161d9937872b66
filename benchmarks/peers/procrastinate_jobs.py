"""procrastinate: jobs in Postgres, no broker. The job's own row is its state, so the task does nothing.

Documented for throughput: asynchronous tasks, `concurrency` above one, a pool as large, several
workers. A worker fetches one job per statement, hence two workers of 20.
"""

import logging

from procrastinate import App, PsycopgConnector

from benchmarks.peers.inbox import DATABASE, produced, run, waited

CONCURRENCY = 20
_CHUNK = 1000

logging.getLogger("procrastinate").setLevel(logging.ERROR)
app = App(connector=PsycopgConnector(conninfo=DATABASE, min_size=CONCURRENCY, max_size=CONCURRENCY + 2))


@app.task(name="order")
async def order(id: str) -> None: ...  # noqa: A002 - stored under this name


async def fill() -> int:
    ids = produced()
    async with app.open_async():
        await app.schema_manager.apply_schema_async()
        for start in range(0, len(ids), _CHUNK):
            await order.batch_defer_async(*({"id": str(id_)} for id_ in ids[start : start + _CHUNK]))
    return len(ids)


async def work() -> None:
    async with app.open_async():
        await app.run_worker_async(concurrency=CONCURRENCY, delete_jobs="never")


if __name__ == "__main__":
    run(waited(fill), waited(work))
