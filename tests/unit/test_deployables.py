"""The processes that images start."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("package", ["outbox_relay", "consumers"])
def test_sigterm_ends_a_process_that_is_still_loading(tmp_path: Path, package: str) -> None:
    """S4: process 1 would never hear of it, as long as nothing handles it."""
    slow = tmp_path / "towpath" / "__init__.py"
    slow.parent.mkdir()
    slow.write_text("import time\nprint('loading', flush=True)\ntime.sleep(120)\n")

    with subprocess.Popen(
        [sys.executable, "-m", package],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "loading\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM
