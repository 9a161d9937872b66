"""pgqueuer: jobs in Postgres, no broker. The job's own row is its state, so the entrypoint does nothing.

Documented for throughput: asyncpg on a direct connection, uvloop and several queue managers (its own
benchmark runs five), batches larger than ten for short jobs, its autovacuum settings; durable tables.
"""

import asyncio

import asyncpg
import uvloop
from pgqueuer import PgQueuer
from pgqueuer.db import AsyncpgDriver
from pgqueuer.models import Job
from pgqueuer.queries import Queries

from benchmarks.peers.inbox import DATABASE, produced, run

MANAGERS = 5
BATCH = 100
_CHUNK = 1000


async def fill() -> int:
    ids = produced()
    connection = await asyncpg.connect(DATABASE)
    queries = Queries(AsyncpgDriver(connection))
    await queries.install()
    await queries.optimize_autovacuum()
    for start in range(0, len(ids), _CHUNK):
        chunk = ids[start : start + _CHUNK]
        jobs = await queries.enqueue(["order"] * len(chunk), [id_.bytes for id_ in chunk], [0] * len(chunk))
        await connection.execute(
            "update public.produced p set job_id = x.job_id"
            "  from unnest($1::uuid[], $2::bigint[]) x(id, job_id) where p.id = x.id",
            chunk,
            jobs,
        )
    await connection.close()
    return len(ids)


async def work() -> None:
    managers = []
    for _ in range(MANAGERS):
        manager = PgQueuer(AsyncpgDriver(await asyncpg.connect(DATABASE)))

        @manager.entrypoint("order")
        async def order(job: Job) -> None: ...

        managers.append(manager)
    await asyncio.gather(*(manager.run(batch_size=BATCH) for manager in managers))


if __name__ == "__main__":
    run(lambda: uvloop.run(fill()), lambda: uvloop.run(work()))
