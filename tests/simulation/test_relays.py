"""Histories of relays on a virtual clock keep the promise; those with a planted defect do not."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any, Final

import pytest

from tests.simulation.broker import SimBroker
from tests.simulation.failing import report, shrink
from tests.simulation.gates import GatedSchema
from tests.simulation.loop import SimLoop, run
from tests.simulation.plan import plan
from tests.simulation.postgres import Transaction
from tests.simulation.relay_defects import DEFECTS
from tests.simulation.relays import OPTIONS, simulate, virtual
from towpath.relay import Relay

SEEDS: Final = 100
_SEEDS_TO_CATCH: Final = 30


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_any_history_of_relays_keeps_the_promise(caplog: pytest.LogCaptureFixture, scale: float) -> None:
    """R2, R4, R5, R10, R19, R23: nothing lost, no ghost, order per key, one owner, twice only with a reason.

    `TOWPATH_TEST_SIMULATIONS` says how many, `TOWPATH_TEST_SEED` where they begin.
    """
    caplog.set_level("CRITICAL")
    count = int(os.environ.get("TOWPATH_TEST_SIMULATIONS", max(SEEDS, SEEDS * scale)))
    start = int(os.environ.get("TOWPATH_TEST_SEED", "0"))
    sent = 0
    for seed in range(start, start + count):
        account = simulate(seed)
        sent += account.sent
        assert not account.wrong, report("relays", seed, plan(seed), simulate)
    assert sent > 20 * count, "too tame"


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", DEFECTS)
def test_a_planted_defect_is_caught(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The verdict can fail, for each of these ways to break the promise, and within thirty seeds."""
    caplog.set_level("CRITICAL")
    defect = DEFECTS[name]
    defect.plant(monkeypatch)
    for seed in range(_SEEDS_TO_CATCH):
        if any(each.startswith(defect.shows) for each in simulate(seed).wrong):
            return
    pytest.fail(f"{_SEEDS_TO_CATCH} histories with the defect looked right")


def test_one_seed_is_one_history_in_every_process() -> None:
    """To the microsecond of the last arrival, whatever the order in sets of texts."""
    told = [
        subprocess.run(
            [sys.executable, "-m", "tests.simulation", "relays", "7"],
            cwd=Path(__file__).parents[2],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=140,
        ).stdout
        for seed in ("1", "2")
    ]
    assert told[0] == told[1]
    assert "seed 7: right" in told[0]


@pytest.mark.timeout(1200)
def test_a_failure_is_told_by_its_fewest_steps(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("CRITICAL")
    DEFECTS["late commits are not looked for"].plant(monkeypatch)
    seed = next(seed for seed in range(_SEEDS_TO_CATCH) if simulate(seed).wrong)
    told = report("relays", seed, plan(seed), simulate, "late commits are not looked for")
    lines = told.splitlines()
    assert len(lines) <= 7, told  # two or three writes, what is wrong, and the command
    assert "lost: " in told
    assert lines[-1].endswith(f"tests.simulation relays {seed} --defect 'late commits are not looked for'")


def test_a_relay_rests_while_the_database_is_away_and_a_gate_in_doubt() -> None:
    """No answer came to what may have closed a gate; to look for that, the next session is waited for."""

    async def main(loop: SimLoop) -> None:
        with virtual(loop, 0):
            broker = SimBroker(loop, Random(0), lambda _: False, lambda *_: True, 0.01)
            relay = Relay("postgresql://simulated", broker, OPTIONS)  # type: ignore[arg-type]
            relay._sender.is_started = True
            relay._shards.acquire(0, 1, loop.time() + 1000)
            relay._shards.doubt_gates(0)
            stop = asyncio.Event()
            publishing = asyncio.create_task(relay._dispatch.run(stop))
            await asyncio.sleep(60)
            stop.set()
            await publishing

    run(main)  # raises Stuck where something runs without ever waiting


def test_a_server_that_is_replaced_while_progress_is_loaded_is_noticed(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R19: behind a pooler that hides it the relay loads again, and does not die."""
    caplog.set_level("CRITICAL")
    state, asked = GatedSchema.state, []

    def replaced_at_first(self: GatedSchema, x: Transaction, shards: list[int], started_at: str) -> Any:
        asked.append(started_at)
        return state(self, x, shards, started_at if len(asked) > 1 else "before")

    monkeypatch.setattr(GatedSchema, "state", replaced_at_first)
    assert simulate(0).wrong == []
    assert len(asked) > 1


@pytest.mark.parametrize("needed", [{3}, {0, 9}, {2, 5, 6}, set()])
def test_shrinking_keeps_just_what_it_takes(needed: set[int]) -> None:
    assert shrink(range(10), lambda steps: needed <= set(steps)) == sorted(needed)
