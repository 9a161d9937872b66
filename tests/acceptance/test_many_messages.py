"""What many producers committed is done once, in order per key, whoever dies meanwhile (A1, A6)."""

import sys
from pathlib import Path
from typing import Final

import pytest

from tests.acceptance.ledger import Intention, Ledger, judge
from tests.acceptance.world import QUICK, World

PRODUCERS: Final = 8
DEADLINE_SECONDS: Final = 420
QUIET: Final = {"TOWPATH_TELEMETRY__LOG_LEVEL": "WARNING"}
"""Hundreds of retries are meant."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture
def message_count(scale: float) -> int:
    return max(200, int(10_000 * scale))


async def produce(world: World, count: int) -> Path:
    """Start producers as a process of their own; where they keep their ledger."""
    path = world.directory / "ledger.jsonl"
    path.touch()
    module = "tests.acceptance.producing"
    options = ["--messages", str(count), "--producers", str(PRODUCERS)]
    world.begin("producers", sys.executable, "-m", module, str(path), *options)
    return path


async def committed_in(world: World, path: Path) -> list[Intention]:
    """Wait for the producers to end, then everything they wrote down."""
    await world.finished("producers", seconds=DEADLINE_SECONDS)
    return list(Ledger(path))


async def all_are_done(world: World, intentions: list[Intention]) -> None:
    """Wait until as many tasks are final as were committed."""
    expected = sum(each.is_committed for each in intentions)
    query = "select count(*) from towpath.task where consumer_group = $1 and finished_at is not null"
    await world.until_counted(expected, query, world.group, seconds=DEADLINE_SECONDS, every=0.5)
    await world.until_sent()


async def test_every_committed_message_is_done_once_and_in_order(world: World, message_count: int) -> None:
    """A1, C6, C10, D1, P1: 8 producers, 10 % rollbacks, 5 % transient failures."""
    world.relay()
    world.consumer("consumer-1", **QUIET)
    world.consumer("consumer-2", **QUIET)
    path = await produce(world, message_count)
    intentions = await committed_in(world, path)

    await all_are_done(world, intentions)

    assert (await judge(world.db, world.group, intentions)).problems() == []
    assert any(not each.is_committed for each in intentions)
    assert (
        await world.db.fetchval(
            "select count(*) from towpath.task_event where event = 'task.retry_scheduled'"
        )
        > 0
    )


async def test_killed_processes_change_nothing_of_it(world: World, message_count: int) -> None:
    """A6, R4, C6, C10: SIGKILL of the relay and of a consumer in the middle, both started again."""
    message_count //= 2
    world.timing = QUICK
    world.relay()
    world.consumer("consumer-1", **QUIET)
    world.consumer("consumer-2", **QUIET)
    path = await produce(world, message_count)

    async def done(share: float) -> None:
        query = "select count(*) from towpath.task where consumer_group = $1 and state = 'SUCCEEDED'"
        await world.until_counted(int(message_count * share), query, world.group, seconds=DEADLINE_SECONDS)

    await done(0.15)
    world.kill("relay")
    world.relay("relay-again")
    await done(0.3)
    world.kill("consumer-1")
    world.consumer("consumer-1-again", **QUIET)
    await done(0.45)
    world.kill("relay-again")
    world.kill("consumer-2")
    world.relay("relay-once-more")
    world.consumer("consumer-2-again", **QUIET)
    intentions = await committed_in(world, path)

    await all_are_done(world, intentions)

    assert (await judge(world.db, world.group, intentions)).problems() == []


async def test_a_rolling_restart_changes_nothing_of_it(world: World, message_count: int) -> None:
    """S4: SIGTERM drains and hands over, one process after another."""
    message_count //= 5
    world.relay()
    world.consumer("consumer-1", **QUIET)
    world.consumer("consumer-2", **QUIET)
    path = await produce(world, message_count)
    codes = []
    for share, name in ((0.1, "consumer-1"), (0.3, "relay"), (0.5, "consumer-2")):
        query = "select count(*) from towpath.task where consumer_group = $1 and state = 'SUCCEEDED'"
        await world.until_counted(int(message_count * share), query, world.group, seconds=DEADLINE_SECONDS)
        codes.append(world.stop(name))
        if name == "relay":
            world.relay("relay-again")
        else:
            world.consumer(f"{name}-again", **QUIET)
    intentions = await committed_in(world, path)

    await all_are_done(world, intentions)

    assert codes == [0, 0, 0]
    assert (await judge(world.db, world.group, intentions)).problems() == []
