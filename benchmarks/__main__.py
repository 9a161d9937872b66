"""python -m benchmarks relay|e2e [--quick] [--json]"""

import argparse
import asyncio
import importlib
import sys

BENCHMARKS = ("relay", "e2e")


def main() -> int:
    """0 when every cell verified what it counted, 1 when one is void."""
    parser = argparse.ArgumentParser(prog="benchmarks", description=__doc__)
    parser.add_argument("benchmark", choices=BENCHMARKS)
    parser.add_argument("--quick", action="store_true", help="a sanity pass in about a minute")
    parser.add_argument("--json", action="store_true", help="one object a line")
    parser.add_argument("--rounds", type=int, help="alternating rounds (default 5, quick 1)")
    options = parser.parse_args()
    module = importlib.import_module(f"benchmarks.{options.benchmark}")
    rounds = options.rounds or (1 if options.quick else 5)
    return 0 if asyncio.run(module.main(quick=options.quick, as_json=options.json, rounds=rounds)) else 1


if __name__ == "__main__":
    sys.exit(main())
