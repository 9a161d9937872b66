"""The public API through the eyes of mypy and pyright."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
BIN = Path(sys.executable).parent


def mypy_errors(path: Path) -> set[int]:
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--output",
        "json",
        "--follow-imports",
        "silent",
        str(path),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert done.returncode in (0, 1), done.stderr
    return {error["line"] for error in found if error["severity"] == "error"}


def pyright_errors(path: Path) -> set[int]:
    command = [str(BIN / "pyright"), "--outputjson", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    report = json.loads(done.stdout)
    assert report["summary"]["filesAnalyzed"] == 1, done.stderr
    return {
        finding["range"]["start"]["line"] + 1
        for finding in report["generalDiagnostics"]
        if finding["severity"] == "error"
    }


CHECKERS = pytest.mark.parametrize("errors_of", [mypy_errors, pyright_errors], ids=["mypy", "pyright"])
SIDES = pytest.mark.parametrize("side", ["producing", "consuming"])


@CHECKERS
@SIDES
def test_the_documented_way_is_well_typed(errors_of: Callable[[Path], set[int]], side: str) -> None:
    assert set() == errors_of(HERE / f"{side}.py")


@CHECKERS
@SIDES
def test_each_misuse_is_rejected_where_it_stands(errors_of: Callable[[Path], set[int]], side: str) -> None:
    path = HERE / f"{side}_misuse.py"
    marked = {
        number
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if "# rejected:" in line
    }
    assert marked == errors_of(path)
