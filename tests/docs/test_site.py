"""The site is built as `make docs` builds it: warnings, dead links and orphaned pages are errors."""

import re
import subprocess
import sys
from html import unescape
from pathlib import Path

import pytest
from sphinx.util.inventory import InventoryFile

import towpath
from docs.generated import commands, error_classes
from tests.docs.pages import REPOSITORY

pytestmark = [pytest.mark.slow, pytest.mark.timeout(660)]

BUILD = [sys.executable, "-m", "sphinx", "-q", "-n", "-W", "--keep-going"]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its pages, built once."""
    out = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [*BUILD, "-d", str(out / "doctrees"), "docs", str(out / "html")],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return out / "html"


def text_of(page: Path) -> str:
    """A page without its markup."""
    return " ".join(unescape(re.sub(r"<[^>]+>", "", page.read_text(encoding="utf-8"))).split())


def test_every_page_is_built_and_every_link_and_anchor_leads_somewhere(site: Path) -> None:
    pages = {
        path.relative_to(REPOSITORY / "docs").with_suffix(".html")
        for path in (REPOSITORY / "docs").rglob("*.md")
    }
    assert all((site / page).is_file() for page in pages)
    assert not [
        page for page in site.rglob("*.html") if "<!-- generated:" in page.read_text(encoding="utf-8")
    ]


def test_each_public_name_is_in_the_reference(site: Path) -> None:
    inventory = InventoryFile.loads((site / "objects.inv").read_bytes(), uri="")
    described = {name for kind, names in inventory.data.items() if kind.startswith("py:") for name in names}
    missing = {f"towpath.{name}" for name in towpath.__all__} - described
    assert missing == {"towpath.TowpathError"}  # an error, below
    assert {f"towpath.tasks.{name}" for name in towpath.tasks.__all__} - described <= {
        "towpath.tasks.TaskHandle",
        "towpath.tasks.TaskId",
    }
    assert {f"towpath.errors.{cls.__name__}" for cls in error_classes()} <= described


def test_every_block_of_python_in_the_reference_is_one_that_a_test_runs(site: Path) -> None:
    """Of `tasks`, in test_producing_page.py; errors and commands have none."""
    made = "".join(path.read_text(encoding="utf-8") for path in (site / "reference").glob("*.html"))
    assert made.count('<div class="highlight-python notranslate">') == 1


def test_each_command_option_and_error_code_is_in_the_reference(site: Path) -> None:
    cli = text_of(site / "reference" / "cli.html")
    for path, command in commands():
        assert path in cli
        assert all(name in cli for each in command.params for name in each.opts if name.startswith("-"))
    errors = text_of(site / "reference" / "errors.html")
    assert [cls.code for cls in error_classes() if cls.code not in errors] == []


def test_a_dead_link_would_break_the_build(tmp_path: Path) -> None:
    (tmp_path / "conf.py").write_text('extensions = ["myst_parser"]\nmyst_heading_anchors = 3\n')
    (tmp_path / "index.md").write_text("# Top\n\n[there](#nowhere)\n")
    done = subprocess.run([*BUILD, str(tmp_path), str(tmp_path / "out")], capture_output=True, check=False)
    assert done.returncode == 1
    assert b"nowhere" in done.stderr
