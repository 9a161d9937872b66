"""`towpath relay run` and `towpath worker run`: start, say so, drain at SIGTERM."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from urllib.request import urlopen

import pytest

from towpath.cli.exits import Stop
from towpath.cli.health import check
from towpath.testing.services.ports import ReservedPort

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


@pytest.mark.parametrize(
    ("noun", "arguments", "metric"),
    [
        ("relay", ("run",), "towpath_relay_shards_owned"),
        ("worker", ("run", "ringers:app"), "towpath_breakers_open"),
    ],
)
def test_a_service_says_how_it_is_to_probes_and_to_prometheus(
    migrated_url: str, tmp_path: Path, noun: str, arguments: tuple[str, ...], metric: str
) -> None:
    """O5"""
    (tmp_path / "ringers.py").write_text(GROUP)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TOWPATH_", "OTEL_"))}
    port = ReservedPort()
    environment = {
        **kept,
        "TOWPATH_DATABASE_URL": migrated_url,
        "TOWPATH_BROKER_URL": "memory://bells",
        f"TOWPATH_{noun.upper()}__HEALTH_HOST": "0.0.0.0",
        "http_proxy": "http://127.0.0.1:1",
        "no_proxy": "",
        f"TOWPATH_{noun.upper()}__HEALTH_PORT": str(port.number),
    }

    def towpath(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "towpath.cli", noun, *words],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    unanswered = towpath("check")
    process = subprocess.Popen(
        [sys.executable, "-m", "towpath.cli", noun, *arguments],
        env=environment,
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 120
        while (ready := towpath("check", "--json")).returncode and time.monotonic() < deadline:
            time.sleep(0.1)
        while (live := towpath("check", "--live")).returncode and time.monotonic() < deadline:
            time.sleep(0.1)
        with urlopen(f"http://127.0.0.1:{port.number}/metrics", timeout=30) as answer:
            page = answer.read().decode()
    finally:
        process.kill()
        process.wait()
        port.release()

    assert unanswered.returncode == 4
    assert f"no {noun} answers at http://127.0.0.1:{port.number}/readyz" in unanswered.stderr
    assert ready.returncode == 0, ready.stderr
    assert json.loads(ready.stdout)["ok"] is True
    assert live.returncode == 0
    assert live.stdout.startswith("ok: True")
    assert metric in page
    assert "process_resident_memory_bytes" in page


STUBBORN = """
import asyncio
from towpath.serving import serve

class Probe:
    def liveness(self): return {}
    def readiness(self): return {}

async def never_ends(stop):
    await asyncio.Event().wait()

asyncio.run(
    serve("stubborn", never_ends, probe=Probe(), on_draining=lambda: None, health_host="", health_port=0)
)
"""


def test_a_second_signal_ends_a_drain_at_once() -> None:
    """S4, C15: whatever still runs."""
    process = subprocess.Popen([sys.executable, "-c", STUBBORN])
    try:
        deadline = time.monotonic() + 60
        while not _has_sigterm(process.pid, "SigCgt"):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=1)
        while _has_sigterm(process.pid, "ShdPnd"):  # while one is pending a second is lost
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 128 + signal.SIGTERM
    finally:
        process.kill()
        process.wait()


def _has_sigterm(pid: int, signals: str) -> bool:
    """Whether it is in one of a process's sets of signals: those it catches, or that wait for it."""
    (found,) = [
        line.split()[1]
        for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        if line.startswith(signals)
    ]
    return bool(int(found, 16) >> (signal.SIGTERM - 1) & 1)


@pytest.mark.parametrize(
    ("host", "asked"), [("::", "[::1]"), ("::1", "[::1]"), ("[::1]", "[::1]"), ("0.0.0.0", "127.0.0.1")]
)
def test_a_probe_asks_where_the_process_listens(host: str, asked: str) -> None:
    """O5: an IPv6 address too."""
    port = ReservedPort()
    with pytest.raises(Stop, match=re.escape(f"no relay answers at http://{asked}:{port.number}/livez")):
        check("relay", host, port.number, is_live=True, is_json=False)
    port.release()
