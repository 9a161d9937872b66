"""Histories of consumers on a virtual clock keep the promise; those with a planted defect do not."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.simulation.failing import report
from tests.simulation.member_defects import DEFECTS
from tests.simulation.member_plan import plan
from tests.simulation.members import simulate

SEEDS: Final = 100
_SEEDS_TO_CATCH: Final = 30


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_any_history_of_members_keeps_the_promise(caplog: pytest.LogCaptureFixture, scale: float) -> None:
    """C3, C4, C10, C18, C20, I5, I7, I8: each ends once, in order per key, at one worker, retried when due.

    `TOWPATH_TEST_SIMULATIONS` says how many, `TOWPATH_TEST_SEED` where they begin.
    """
    caplog.set_level("CRITICAL")
    count = int(os.environ.get("TOWPATH_TEST_SIMULATIONS", max(SEEDS, SEEDS * scale)))
    start = int(os.environ.get("TOWPATH_TEST_SEED", "0"))
    handled = 0
    for seed in range(start, start + count):
        account = simulate(seed)
        handled += len(account.handled)
        assert not account.wrong, report("members", seed, plan(seed), simulate)
    assert handled > 15 * count, "too tame"


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


def test_a_history_ends_whole_though_a_member_was_still_to_die() -> None:
    """Else what is left of it is collected during some other test, and fails that one."""
    assert not simulate(700983).wrong


def test_one_seed_is_one_history_in_every_process() -> None:
    """To the microsecond of the last effect, whatever the order in sets of texts."""
    told = [
        subprocess.run(
            [sys.executable, "-m", "tests.simulation", "members", "7"],
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
    DEFECTS["a failure closes no gate"].plant(monkeypatch)
    seed = next(seed for seed in range(_SEEDS_TO_CATCH) if simulate(seed).wrong)
    told = report("members", seed, plan(seed), simulate, "a failure closes no gate")
    lines = told.splitlines()
    assert len(lines) <= 7, told  # two or three arrivals, what is wrong, and the command
    assert lines[-1].endswith(f"tests.simulation members {seed} --defect 'a failure closes no gate'")
