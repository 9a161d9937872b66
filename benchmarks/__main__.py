"""python -m benchmarks relay|consumer|e2e|operator|profile [--quick] [--json] [--rounds N] [--cells a,b]"""

import argparse
import asyncio
import importlib
import json
import logging
import signal
import sys
from pathlib import Path

from benchmarks.report import markdown

BENCHMARKS = ("relay", "consumer", "e2e", "operator", "profile")


def parser() -> argparse.ArgumentParser:
    """Of the command line."""
    parser = argparse.ArgumentParser(prog="benchmarks", description=__doc__)
    parser.add_argument("benchmark", choices=BENCHMARKS)
    parser.add_argument(
        "--quick", action="store_true", help="one round of small sizes, to see that everything runs"
    )
    parser.add_argument("--json", action="store_true", help="one object a line")
    parser.add_argument("--rounds", type=int, help="alternating rounds (default 5, quick 1)")
    parser.add_argument("--cells", help="some of its cells, separated by commas")
    parser.add_argument(
        "--debezium",
        action="store_true",
        help="the cells of relay beside Debezium, too; Maven downloads it on first use",
    )
    parser.add_argument(
        "--markdown",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="run nothing: print the table for docs/performance.md from what --json printed",
    )
    return parser


def main() -> int:
    """0 when every cell verified what it counted, 1 when one is void, 2 for arguments it cannot use."""
    arguments_of = parser()
    options = arguments_of.parse_args()
    if options.markdown:
        lines = [line for path in options.markdown for line in path.read_text().splitlines() if line]
        print(markdown(json.loads(line) for line in lines))
        return 0
    module = importlib.import_module(f"benchmarks.{options.benchmark}")
    known = getattr(module, "CELLS", ())
    usual = getattr(module, "DEFAULT_CELLS", known)
    if options.quick:
        usual = getattr(module, "QUICK_CELLS", usual)
    if options.debezium:
        beside = getattr(module, "DEBEZIUM_CELLS", ())
        if not beside:
            arguments_of.error(f"{options.benchmark} has no cell beside Debezium")
        known, usual = (*known, *beside), (*usual, *beside)
    chosen = options.cells.split(",") if options.cells else usual
    if unknown := sorted(set(chosen) - set(known)):
        arguments_of.error(
            f"{options.benchmark} has no cell {', '.join(unknown)}; it has: {', '.join(known) or 'one'}"
        )
    if options.rounds is not None and options.rounds < 1:
        arguments_of.error("--rounds must be at least 1")
    rounds = options.rounds or (1 if options.quick else 5)
    arguments = {"cells": chosen} if known else {}
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)  # retries on topics that are just made
    run = module.main(quick=options.quick, as_json=options.json, rounds=rounds, **arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what it started is ended with it
    try:
        return 0 if asyncio.run(run) else 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
