"""python -m tests.faults.planted [--seeds N] [--broker NAME] [DEFECT ...]: each has to be found."""

import argparse
import asyncio
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.faults.__main__ import TEMPLATE, postgres_of, quiet
from tests.faults.defects import DEFECTS
from tests.faults.plan import make_plan
from tests.faults.run import perform
from tests.faults.servers import BrokerName, Servers, servers_of

SEEDS: Final = 20
_PATIENCE_SECONDS: Final = 60.0
"""What a defect lost does not come, however long one waits."""


async def seeds_until_found(name: str, servers: Servers, seeds: int, directory: Path) -> tuple[int, str]:
    """How many seeds it took, and the first breach that found it; 0: none did."""
    defect = DEFECTS[name]
    faults = (defect.fault,) if defect.fault else ()
    for seed in range(1, seeds + 1):
        plan = make_plan(seed, faults)
        outcome = await perform(
            plan,
            servers,
            TEMPLATE,
            directory / f"{name}-{seed}",
            defect=name,
            patience_seconds=_PATIENCE_SECONDS,
        )
        found = [breach for breach in outcome.breaches if breach.invariant in defect.invariants]
        if found:
            return seed, str(found[0])
        if outcome.trouble:
            print(outcome.trouble, file=sys.stderr)
    return 0, ""


async def find_all(names: Sequence[str], broker: BrokerName, seeds: int) -> bool:
    """Whether every one was found; prints a row of a table for each."""
    directory = Path(tempfile.mkdtemp(prefix="towpath-planted-"))
    is_complete = True
    print("| defect | struck by | seeds | found by |\n|---|---|---|---|")
    async with postgres_of() as postgres, servers_of(broker, postgres) as servers:
        for name in names:
            seed, breach = await seeds_until_found(name, servers, seeds, directory)
            is_complete = is_complete and seed > 0
            struck = DEFECTS[name].fault or "nothing"
            print(f"| `{name}` | {struck} | {seed or 'not found'} | {breach} |", flush=True)
    shutil.rmtree(directory)
    return is_complete


def main() -> int:
    """0 when every defect was found, 1 when one was not."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.planted", description=__doc__)
    parser.add_argument("defects", nargs="*", metavar="DEFECT", help="default: all")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="most seeds for each")
    parser.add_argument("--broker", choices=("kafka", "rabbitmq"), default="kafka")
    options = parser.parse_args()
    if unknown := sorted(set(options.defects) - DEFECTS.keys()):
        parser.error(f"there is no defect {', '.join(unknown)}; there are: {', '.join(DEFECTS)}")
    quiet()
    is_complete = asyncio.run(find_all(options.defects or list(DEFECTS), options.broker, options.seeds))
    return 0 if is_complete else 1


if __name__ == "__main__":
    sys.exit(main())
