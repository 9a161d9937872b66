"""Pages for operators: every console block shows what the commands print."""

import asyncio
import re
import shlex
from typing import Any

import asyncpg
import pytest

from tests.docs.pages import Block, blocks, commands, pages
from tests.fixtures.fix_cli import Run
from tests.fixtures.graveyard import bury
from towpath.cli.exits import FAILED, USAGE

ON_AN_EMPTY_DATABASE = ["docs/operating/upgrading.md"]


def shown(page: str) -> list[Block]:
    """What the page says that commands print."""
    return [block for block in blocks(page) if block.language == "console"]


OF_STAGED_STATES = ["docs/operating/doctor.md", "docs/operating/offsets.md", "docs/operating/unknown.md"]
"""Need more than rows: test_staged_pages.py."""
OF_A_LOST_DATABASE = "docs/backup-and-restore.md"
"""Is followed from the dump on: test_backup_page.py."""
OF_IMAGES = "docs/deploying.md"
"""Is run in their layout: tests/deployment/test_images.py."""
OF_BENCHMARKS = "docs/performance.md"
"""test_performance_page.py"""
ELSEWHERE = ["docs/consuming.md", OF_A_LOST_DATABASE, OF_IMAGES, OF_BENCHMARKS, *OF_STAGED_STATES]
PAGES = [page for page in pages() if page not in ELSEWHERE and shown(page)]


async def something_happened(url: str) -> None:
    """Messages that no relay publishes, and messages that died."""
    db: asyncpg.Connection[Any] = await asyncpg.connect(url)
    for key in ("o-1", "o-1", "o-1"):
        await db.execute("select towpath.emit('orders', 'order.placed', '{}', $1)", key)
    await bury(db, ["o-1", "o-1", "o-2"])
    await bury(
        db,
        ["p-9"],
        group="shipping",
        type_="parcel.sent",
        stage="decode",
        reason="not_json",
        message="unexpected byte at 0",
        fingerprint="91d0f7b2a6c3e845",
    )
    await db.close()


@pytest.mark.parametrize("page", PAGES)
def test_a_page_shows_what_the_commands_print(
    page: str, towpath: Run, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    if page in ON_AN_EMPTY_DATABASE:
        monkeypatch.setenv("TOWPATH_DATABASE_URL", request.getfixturevalue("database_url"))
    else:
        asyncio.run(something_happened(request.getfixturevalue("migrated_url")))
    follow(page, towpath)


def follow(page: str, towpath: Run, **replaced: str) -> None:
    """Run each command of a page, with words of it replaced, and compare what it prints."""

    def own(text: str) -> str:
        for word, value in replaced.items():
            text = text.replace(word, value)
        return text

    for block in shown(page):
        for line, output in commands(own(block.text)):
            ran = towpath(*shlex.split(line)[1:])
            assert ran.code not in (FAILED, USAGE), ran.err
            assert is_as_shown(output, ran.out), (
                f"{page}:{block.line} {line}\nprinted\n{ran.out}\nand shows\n{output}"
            )


def is_as_shown(output: str, printed: str) -> bool:
    """Like `pages.matches`; a line `…` alone stands for any number of lines."""

    def pattern(line: str) -> str:
        return re.escape(" ".join(line.split())).replace("\\ ", r"\s+").replace("…", ".*")

    lines = [line.strip() for line in output.strip().splitlines()]
    whole = r"\n".join(r"(?:.*\n)*?.*" if line == "…" else pattern(line) for line in lines)
    return re.fullmatch(whole, "\n".join(line.strip() for line in printed.strip().splitlines())) is not None
