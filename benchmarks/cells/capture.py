"""Debezium: a backlog in a new and in a warm JVM, and a steady rate at its settings for low latency."""

from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

import asyncpg

from benchmarks.cells import latency
from benchmarks.cells.round import Round, Trial
from benchmarks.connect import connected
from benchmarks.debezium import DEFAULT, LOW_LATENCY, TUNED, captured
from benchmarks.drain import DEADLINE_SECONDS
from benchmarks.filling import DEBEZIUM, fill
from benchmarks.measure import Sample
from benchmarks.relaying import Waiting, Watch, observe


@dataclass(frozen=True)
class Backlogs:
    """One JVM's first backlog and its second, of the same size."""

    cold: Sample
    warm: Sample


def _in_one_jvm(settings: Mapping[str, str]) -> Callable[[Round], Coroutine[Any, Any, Backlogs]]:
    async def run(round_: Round) -> Backlogs:
        stage, count = round_.stage, round_.size(300_000, 500)
        topics = [stage.fresh_name("captured") for _ in range(2)]
        for topic in topics:
            await stage.topic(topic)
        async with (
            captured(stage) as url,
            Watch(stage.kafka.bootstrap, topics[0]) as first,
            Watch(stage.kafka.bootstrap, topics[1]) as second,
        ):
            connection = await asyncpg.connect(url, command_timeout=DEADLINE_SECONDS)
            committed = await fill(connection, DEBEZIUM, topics[0], count)
            async with connected(stage, url, settings) as connect:

                async def start() -> Waiting:
                    return committed, None

                async def resume() -> Waiting:
                    await connect.resume()
                    return committed, None

                cold = await observe(stage, url, first, connect.processes, start)
                await connect.stop()
                committed = await fill(connection, DEBEZIUM, topics[1], count)
                warm = await observe(stage, url, second, connect.processes, resume)
            await connection.close()
        return Backlogs(cold, warm)

    return run


async def _steady(round_: Round) -> dict[int, Sample]:
    """Every rate in turn in one JVM that has moved a backlog before."""
    stage, count = round_.stage, round_.size(100_000, 500)
    warming = stage.fresh_name("warming")
    await stage.topic(warming)
    samples = {}
    async with captured(stage) as url, Watch(stage.kafka.bootstrap, warming) as watch:
        connection = await asyncpg.connect(url, command_timeout=DEADLINE_SECONDS)
        committed = await fill(connection, DEBEZIUM, warming, count)
        await connection.close()

        async def start() -> Waiting:
            return committed, None

        async with connected(stage, url, LOW_LATENCY) as connect:
            warmed = await observe(stage, url, watch, connect.processes, start)
            if warmed.is_void:
                raise RuntimeError(f"the backlog before the steady rates: {warmed.note}")
            for rate in latency.RATES:
                topic = stage.fresh_name("steady")
                await stage.topic(topic)
                samples[rate] = await latency.load(round_, rate, DEBEZIUM, url, topic, connect.pid)
    return samples


def _at(rate: int) -> Trial:
    async def trial(round_: Round) -> Sample:
        return (await round_.once(_steady))[rate]

    return trial


def _temperatures(name: str, settings: Mapping[str, str]) -> dict[str, Trial]:
    run = _in_one_jvm(settings)

    async def cold(round_: Round) -> Sample:
        return (await round_.once(run)).cold

    async def warm(round_: Round) -> Sample:
        return (await round_.once(run)).warm

    return {f"{name}, cold": cold, f"{name}, warm": warm}


BACKLOGS = {**_temperatures("debezium default", DEFAULT), **_temperatures("debezium tuned", TUNED)}
LOW_LATENCY_AT = {rate: _at(rate) for rate in latency.RATES}
