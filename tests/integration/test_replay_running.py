"""Replay beside a consumer group that runs: order per key, each effect once, deaths on the way."""

import asyncio
import random
from collections.abc import Awaitable, Callable

import asyncpg

from tests.integration.engine import Engine, Posted, bench, depot, until
from towpath.deadletters import Filter, carry_out, make_plan
from towpath.outcomes import Dead

KEYS = [f"parcel-{number}" for number in range(6)]


def count_is(engine: Engine, state: str, count: int) -> Callable[[], Awaitable[bool]]:
    async def check() -> bool:
        query = "select count(*) from towpath.task where state = $1"
        return bool(await engine.db.fetchval(query, state) == count)

    return check


async def test_a_replay_while_the_group_runs_keeps_the_order_of_each_key(migrated_url: str) -> None:
    """C10, D3: also of new messages of the same keys that arrive meanwhile."""
    app = depot()
    effects: list[tuple[str, int]] = []
    is_broken = True

    @app.idempotent()
    async def post(parcel: Posted) -> None:
        if is_broken:
            raise Dead("no_stamps")
        await asyncio.sleep(random.uniform(0, 0.003))
        effects.append((parcel.parcel, parcel.number))

    async def arrive(engine: Engine, numbers: range) -> None:
        for number in numbers:
            for key in KEYS:
                await engine.publish(Posted(key, number))
                await asyncio.sleep(0.002)

    operator = await asyncpg.connect(migrated_url)
    async with bench(app, migrated_url) as engine:
        async with engine.member():
            await arrive(engine, range(8))
            await until(count_is(engine, "DEAD", 48))
            is_broken = False
            plan = await make_plan(operator, Filter(groups=("depot",)))
            async with asyncio.TaskGroup() as group:
                group.create_task(arrive(engine, range(100, 108)))
                group.create_task(carry_out(operator, plan, actor="ada", batch_size=5, rate=100))
            await until(count_is(engine, "SUCCEEDED", 96))
        gates = await engine.gates()
        states = {letter["state"] for letter in await engine.letters()}
    await operator.close()

    assert len(effects) == len(set(effects)) == 96
    for key in KEYS:
        old = [number for parcel, number in effects if parcel == key and number < 100]
        new = [number for parcel, number in effects if parcel == key and number >= 100]
        assert (old, new) == (list(range(8)), list(range(100, 108)))
    assert (gates, states) == (0, {"replayed"})


async def test_what_dies_again_is_open_again_and_counted(migrated_url: str) -> None:
    """D1, D3"""
    app = depot()
    mended: set[str] = set()

    @app.idempotent()
    async def post(parcel: Posted) -> None:
        if parcel.parcel not in mended:
            raise Dead("no_stamps")

    async with bench(app, migrated_url) as engine, engine.member():
        for key in KEYS:
            await engine.publish(Posted(key))
        await until(count_is(engine, "DEAD", 6))
        mended.update(KEYS[:2])

        await carry_out(engine.db, await make_plan(engine.db, Filter()), actor="ada")

        await until(count_is(engine, "SUCCEEDED", 2))
        await until(count_is(engine, "DEAD", 4))
        mended.update(KEYS)
        plan = await make_plan(engine.db, Filter())
        assert plan.count == 4

        await carry_out(engine.db, plan, actor="ada")

        await until(count_is(engine, "SUCCEEDED", 6))
        letters = await engine.letters()

    assert sorted((letter["death_count"], letter["replay_count"]) for letter in letters) == [
        *[(1, 1)] * 2,
        *[(2, 2)] * 4,
    ]
