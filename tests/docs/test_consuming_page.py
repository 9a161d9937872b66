"""docs/consuming.md, then docs/failures.md: their Python runs as it stands, and what they name exists."""

import re
import shlex
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


@pytest.mark.timeout(300)
def test_the_console_block_validates_the_group_of_the_page(tmp_path: Path) -> None:
    package = tmp_path / "billing"
    package.mkdir()
    (package / "__init__.py").write_text("")
    source = python()
    (package / "consumer.py").write_text(source, encoding="utf-8")
    (block,) = [each for each in blocks(PAGE) if each.language == "console" and each.excuse is None]
    ((line, shown),) = commands(block.text)
    command = [sys.executable, "-m", "towpath.cli", *shlex.split(line)[1:]]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert (0, shown) == (done.returncode, done.stdout), done.stderr


def test_settings_and_numbers_of_the_pages_are_true() -> None:
    named = set(re.findall(r"TOWPATH_[A-Z_]+", TEXT))
    assert named <= set(variables()), named - set(variables())
    assert ("five", 200) == ({5: "five"}[KEYS_TO_OPEN], STORM_WINDOW)
