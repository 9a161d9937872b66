"""Repeat the history of a seed: `python -m tests.simulation relays 17 [--defect 'a gap is passed']`."""

import argparse
import logging
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import pytest

from tests.simulation import member_defects, member_plan, members, plan, relay_defects, relays
from tests.simulation.failing import report


class Kind(NamedTuple):
    """What is simulated."""

    plan: Callable[[int], Any]
    simulate: Callable[..., Any]
    defects: Mapping[str, relay_defects.Defect]


KINDS: Final = {
    "relays": Kind(plan.plan, relays.simulate, relay_defects.DEFECTS),
    "members": Kind(member_plan.plan, members.simulate, member_defects.DEFECTS),
}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation", description="Repeat the history of a seed."
    )
    kinds = parser.add_subparsers(dest="kind", required=True)
    for name, kind in KINDS.items():
        of_kind = kinds.add_parser(name)
        of_kind.add_argument("seed", type=int)
        of_kind.add_argument("--defect", choices=list(kind.defects), help="with this planted")
    arguments = parser.parse_args()
    kind, seed = KINDS[arguments.kind], arguments.seed
    logging.disable(logging.CRITICAL)
    with pytest.MonkeyPatch.context() as patch:
        if arguments.defect:
            kind.defects[arguments.defect].plant(patch)
        account = kind.simulate(seed)
        if not account.wrong:
            print(*account.trace, sep="\n")
            print(f"seed {seed}: right, {account.summary}")
            return 0
        print(report(arguments.kind, seed, kind.plan(seed), kind.simulate, arguments.defect or ""))
        return 1


if __name__ == "__main__":
    sys.exit(main())
