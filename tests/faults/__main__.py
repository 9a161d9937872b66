"""python -m tests.faults [--runs N] [--seed N] [--broker NAME] [--fault a,b] [--quick] [--keep DIR]"""

import argparse
import asyncio
import logging
import random
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, get_args

from tests.faults.disk import keep_mounts_private
from tests.faults.faults import FAULTS
from tests.faults.plan import make_plan
from tests.faults.report import Outcome, table, verdict
from tests.faults.run import perform
from tests.faults.servers import BrokerName, servers_of
from towpath.store import migrate
from towpath.testing.services import PostgresServer

QUICK: Final[tuple[str, ...]] = (
    "members_killed+producer_postgres_half_open",
    "relay_killed+broker_restarted",
)
_PAIRS: Final = 0.2
"""Share of runs with two faults."""
TEMPLATE: Final = "faults_template"
Job = tuple[int, BrokerName, tuple[str, ...]]


def jobs(runs: int, seed: int, brokers: Sequence[BrokerName], faults: Sequence[str]) -> list[Job]:
    """Each fault on each broker it applies to, in an order of chance; the same seed gives the same.

    `a+b` strikes with both; where there is no such pair, some runs are struck by two at random.
    """
    rng = random.Random(seed)
    singles = [
        (broker, tuple(fault.split("+")))
        for fault in faults
        for broker in brokers
        if all(broker in FAULTS[each]().brokers for each in fault.split("+"))
    ]
    has_pairs = len(faults) > 1 and not any("+" in fault for fault in faults)
    found: list[Job] = []
    while len(found) < runs and singles:
        rng.shuffle(singles)
        for broker, struck in singles:
            others = [other for at, other in singles if at == broker and _may_overlap(struck, other)]
            second = rng.choice(others) if has_pairs and others and rng.random() < _PAIRS else ()
            found.append((seed + len(found), broker, (*struck, *second)))
    return found[:runs]


def _may_overlap(some: Sequence[str], others: Sequence[str]) -> bool:
    """Whether they act on different things."""
    mine, theirs = (
        frozenset[str]().union(*(FAULTS[name]().acts_on for name in names)) for names in (some, others)
    )
    return mine.isdisjoint(theirs)


def main() -> int:
    """0 when every run kept the promise, 1 when one did not, 2 for arguments that cannot be used."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--runs", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--broker", choices=get_args(BrokerName), help="only this one")
    parser.add_argument("--fault", help="only these, separated by commas; a+b strikes with both")
    parser.add_argument("--defect", default="", help="plant a defect: the checker has to find it")
    parser.add_argument("--quick", action="store_true", help="a few telling faults, at most three minutes")
    parser.add_argument("--keep", type=Path, help="keep what every run left behind, here")
    options = parser.parse_args()
    faults = options.fault.split(",") if options.fault else QUICK if options.quick else sorted(FAULTS)
    if unknown := sorted({each for fault in faults for each in fault.split("+")} - FAULTS.keys()):
        parser.error(f"there is no fault {', '.join(unknown)}; there are: {', '.join(sorted(FAULTS))}")
    brokers = [options.broker] if options.broker else list(get_args(BrokerName))
    chosen = jobs(options.runs, options.seed, brokers, faults)
    quiet()
    keep_mounts_private()
    keep = options.keep or Path(tempfile.mkdtemp(prefix="towpath-faults-"))
    try:
        outcomes = asyncio.run(
            _run_all(chosen, keep, defect=options.defect, is_kept=options.keep is not None)
        )
    except KeyboardInterrupt:
        return 130
    print(table(outcomes))
    failed = [outcome for outcome in outcomes if not outcome.is_kept]
    if failed:
        print(f"\n{len(failed)} of {len(outcomes)} runs broke the promise; evidence in {keep}")
    return 1 if failed else 0


def quiet() -> None:
    """No noise of clients at brokers that are away; SIGTERM ends what was started."""
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)
    signal.signal(signal.SIGTERM, signal.default_int_handler)


@asynccontextmanager
async def postgres_of(**settings: str) -> AsyncIterator[PostgresServer]:
    """A server whose connections can be exhausted, with a template database."""
    with PostgresServer(settings={"max_connections": "120", **settings}) as postgres:
        await asyncio.to_thread(migrate.upgrade, postgres.create_database(TEMPLATE))
        yield postgres


def _wanted(job: Job) -> tuple[BrokerName, bool]:
    """A broker, and whether it is a cluster: the servers that a run needs."""
    _, broker, faults = job
    return broker, any(FAULTS[fault]().needs_cluster for fault in faults)


async def _run_all(chosen: Sequence[Job], keep: Path, *, defect: str, is_kept: bool) -> list[Outcome]:
    outcomes: list[Outcome] = []
    async with postgres_of() as postgres:
        for broker, is_cluster in dict.fromkeys(map(_wanted, chosen)):
            async with servers_of(broker, postgres, is_cluster=is_cluster) as servers:
                for seed, _, faults in (job for job in chosen if _wanted(job) == (broker, is_cluster)):
                    directory = keep / f"{broker}-{seed}-{'+'.join(faults) or 'none'}"
                    plan = make_plan(seed, faults)
                    outcome = await perform(plan, servers, TEMPLATE, directory, defect=defect, keep=is_kept)
                    outcomes.append(outcome)
                    _tell(outcome, defect, directory)
    return outcomes


def _tell(outcome: Outcome, defect: str, directory: Path) -> None:
    """One line, and where it failed everything that is known."""
    print(
        f"{outcome.broker:9} {outcome.faults:45} seed {outcome.plan.seed:<5}"
        f" {outcome.message_count:4} messages {outcome.seconds:5.0f} s  {verdict(outcome)}",
        flush=True,
    )
    if outcome.is_kept:
        return
    faults = "+".join(strike.fault for strike in outcome.plan.strikes)
    again = (
        f"python -m tests.faults --runs 1 --seed {outcome.plan.seed}"
        f" --broker {outcome.broker} --fault {faults}" + (f" --defect {defect}" if defect else "")
    )
    lines = [
        str(outcome.plan),
        *map(str, outcome.breaches),
        *filter(None, [outcome.trouble]),
        f"again: {again}",
    ]
    (directory / "verdict.txt").write_text("\n".join(lines) + "\n")
    print("\n".join(f"    {line}" for line in lines[1:][:12]), flush=True)


if __name__ == "__main__":
    sys.exit(main())
