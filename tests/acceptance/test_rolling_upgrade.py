"""The schema is upgraded, and the processes after it, while messages are produced, relayed and consumed."""

import asyncio
import sys

import pytest

from tests.acceptance.ledger import Ledger, judge
from tests.acceptance.world import World
from tests.upgrades import know
from towpath.store import migrate

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize("wire", ["rabbitmq"], indirect=True)
async def test_an_upgrade_under_load_loses_doubles_and_reorders_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C10, D1, P1: this version runs on its own schema and on the next one, before, during and after."""
    ledger = world.directory / "ledger"

    def produce(name: str, seed: int) -> None:
        arguments = (str(ledger), "--messages", "300", "--producers", "4", "--seed", f"{seed}")
        world.begin(name, sys.executable, "-m", "tests.acceptance.producing", *arguments)

    world.relay("relay-before")
    world.consumer("consumer-before")
    produce("producer", 1)
    await world.until_counted(1, "select count(*) from effect")

    know(monkeypatch, "additive")
    assert await asyncio.to_thread(migrate.upgrade, world.database_url) == "0002"

    produce("producer-after", 2)
    world.relay("relay-after")
    world.consumer("consumer-after")
    for name in ("producer", "producer-after"):
        await world.finished(name)
    assert (world.stop("relay-before"), world.stop("consumer-before")) == (0, 0)
    committed = sum(each.is_committed for each in Ledger(ledger))
    await world.until_state("SUCCEEDED", committed)
    await world.until_sent()

    verdict = await judge(world.db, world.group, Ledger(ledger))
    assert verdict.problems() == []
