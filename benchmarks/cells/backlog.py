"""A backlog in Kafka, preloaded so that no relay runs, until its last message is finished."""

import asyncpg

from benchmarks.cells.round import Backlog, Round
from benchmarks.drain import FLOOR_DONE, TASKS, Check, Program, drain, worker
from benchmarks.measure import Sample, difference
from benchmarks.stage import Message, messages

CONCURRENCY = 200
SLEEP_SECONDS = 0.01


async def floor(round_: Round) -> Sample:
    """Batched fetch, one insert of the finished rows, batched acknowledgement."""
    backlog = await round_.backlog("floor", round_.size(100_000, 10_000))
    return await by_floor(round_, backlog, "benchmarks.floor_consumer")


async def by_floor(
    round_: Round, backlog: Backlog, module: str, *arguments: str, check: Check | None = None
) -> Sample:
    """One of the programs written by hand."""
    stage = round_.stage
    async with stage.database() as url:
        program = Program(["-m", module, url, stage.kafka.bootstrap, backlog.topic, *arguments])
        return await drain(stage, url, {"worker": program}, FLOOR_DONE, backlog.ids, check=check)


async def noop(round_: Round) -> Sample:
    """An idempotent handler that does nothing."""
    return await by_worker(round_, await round_.backlog("noop", round_.size(100_000, 5_000)), "noop")


async def batch(round_: Round) -> Sample:
    """A batch handler of 500 with one INSERT of its own."""
    backlog = await round_.backlog("batch", round_.size(100_000, 5_000))

    async def check(connection: asyncpg.Connection) -> str:
        rows = await connection.fetch("select id from public.effect")
        return difference(backlog.ids, [row[0] for row in rows])

    return await by_worker(round_, backlog, "batch", check=check)


async def by_worker(
    round_: Round, backlog: Backlog, app: str, *, check: Check | None = None, **settings: str
) -> Sample:
    """One towpath worker."""
    stage = round_.stage
    async with stage.database() as url:
        programs = {"worker": worker(app, backlog.topic, url, stage, **settings)}
        return await drain(stage, url, programs, TASKS, backlog.ids, check=check)


async def ideal(round_: Round) -> Sample:
    """What 200 sleepers could do, or the machine without sleeping: whichever is less. Runs nothing."""
    bound = await round_.sample(noop)
    rate = min(CONCURRENCY / SLEEP_SECONDS, bound.messages_per_s or 0.0)
    return Sample(rate, {}, None, None, bound.is_void, bound.note)


async def sleeping(round_: Round) -> Sample:
    """A handler that sleeps 10 ms, 200 at once."""
    backlog = await round_.backlog("sleeping", round_.size(100_000, 5_000))
    return await by_worker(
        round_,
        backlog,
        "sleeping",
        TOWPATH_WORKER__CONCURRENCY=str(CONCURRENCY),
        BENCHMARK_SLEEP_SECONDS=str(SLEEP_SECONDS),
    )


async def hot_key(round_: Round) -> Sample:
    """Every message has the same key: one after another."""
    stage = round_.stage
    topic = stage.fresh_name("hot-key")
    await stage.topic(topic, topic)
    made: list[Message] = messages(round_.size(5_000, 300), lambda: "hot")
    await stage.preload(topic, made)
    return await by_worker(round_, Backlog(topic, made), "noop")
