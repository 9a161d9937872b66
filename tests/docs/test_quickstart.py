"""docs/quickstart.md, followed by a shell from the first block to the last."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Final

import pytest

from tests.docs.pages import Block, blocks, matches

pytestmark = [pytest.mark.slow, pytest.mark.services, pytest.mark.timeout(720)]

PAGE: Final = "docs/quickstart.md"
_MARK: Final = "=== block at line "
_WHILE_THE_READER_READS: Final = {
    # Nobody has waited for the events, which come beside the tasks.
    "towpath tasks list\n": "until [ $(towpath tasks list | grep -c SUCCEEDED) = 2 ]; do sleep 0.2; done",
}


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[Mapping[str, str]]:
    """A shell's, with a cache of its own: the servers must not be those of another run."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TOWPATH_", "OTEL_"))}
    environment = {
        **kept,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{kept['PATH']}",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    yield environment
    subprocess.run([sys.executable, "-m", "towpath.testing.services", "down"], env=environment, check=True)


def test_a_reader_who_follows_the_page_sees_what_it_shows(
    tmp_path: Path, environment: Mapping[str, str]
) -> None:
    page = blocks(PAGE)
    directory = tmp_path / "empty"
    directory.mkdir()
    assert {block.text for block in page} >= _WHILE_THE_READER_READS.keys()
    printed = _follow(page, directory, environment)
    shown = [
        (block, before)
        for before, block in pairwise(page)
        if block.language == "text" and before.language == "sh"
    ]
    assert shown
    for block, command in shown:
        actual = printed[command.line]
        assert matches(block.text, actual), f"{PAGE}:{block.line} shows\n{block.text}\nbut it was\n{actual}"


def test_every_block_of_the_page_is_one_that_is_executed_or_compared() -> None:
    page = blocks(PAGE)
    assert {block.language for block in page} == {"sh", "python", "text"}
    assert all(block.file_name for block in page if block.language == "python")


def _follow(page: list[Block], directory: Path, environment: Mapping[str, str]) -> dict[int, str]:
    """What each command block printed, by its line in the page."""
    script = ["set -euo pipefail", "trap 'jobs=$(jobs -p); [ -z \"$jobs\" ] || kill $jobs' EXIT"]
    for block in page:
        if block.language == "sh":
            script.append(_WHILE_THE_READER_READS.get(block.text, ""))
            script += [f"echo '{_MARK}{block.line}'", block.text]
        elif block.file_name is not None:
            script += [f"cat > {block.file_name} <<'END_OF_FILE'", f"{block.text}END_OF_FILE"]
    done = subprocess.run(
        ["bash", "-c", "\n".join(script)],
        cwd=directory,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        check=False,
    )
    logs = {path.name: path.read_text()[-3000:] for path in directory.glob("*.log")}
    assert done.returncode == 0, f"{done.stdout}\n{logs}"
    sections = [part.partition("\n") for part in done.stdout.split(_MARK)[1:]]
    return {int(line): text for line, _, text in sections}
