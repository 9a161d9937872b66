"""python -m tests.faults.soak [--minutes N] [--broker NAME] [--seed N] [--every SECONDS] [--keep DIR]"""

import argparse
import asyncio
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final, get_args

from tests.faults.__main__ import TEMPLATE, postgres_of, quiet
from tests.faults.report import Outcome
from tests.faults.servers import BrokerName, servers_of
from tests.faults.soak.flatness import Flatness, reason
from tests.faults.soak.running import Soak, perform

_SMALL: Final = 256 * 1024
_IN_BYTES: Final = ("memory", "malloc", "table", "index", "catalogs")


def main() -> int:
    """0 when the promise was kept and nothing grew."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--broker", choices=get_args(BrokerName), default="kafka")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--every", type=float, default=10.0, help="seconds between samples")
    parser.add_argument("--keep", type=Path, help="keep what was left behind, here")
    options = parser.parse_args()
    quiet()
    directory = options.keep or Path(tempfile.mkdtemp(prefix="towpath-soak-"))
    try:
        outcome, soak, figures = asyncio.run(_soak(options, directory / f"{options.broker}-{options.seed}"))
    except KeyboardInterrupt:
        return 130
    _tell(outcome, soak, figures)
    is_kept = outcome.is_kept and all(each.is_kept for each in figures)
    if is_kept and not options.keep:
        shutil.rmtree(directory)
    elif not is_kept:
        print(f"\nnot kept; evidence in {directory}")
    return 0 if is_kept else 1


async def _soak(options: argparse.Namespace, directory: Path) -> tuple[Outcome, Soak, list[Flatness]]:
    async with (
        postgres_of(autovacuum_naptime="15s") as postgres,
        servers_of(options.broker, postgres) as servers,
    ):
        return await perform(options.seed, options.minutes, options.every, servers, TEMPLATE, directory)


def _tell(outcome: Outcome, soak: Soak, figures: Sequence[Flatness]) -> None:
    print(
        f"\n{outcome.message_count} messages, {soak.struck.total()} strikes of {len(soak.struck)} kinds,"
        f" {soak.restarts.total()} processes that ended were started again;"
        f" the promise was {'kept' if outcome.is_kept else 'BROKEN'}\n"
    )
    for line in [*map(str, outcome.breaches[:20]), *filter(None, [outcome.trouble])]:
        print(line)
    print("| figure | first third | last third | most | verdict |\n|---|---|---|---|---|")
    shown = [each for each in figures if not each.is_kept or not _is_small(each)]
    for each in shown:
        first, last, most = (_shown(each.figure, value) for value in (each.first, each.last, each.most))
        why = f": {reason(each.figure)}" if each.word == "by design" else ""
        print(f"| {each.figure} | {first} | {last} | {most} | {each.word}{why} |")
    print(f"\n{len(figures) - len(shown)} more tables and indexes stayed below {_SMALL >> 10} KiB")


def _is_small(each: Flatness) -> bool:
    return each.figure.startswith(("table", "index")) and each.most < _SMALL


def _shown(figure: str, value: float) -> str:
    return f"{value / 2**20:.1f} MiB" if figure.startswith(_IN_BYTES) else f"{value:.0f}"


if __name__ == "__main__":
    sys.exit(main())
