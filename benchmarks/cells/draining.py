"""A backlog of an outbox to Kafka, by the relay in several situations, by the floor, by other libraries."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import asyncpg

from benchmarks.cells.peers import python_of_peers
from benchmarks.cells.round import Round, Trial
from benchmarks.drain import DEADLINE_SECONDS, Program, running
from benchmarks.filling import FASTSTREAM, OUTBOX, TXOUTBOX, Rows, fill, settle
from benchmarks.measure import Sample, tree_rss_mb
from benchmarks.relaying import Around, Subject, Waiting, drain, floor, move, relay
from benchmarks.stage import Stage

_ELSEWHERE = "elsewhere"
"""A destination whose rows are not measured."""
_OWNED = "select relay, count(*) from towpath.shard_lease where relay is not null group by relay"
_SHARDS = 16


def _size(round_: Round) -> int:
    return round_.size(300_000, 500)


async def floor_2000(round_: Round) -> Sample:
    """The floor with large batches."""
    return await drain(round_.stage, floor(2000), _size(round_))


async def floor_500(round_: Round) -> Sample:
    """The floor with batches of 500."""
    return await drain(round_.stage, floor(500), _size(round_))


async def relayed(round_: Round) -> Sample:
    """The relay with nothing else going on."""
    return await _beside_idle(round_, await drain(round_.stage, relay(), _size(round_)))


async def idle(round_: Round) -> Sample:
    """The highest RSS of a relay that has all shards and nothing to do."""
    stage = round_.stage
    async with stage.database() as url:
        connection = await asyncpg.connect(url)
        async with running({"relay": relay().program(stage, url, "")}) as processes:
            await _shared(connection, 1)
            rss = 0.0
            for _ in range(round_.size(30, 5)):
                rss = max(rss, tree_rss_mb(processes["relay"].pid))
                await asyncio.sleep(0.1)
        await connection.close()
    return Sample(None, {}, rss, None, is_void=False)


async def _beside_idle(round_: Round, sample: Sample) -> Sample:
    return replace(sample, idle_rss_mb=(await round_.sample(idle)).rss_mb)


async def large(round_: Round) -> Sample:
    """Five million rows wait when the relay starts."""
    count = round_.size(5_000_000, 500)
    return await _beside_idle(round_, await drain(round_.stage, relay(), count))


async def one_transaction(round_: Round) -> Sample:
    """A million rows of one transaction."""
    count = round_.size(1_000_000, 500)
    return await _beside_idle(round_, await drain(round_.stage, relay(), count, rows_each=count))


async def retained(round_: Round) -> Sample:
    """Behind ten million rows that were sent before and are kept."""
    stage, count = round_.stage, round_.size(10_000_000, 300_000)

    async def make(url: str) -> None:
        connection = await asyncpg.connect(url, command_timeout=3 * DEADLINE_SECONDS)
        await fill(connection, OUTBOX, _ELSEWHERE, count, rows_each=1000)
        await connection.close()
        await _pass_over(url)

    url = await stage.kept("retained", make)
    return await drain(stage, relay(), _size(round_), url=url)


async def _pass_over(url: str) -> None:
    """As if all rows there are had been sent."""
    rebase = ["-m", "towpath.cli", "outbox", "rebase", "--to", "now", "--yes", "--reason", "sent before"]
    process = await Program(rebase, {"TOWPATH_DATABASE_URL": url}).start()
    if await process.wait():
        raise RuntimeError(f"rebase ended with {process.returncode}")


_CLEARED = "truncate table towpath.outbox"
_DELETED = "delete from towpath.outbox"


async def churned(round_: Round) -> Sample:
    """Half a million rows were sent before and cleared as the ring clears them, and vacuum could follow."""
    return await drain(round_.stage, relay(), _size(round_), around=_churn(round_, _CLEARED))


async def held(round_: Round) -> Sample:
    """The same, but an idle transaction holds the horizon from before the first row to the last record."""
    return await _held(round_, _CLEARED)


async def held_and_deleted(round_: Round) -> Sample:
    """Likewise, but the rows were deleted, as those of a straggler are, and stay dead in the table."""
    return await _held(round_, _DELETED)


async def _held(round_: Round, clear: str) -> Sample:
    churn = _churn(round_, clear)

    @asynccontextmanager
    async def around(url: str, topic: str) -> AsyncIterator[None]:
        holder = await asyncpg.connect(url)
        async with holder.transaction(isolation="repeatable_read"):
            await holder.execute("select 1 from towpath.meta")
            async with churn(url, topic):
                yield
        await holder.close()

    return await drain(round_.stage, relay(), _size(round_), around=around)


def _churn(round_: Round, clear: str) -> Around:
    count = round_.size(500_000, 1_000)

    @asynccontextmanager
    async def churn(url: str, _topic: str) -> AsyncIterator[None]:
        if (await drain(round_.stage, relay(), count, url=url)).is_void:
            raise RuntimeError("not all of the rows before were sent")
        connection = await asyncpg.connect(url, command_timeout=DEADLINE_SECONDS)
        await connection.execute(clear)
        await settle(connection)
        await connection.close()
        yield

    return churn


def several(relays: int) -> Trial:
    """So many relays, which have shared the shards before all rows are committed at one moment."""

    async def trial(round_: Round) -> Sample:
        stage = round_.stage
        topic, transaction_count = stage.fresh_name("shared"), round_.size(100, 10)
        await stage.topic(topic)

        async with (
            stage.database() as url,
            asyncpg.create_pool(url, max_size=transaction_count) as pool,
            AsyncExitStack() as stack,
        ):
            rows_each = _size(round_) // transaction_count

            async def wait() -> Waiting:
                async with pool.acquire() as connection:
                    await _shared(connection, relays)
                transactions, ids = [], []
                for _ in range(transaction_count):
                    connection = await stack.enter_async_context(pool.acquire())
                    transactions.append(connection.transaction())
                    await transactions[-1].start()
                    await connection.execute(OUTBOX.insert(), topic, None, None, rows_each)
                    ids += [row[0] for row in await connection.fetch(OUTBOX.select_ids(topic))]
                return ids, lambda: asyncio.gather(*(each.commit() for each in transactions))

            program = relay().program(stage, url, topic)
            programs = {f"relay {number}": program for number in range(1, relays + 1)}
            return await move(stage, url, topic, programs, wait)

    return trial


async def _shared(connection: "asyncpg.Connection[Any]", relays: int) -> None:
    """Wait until each has its part of the shards."""
    async with asyncio.timeout(60):
        while True:
            owned = [row[1] for row in await connection.fetch(_OWNED)]
            if len(owned) == relays and sum(owned) == _SHARDS and max(owned) <= -(-_SHARDS // relays):
                return
            await asyncio.sleep(0.1)


RELAYS = {count: several(count) for count in (1, 2, 4)}


def _peer(module: str, rows: Rows, *, is_tuned: bool) -> Subject:
    def environment(url: str, kafka: str, topic: str) -> dict[str, str]:
        return {
            "PEER_DATABASE": url,
            "PEER_BROKER": kafka,
            "PEER_NAME": topic,
            "PEER_TUNED": "1" if is_tuned else "",
            "PYTHONWARNINGS": "ignore",
        }

    def program(stage: Stage, url: str, topic: str) -> Program:
        arguments = ["-m", f"benchmarks.peers.{module}", "work"]
        return Program(arguments, environment(url, stage.kafka.bootstrap, topic), python_of_peers())

    async def install(url: str) -> None:
        python = await asyncio.to_thread(python_of_peers)
        arguments = ["-m", f"benchmarks.peers.{module}", "install"]
        process = await Program(arguments, environment(url, "", ""), python).start()
        if await process.wait():
            raise RuntimeError(f"{module} install ended with {process.returncode}")

    return Subject(rows, program, install)


def _peer_trial(module: str, rows: Rows, sizes: tuple[int, int], *, is_tuned: bool) -> Trial:
    subject = _peer(module, rows, is_tuned=is_tuned)

    async def trial(round_: Round) -> Sample:
        return await drain(round_.stage, subject, round_.size(*sizes))

    return trial


PEERS = {
    "txoutbox": _peer_trial("txoutbox_relay", TXOUTBOX, (20_000, 500), is_tuned=False),
    "txoutbox tuned": _peer_trial("txoutbox_relay", TXOUTBOX, (50_000, 2_000), is_tuned=True),
    "faststream-outbox": _peer_trial("faststream_outbox_relay", FASTSTREAM, (500, 50), is_tuned=False),
    "faststream-outbox tuned": _peer_trial(
        "faststream_outbox_relay", FASTSTREAM, (20_000, 1_000), is_tuned=True
    ),
}
"""By name, at the settings of a new installation and at the best that their documentation names."""
