"""Random outages of the database under two working members: nothing lost, doubled or out of order."""

import asyncio
import random
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import pytest

from tests.integration.engine import EFFECTS, Engine, Posted, Weigh, bench, depot, effects
from tests.integration.test_effects import write
from towpath.app import App
from towpath.backoff import RetryPolicy
from towpath.context import Call, Tx
from towpath.testing.proxy import Direction, TcpProxy

KEYS, MESSAGES, OUTAGES = 5, 80, 5


def troubled(rnd: random.Random) -> App:
    """A group whose handlers fail now and then, on top of the outages."""
    app = depot(retry=RetryPolicy(attempts=99, base="2ms", cap="30ms"))

    @app.transactional()
    async def sort(parcel: Posted, tx: Tx) -> None:
        if rnd.random() < 0.15:
            raise RuntimeError("no")
        await write(tx, parcel)
        await asyncio.sleep(rnd.random() * 0.01)

    @app.idempotent()
    async def weigh(parcel: Weigh, call: Call) -> str | None:
        if rnd.random() < 0.15:
            raise RuntimeError("no")
        await asyncio.sleep(rnd.random() * 0.02)
        if parcel.number % 3 == 0:
            async with call.transaction() as tx:
                await write(tx, Posted(f"weighed {parcel.parcel}", parcel.number))
        return "done" if parcel.number % 3 == 1 else None

    return app


async def feed(engine: Engine, rnd: random.Random) -> list[Any]:
    """Events and submitted tasks of a few keys, in order."""
    ids = []
    for number in range(MESSAGES):
        ids.append(await engine.publish(Posted(f"k{number % KEYS}", number)))
        ids.append(await engine.submit(Weigh(f"k{number % KEYS}", number)))
        await asyncio.sleep(rnd.random() * 0.05)
    return ids


async def trouble(proxy: TcpProxy, rnd: random.Random) -> None:
    """Break the link in every way it can break."""
    for _ in range(OUTAGES):
        await asyncio.sleep(rnd.random() * 0.5)
        match rnd.choice(["cut", "drop", "hang", *Direction]):
            case "cut":
                await proxy.cut()
            case "drop":
                await proxy.drop_connections()
            case "hang":
                await proxy.hang()
            case Direction() as direction:
                await proxy.hang(direction)
        await asyncio.sleep(rnd.random() * 1.2)  # the lease is shorter
        await proxy.restore()


@pytest.mark.timeout(300)
async def test_any_outages_lose_double_and_reorder_nothing(
    new_database: Any, schema_template: str, postgres_proxy: TcpProxy, scale: float
) -> None:
    """C13, C6, C8, C10: whatever was lost on the way, the statement or its answer."""
    for seed in range(max(1, round(scale))):
        rnd = random.Random(seed)
        with new_database(schema_template) as url:
            parts = urlsplit(url)
            user = f"{parts.username}@" if parts.username else ""
            far = urlunsplit(parts._replace(netloc=f"{user}127.0.0.1:{postgres_proxy.port}"))
            async with bench(
                troubled(rnd),
                url,
                lease=timedelta(milliseconds=700),
                beat_every=timedelta(milliseconds=80),
                max_deliveries=99,
            ) as engine:
                await engine.db.execute(EFFECTS)
                async with engine.member(url=far), engine.member(url=far):
                    feeding = asyncio.create_task(feed(engine, rnd))
                    await trouble(postgres_proxy, rnd)
                    for id_ in await feeding:
                        row = await engine.reaches(id_, "SUCCEEDED", "DEAD")
                        assert row["state"] == "SUCCEEDED", f"seed {seed}: {dict(row)}"
                    await engine.is_drained("parcels", "tasks.depot")
                done = await effects(engine)
                assert await engine.gates() == 0
            check(done)


def check(done: list[tuple[str, int]]) -> None:
    """Each effect once, and in order within its key."""
    assert len(done) == len(set(done)), "doubled"
    expected = [(f"k{number % KEYS}", number) for number in range(MESSAGES)]
    expected += [(f"weighed k{number % KEYS}", number) for number in range(0, MESSAGES, 3)]
    assert sorted(done) == sorted(expected), "lost"
    for lane in {lane for lane, _ in done}:
        numbers = [number for each, number in done if each == lane]
        assert numbers == sorted(numbers), f"{lane} is out of order"


def test_the_check_is_awake() -> None:
    good = [(f"k{number % KEYS}", number) for number in range(MESSAGES)]
    good += [(f"weighed k{number % KEYS}", number) for number in range(0, MESSAGES, 3)]
    check(good)
    for bad in ([*good, good[3]], good[1:], [good[KEYS], *good[1:KEYS], good[0], *good[KEYS + 1 :]]):
        with pytest.raises(AssertionError):
            check(bad)
