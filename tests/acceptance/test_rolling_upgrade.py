"""The schema is upgraded, and the processes after it, while messages are produced, relayed and consumed."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from tests.acceptance.ledger import Ledger, judge
from tests.acceptance.producing import produce
from tests.acceptance.world import REPOSITORY, TOWPATH, World
from tests.upgrades import next_version
from towpath.store.installed import library_version

TOO_OLD: Final = "the schema towpath has version 1, this towpath needs 2: run towpath db upgrade"
RUNNING: Final = """
    select r.version from towpath.relay r where exists (
      select from towpath.shard_lease l where l.relay = r.id and l.lease_until > towpath.clock())
    union all select w.version from towpath.worker w where w.lease_until > towpath.clock() order by 1
"""
WORKED: Final = """
    select count(distinct t.note) from towpath.task t
     where t.kind = 'event' and t.state = 'SUCCEEDED' and t.created_at > $1
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@asynccontextmanager
async def load(group: str, ledger: Path) -> AsyncIterator[None]:
    """This version produces all the while, some sixteen messages a second."""
    is_over = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(
            produce(
                group,
                ledger,
                message_count=1_000_000,
                producer_count=4,
                seed=1,
                pause_seconds=0.5,
                is_over=is_over,
            )
        )
        yield
        is_over.set()


async def until_running(world: World, *versions: str) -> Any:
    """Wait until exactly these publish, and these consume; since when, by the database's clock."""

    async def is_so() -> bool:
        return [row["version"] for row in await world.db.fetch(RUNNING)] == sorted(versions * 2)

    await world.until(f"a relay and a worker of {versions}", is_so)
    return await world.db.fetchval("select towpath.clock()")


@pytest.mark.parametrize("wire", ["kafka"], indirect=True)
async def test_an_upgrade_under_load_loses_doubles_and_reorders_nothing(
    world: World, clean_environment: pytest.MonkeyPatch
) -> None:
    """C10, D1, O2, P1: this version and the next work beside each other on the schema of the next."""
    clean_environment.setenv("TOWPATH_DATABASE_URL", world.database_url)
    ledger = world.directory / "ledger"
    next_ = {"PYTHONPATH": f"{next_version.build(world.directory / 'next')}:{REPOSITORY}"}

    world.relay("relay-before")
    world.consumer("consumer-before")
    world.relay("too-early", **next_)
    async with load(world.group, ledger):
        assert TOO_OLD in await world.finished("too-early", exit_code=1)
        await world.until_counted(1, "select count(*) from effect")
        await world.run("upgrade", TOWPATH, "db", "upgrade", seconds=300, **next_)

        world.relay("relay-after", **next_)
        world.consumer("consumer-after", **next_)
        options = (str(ledger), "--messages", "100", "--producers", "4", "--seed", "2")
        world.begin("producer", sys.executable, "-m", "tests.acceptance.producing", *options, **next_)
        since = await until_running(world, library_version(), next_version.VERSION)
        await world.until_counted(2, WORKED, since)
        await world.finished("producer")
        for name in ("relay-before", "consumer-before"):
            assert await asyncio.to_thread(world.stop, name) == 0

        since = await until_running(world, next_version.VERSION)
        await world.until_counted(1, WORKED, since)

    committed = sum(each.is_committed for each in Ledger(ledger))
    await world.until_state("SUCCEEDED", committed)
    await world.until_sent()
    assert await world.db.fetchval("select count(*) from towpath.journal where note = 'next'") > 0
    verdict = await judge(world.db, world.group, Ledger(ledger))
    assert verdict.problems() == []
