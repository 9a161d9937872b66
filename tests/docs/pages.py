"""Fenced blocks of a documentation page, to be executed as a reader would."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from typing import Final

REPOSITORY: Final = Path(__file__).parents[2]
_FENCE: Final = re.compile(r"^( *)```([^\n`]*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_FILE: Final = re.compile(r"# (\S+\.\w+)\n")


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    language: str
    text: str
    line: int

    @property
    def file_name(self) -> str | None:
        """What its first line says it is, as in `# shop.py`."""
        match = _FILE.match(self.text)
        return None if match is None else match[1]


def blocks(page: str) -> list[Block]:
    """The blocks of a page, by its path from the repository, in their order."""
    return fenced((REPOSITORY / page).read_text(encoding="utf-8"))


def fenced(content: str) -> list[Block]:
    """The blocks of a text."""
    return [
        Block(match[2], dedent(match[3]), content.count("\n", 0, match.start()) + 1)
        for match in _FENCE.finditer(content)
    ]


def pages() -> list[str]:
    """Every page of the site, by its path from the repository."""
    return sorted(str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / "docs").rglob("*.md"))


def files(page: str) -> dict[str, str]:
    """The files a page tells its reader to write."""
    return {block.file_name: block.text for block in blocks(page) if block.file_name is not None}


def links(page: str) -> Iterator[str]:
    """Targets of a page's links that are files of the repository, without their anchors."""
    content = (REPOSITORY / page).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)]+)\)", content):
        if "://" not in target and not target.startswith("#"):
            yield target.partition("#")[0]


def commands(text: str) -> list[tuple[str, str]]:
    """Each command of a console block and what is shown below it."""
    parts = text.split("$ ")[1:]
    return [(part.partition("\n")[0], part.partition("\n")[2]) for part in parts]


def matches(expected: str, actual: str) -> bool:
    """Whether an output is as shown; `…` stands for any text within a line, spaces for any spaces."""

    def pattern(line: str) -> str:
        words = re.escape(" ".join(line.split())).replace("\\ ", r"\s+")
        return words.replace("…", ".*")

    wanted = [pattern(line) for line in expected.strip().splitlines()]
    found = [line.strip() for line in actual.strip().splitlines()]
    return len(wanted) == len(found) and all(
        re.fullmatch(each, line) is not None for each, line in zip(wanted, found, strict=True)
    )
