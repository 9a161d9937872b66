"""`towpath relay run` and `towpath worker run`: start, say so, drain at SIGTERM."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

GROUP = """
from dataclasses import dataclass
from towpath import App, event

@event("bell.rung", destination="bells")
@dataclass
class Rung:
    times: int

app = App("ringers")

@app.idempotent()
async def hear(bell: Rung) -> None: ...
"""


@pytest.mark.parametrize("arguments", [("relay", "run"), ("worker", "run", "ringers:app")], ids=" ".join)
def test_a_service_runs_until_it_is_told_to_stop(
    migrated_url: str, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    """S4"""
    (tmp_path / "ringers.py").write_text(GROUP)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TOWPATH_")}
    variables = {"TOWPATH_DATABASE_URL": migrated_url, "TOWPATH_BROKER_URL": "memory://bells"}
    process = subprocess.Popen(
        [sys.executable, "-m", "towpath.cli", *arguments],
        env={**kept, **variables},
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    try:
        log = process.stderr.readline()
        assert '"event": "service.started"' in log, log + process.stderr.read()
        process.send_signal(signal.SIGTERM)
        _, rest = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()

    assert process.returncode == 0, rest
    assert "service.stopped" in rest
    assert "Traceback" not in rest


@pytest.mark.parametrize("arguments", [("relay", "run"), ("worker", "run", "ringers:app")], ids=" ".join)
def test_a_service_without_its_schema_says_what_to_do(
    database_url: str, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    """O2"""
    (tmp_path / "ringers.py").write_text(GROUP)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TOWPATH_")}
    variables = {"TOWPATH_DATABASE_URL": database_url, "TOWPATH_BROKER_URL": "memory://bells"}

    done = subprocess.run(
        [sys.executable, "-m", "towpath.cli", *arguments],
        env={**kept, **variables},
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("towpath: ")
    assert "run towpath db upgrade" in done.stderr.splitlines()[-1]
