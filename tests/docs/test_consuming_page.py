"""docs/consuming.md, then docs/failures.md: their Python runs as it stands, and what they name exists."""

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import REPOSITORY, blocks, commands
from towpath import App
from towpath.consumer.breakers import KEYS_TO_OPEN, STORM_WINDOW
from towpath.settings import variables

PAGE = "docs/consuming.md"
PAGES = [PAGE, "docs/failures.md"]
TEXT = "".join((REPOSITORY / page).read_text(encoding="utf-8") for page in [*PAGES, "docs/ordering.md"])


def python() -> str:
    return "\n".join(block.text for page in PAGES for block in blocks(page) if block.language == "python")


def test_the_page_declares_a_group_without_problems() -> None:
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(python(), PAGE, "exec"), names)
    app = names["app"]
    assert isinstance(app, App)
    assert [] == app.problems()
    assert {"order.placed", "invoice.created", "charge.requested", "page.viewed"} == set(app.handlers)


def write_package(directory: Path) -> Path:
    """Write the pages' Python as billing/consumer.py below a directory."""
    (directory / "billing").mkdir()
    (directory / "billing" / "__init__.py").write_text("")
    (directory / "billing" / "consumer.py").write_text(python(), encoding="utf-8")
    return directory


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Where billing.consumer can be imported."""
    return write_package(tmp_path)


def console(verb: str) -> tuple[list[str], str]:
    """The page's `towpath worker <verb> …` as an argument vector, and what is shown below it."""
    found = [
        command for block in blocks(PAGE) if block.language == "console" for command in commands(block.text)
    ]
    (words, shown), *more = [
        (shlex.split(line), shown) for line, shown in found if line.startswith(f"towpath worker {verb} ")
    ]
    assert not more
    return [sys.executable, "-m", "towpath.cli", *words[1:]], shown


@pytest.mark.timeout(300)
def test_the_console_block_validates_the_group_of_the_page(package: Path) -> None:
    command, shown = console("validate")
    done = subprocess.run(command, cwd=package, capture_output=True, text=True, timeout=240, check=False)
    assert (0, shown) == (done.returncode, done.stdout), done.stderr


@pytest.mark.timeout(300)
def test_the_console_block_runs_the_group_of_the_page_until_it_is_told_to_stop(
    package: Path, migrated_url: str
) -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TOWPATH_", "OTEL_"))}
    process = subprocess.Popen(
        console("run")[0],
        cwd=package,
        env={**kept, "TOWPATH_DATABASE_URL": migrated_url, "TOWPATH_BROKER_URL": "memory://page"},
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    try:
        first = process.stderr.readline()
        assert "service.started" in first, first + process.stderr.read()
        process.send_signal(signal.SIGTERM)
        _, rest = process.communicate(timeout=240)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, rest


def test_settings_and_numbers_of_the_pages_are_true() -> None:
    named = set(re.findall(r"TOWPATH_[A-Z_]+", TEXT))
    assert named <= set(variables()), named - set(variables())
    assert ("five", 200) == ({5: "five"}[KEYS_TO_OPEN], STORM_WINDOW)
