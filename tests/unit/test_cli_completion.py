"""The shell completes commands and options."""

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("typed", "offered"),
    [("towpath dlq re", ["replay"]), ("towpath wor", ["worker"]), ("towpath dlq list --js", ["--json"])],
)
def test_bash_completes(typed: str, offered: list[str]) -> None:
    """O1: as the script of `towpath --install-completion` asks."""
    asked = {
        "_TOWPATH_COMPLETE": "complete_bash",
        "COMP_WORDS": typed,
        "COMP_CWORD": str(len(typed.split()) - 1),
    }
    done = subprocess.run(
        [sys.executable, "-m", "towpath.cli"],
        env={**os.environ, **asked}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.stdout.split() == offered, done.stderr
