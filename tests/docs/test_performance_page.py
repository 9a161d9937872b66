"""The commands of the page on performance make the figures that it tells to make."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import REPOSITORY, blocks, commands
from tests.docs.test_operations import OF_BENCHMARKS, is_as_shown


@pytest.mark.services
def test_the_commands_of_the_page_measure_and_print_their_table(tmp_path: Path) -> None:
    """D3: also that a listing and a release of 10,000 dead letters are whole."""
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(REPOSITORY),
    }
    [block] = [block for block in blocks(OF_BENCHMARKS) if block.language == "console"]
    for line, shown in commands(block.text):
        done = subprocess.run(
            line, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert is_as_shown(shown, done.stdout), done.stdout
