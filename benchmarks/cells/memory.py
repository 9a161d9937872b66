"""Memory of a worker whose handlers are slow while a great many messages wait."""

import asyncio
import time

import asyncpg

from benchmarks.cells.round import Backlog, Round
from benchmarks.drain import TASKS, running, worker, worker_registered
from benchmarks.measure import Sample, tree_rss_mb
from benchmarks.stage import messages, random_keys

_SLEEP_SECONDS = 1.0
_KEYS = 100_000
_OTHER_STATES = "select count(*) from towpath.task where state not in ('SUCCEEDED', 'RUNNING')"


async def idle(round_: Round) -> Sample:
    """Nothing in the topic."""
    topic = round_.stage.fresh_name("idle")
    await round_.stage.topic(topic, topic)
    return await _watch(round_, Backlog(topic, []), round_.size(10, 2))


async def waiting(round_: Round) -> Sample:
    """A million messages of 10 bytes (a sanity pass: 100,000), of which 64 run at once, a second each.

    It ends long before the backlog does, so it is void when what was finished is not among what was
    produced, or when anything ended otherwise.
    """
    stage = round_.stage
    topic = stage.fresh_name("memory")
    await stage.topic(topic, topic)
    backlog = Backlog(topic, messages(round_.size(1_000_000, 100_000), random_keys(_KEYS)))
    await stage.preload(topic, backlog.messages, payload=b"0123456789")
    return await _watch(round_, backlog, round_.size(30, 4))


async def _watch(round_: Round, backlog: Backlog, seconds: int) -> Sample:
    """The highest RSS in so many seconds from the worker's registration."""
    stage = round_.stage
    settings = {
        "TOWPATH_WORKER__CONCURRENCY": "64",
        "TOWPATH_WORKER__MAX_IN_FLIGHT": "1000",
        "TOWPATH_WORKER__DRAIN_TIMEOUT": "2s",
        "BENCHMARK_SLEEP_SECONDS": str(_SLEEP_SECONDS),
    }
    async with stage.database() as url:
        connection = await asyncpg.connect(url)
        programs = {"worker": worker("sleeping", backlog.topic, url, stage, **settings)}
        async with running(programs) as processes:
            await worker_registered(connection)
            began, rss = time.monotonic(), 0.0
            while time.monotonic() - began < seconds and processes["worker"].returncode is None:
                rss = max(rss, tree_rss_mb(processes["worker"].pid))
                await asyncio.sleep(0.1)
            is_alive = processes["worker"].returncode is None
            finished = {row[0] for row in await connection.fetch(TASKS)}
            others = await connection.fetchval(_OTHER_STATES)
        await connection.close()
    strangers = len(finished - set(backlog.ids))
    note = "" if is_alive else "the worker ended; "
    if strangers or others:
        note += f"{strangers} never produced, {others} not succeeded"
    if backlog.messages and not finished:
        note += "nothing finished"
    return Sample(None, {}, rss, None, bool(note), note)
