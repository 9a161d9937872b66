"""Repeat the history of a seed: `python -m tests.simulation relays 17 [--defect 'a gap is passed']`."""

import argparse
import logging
import sys

import pytest

from tests.simulation.failing import report
from tests.simulation.plan import plan
from tests.simulation.relay_defects import DEFECTS
from tests.simulation.relays import simulate


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation", description="Repeat the history of a seed."
    )
    parser.add_argument("kind", choices=["relays"])
    parser.add_argument("seed", type=int)
    parser.add_argument("--defect", choices=list(DEFECTS), help="with this planted")
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    with pytest.MonkeyPatch.context() as patch:
        if arguments.defect:
            DEFECTS[arguments.defect].plant(patch)
        account = simulate(arguments.seed)
        if not account.wrong:
            last = account.arrivals[-1].at if account.arrivals else 0.0
            print(*account.trace, sep="\n")
            print(
                f"seed {arguments.seed}: right, {account.sent} messages arrived "
                f"{len(account.arrivals)} times, the last at {last:.6f} s"
            )
            return 0
        print(report(arguments.kind, arguments.seed, plan(arguments.seed), simulate, arguments.defect or ""))
        return 1


if __name__ == "__main__":
    sys.exit(main())
