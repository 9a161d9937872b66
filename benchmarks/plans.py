"""Cells that are run in alternating rounds, each beside its reference."""

import asyncio
import itertools
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.cells.round import Round, Trial
from benchmarks.measure import Cell, Sample, Target
from benchmarks.report import show
from benchmarks.stage import open_stage


@dataclass(frozen=True)
class Plan:
    """Subjects of a cell by name, in the order in which they run in odd rounds; even ones go backwards."""

    name: str
    subjects: dict[str, Trial]
    references: Sequence[str]
    """What it is compared with: of several, in each round the one with the highest rate."""
    targets: Sequence[Target] = ()
    judged: Sequence[str] = ("towpath",)
    """Whose values are held against the targets."""
    only_full: Sequence[str] = ()
    """Subjects that a sanity pass leaves out."""
    is_variant: bool = False
    """It differs from another cell by a number or two: a sanity pass leaves it out unless it is named."""

    def trials(self, *, quick: bool) -> dict[str, Trial]:
        """What runs."""
        return {
            name: trial for name, trial in self.subjects.items() if not (quick and name in self.only_full)
        }


def reference_of(cells: dict[str, Cell], names: Sequence[str]) -> Cell | None:
    """In each round the quickest of the references."""
    if not names:
        return None
    rounds = zip(*(cells[name].samples for name in names), strict=True)
    best = [max(samples, key=lambda sample: sample.messages_per_s or 0.0) for samples in rounds]
    return Cell("", "reference", best)


async def run(
    chosen: Sequence[Plan],
    *,
    quick: bool,
    as_json: bool,
    rounds: int,
    warm_up: Trial | None = None,
    at_once: int = 1,
    has_capture: bool = False,
) -> bool:
    """Run and print; False when a cell is void. What warms up the servers is not counted.

    Several trials at once measure nothing, but say sooner whether they run.
    """
    results = {
        plan.name: {
            name: Cell(plan.name, name, targets=plan.targets if name in plan.judged else ())
            for name in plan.trials(quick=quick)
        }
        for plan in chosen
    }
    turns = asyncio.Semaphore(at_once)

    async def sample(number: int, round_: Round, plan: Plan, name: str, trial: Trial) -> Sample:
        async with turns:
            began = time.monotonic()
            found = await round_.sample(trial)
        seconds = time.monotonic() - began
        rate = "" if found.messages_per_s is None else f", {found.messages_per_s:.0f}/s"
        print(f"round {number}: {plan.name}, {name}: {seconds:.0f} s{rate} {found.note}", file=sys.stderr)
        return found

    async with open_stage(quick=quick, has_capture=has_capture) as stage:
        if warm_up is not None:
            await warm_up(Round(stage))
        for number in range(1, rounds + 1):
            round_ = Round(stage)
            pairs = [(plan, *each) for plan in chosen for each in plan.trials(quick=quick).items()]
            async with asyncio.TaskGroup() as tasks:
                # Who runs later finds another machine. Several at once begin with those that wait most.
                waiting = pairs if at_once == 1 and number % 2 else pairs[::-1]
                running = [tasks.create_task(sample(number, round_, *each)) for each in waiting]
            for (plan, name, _), task in zip(waiting, running, strict=True):
                results[plan.name][name].samples.append(task.result())
    for plan in chosen:
        subjects = results[plan.name]
        show(
            subjects.values(),
            reference_of(subjects, [name for name in plan.references if name in subjects]),
            as_json=as_json,
        )
    every = itertools.chain.from_iterable(subjects.values() for subjects in results.values())
    return not any(cell.is_void for cell in every)
