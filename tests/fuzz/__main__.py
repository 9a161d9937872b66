"""Look for inputs that reach more of the code, and keep those that do: python -m tests.fuzz"""

import argparse
import subprocess
import sys
import tempfile
from hashlib import sha256
from pathlib import Path
from typing import Final

from tests.fuzz.targets import TARGETS, corpus_of, keep

REPOSITORY: Final = Path(__file__).parents[2]
_LIMITS: Final = ("-max_len=400", "-timeout=10", "-verbosity=0", "-print_final_stats=1")


def main() -> int:
    """0 when every property held."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    parser.add_argument("targets", nargs="*", default=[*TARGETS], metavar="TARGET", help=", ".join(TARGETS))
    options = parser.parse_args()
    return max(_fuzz(target, options.seconds) for target in options.targets)


def _fuzz(target: str, seconds: int) -> int:
    before = set(corpus_of(target))
    with tempfile.TemporaryDirectory(prefix="towpath-fuzz-") as name:
        corpus, found = Path(name, "corpus"), Path(name, "found")
        corpus.mkdir()
        found.mkdir()
        for data in before:
            (corpus / sha256(data).hexdigest()).write_bytes(data)
        guided = Path(name, "guided.sh")
        guided.write_text(f'#!/bin/sh\nexec {sys.executable} -m tests.fuzz.guided {target} "$0" "$@"\n')
        guided.chmod(0o700)
        # What it finds goes into the first directory.
        code = _run(guided, found, corpus, f"-max_total_time={seconds}", f"-artifact_prefix={name}/")
        failing = {path.read_bytes() for path in Path(name).glob("*-*")}
        if not failing:
            code = code or _run(guided, "-merge=1", corpus, found)
        kept = {path.read_bytes() for path in corpus.iterdir()} | failing
    keep(target, kept)
    print(f"{target}: {len(kept)} inputs, {len(kept - before)} of them new", flush=True)
    for data in failing:
        print(f"{target}: the property does not hold for {data!r}", flush=True)
    return code


def _run(guided: Path, *arguments: str | Path) -> int:
    return subprocess.run([guided, *arguments, *_LIMITS], cwd=REPOSITORY, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
