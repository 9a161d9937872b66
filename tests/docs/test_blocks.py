"""No block of the documentation is only there to be believed."""

import re
import shlex

import pytest

from benchmarks.__main__ import parser
from docs.generated import commands as command_tree
from tests.docs.pages import REPOSITORY, Block, blocks, pages
from tests.docs.test_operations import OF_A_LOST_DATABASE, OF_BENCHMARKS, OF_IMAGES, OF_STAGED_STATES
from tests.docs.test_operations import PAGES as PAGES_OF_COMMANDS

PAGES = ["README.md", *pages()]
EXECUTED = {
    "README.md": {"python", "sh"},  # test_readme.py
    "docs/consuming.md": {"python", "console"},  # test_consuming_page.py
    "docs/failures.md": {"python"},  # test_consuming_page.py
    "docs/ordering.md": {"python"},  # test_producing_page.py
    "docs/producing.md": {"python", "sql", "sh"},  # test_producing_page.py
    "docs/quickstart.md": {"python", "sh"},  # test_quickstart.py
    **{page: {"console"} for page in PAGES_OF_COMMANDS},  # test_operations.py
    **{page: {"console"} for page in OF_STAGED_STATES},  # test_staged_pages.py
    OF_A_LOST_DATABASE: {"console", "sh"},  # test_backup_page.py
    OF_BENCHMARKS: {"console"},  # test_performance_page.py
    OF_IMAGES: {"console"},  # tests/deployment/test_images.py
    "docs/reliability.md": {"sh"},  # tests/faults/test_faults.py
    "docs/settings.md": {"console", "toml"},  # the latter in tests/unit/test_settings.py
}
_LOOKS_LIKE_A_COMMAND = re.compile(r"^(\$ |towpath |python -m |docker |kubectl |make )", re.MULTILINE)
_FENCED = re.compile(r"^( *)```.*?^\1```$", re.MULTILINE | re.DOTALL)
OPTIONS = {
    path: {name for each in command.params for name in (*each.opts, *each.secondary_opts)} | {"--help", "-h"}
    for path, command in command_tree()
}
REQUIRED = {
    path: [each.opts for each in command.params if each.required and each.opts[0].startswith("-")]
    for path, command in command_tree()
}
TARGETS = set(re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
GROUPS = {path for path, command in command_tree() if hasattr(command, "commands")}


@pytest.mark.parametrize("page", PAGES)
def test_each_block_is_executed(page: str) -> None:
    wrong = [
        f"{page}:{block.line} is {block.language or 'without a language'}: no test executes it. Make it "
        "console with its output, or text if it is a picture"
        for block in blocks(page)
        if not is_accounted_for(page, block)
    ]
    assert wrong == []


@pytest.mark.parametrize("page", PAGES)
def test_a_benchmark_named_in_the_text_takes_its_arguments(page: str) -> None:
    for span in spans(page, "python -m benchmarks "):
        parser().parse_args(shlex.split(span)[3:])


@pytest.mark.parametrize("page", PAGES)
def test_a_target_of_make_named_in_the_text_exists(page: str) -> None:
    named = {word for span in spans(page, "make ") for word in shlex.split(span)[1:] if "=" not in word}
    assert named <= TARGETS


@pytest.mark.parametrize("page", PAGES)
def test_a_command_named_in_the_text_exists_and_is_complete(page: str) -> None:
    wrong = [
        f"{page}: `{span}`: {problem}"
        for span in spans(page, "towpath ")
        if (problem := problem_of_span(span))
    ]
    assert wrong == []


def test_an_incomplete_command_in_the_text_would_be_found() -> None:
    assert problem_of_span("towpath tasks cancel ID") == "towpath tasks cancel needs --group"
    assert problem_of_span("towpath tasks cancel ID --group …") is None
    assert problem_of_span("towpath tasks cancel") is None
    assert problem_of_span("towpath dlq list --all-of-it") == "towpath dlq list has no --all-of-it"


def test_a_command_or_an_option_that_does_not_exist_would_be_found() -> None:
    assert problem_of(["towpath", "dlq", "resurrect"]) == "there is no towpath dlq resurrect"
    assert problem_of(["towpath", "dlq", "list", "--all-of-it"]) == "towpath dlq list has no --all-of-it"
    assert problem_of(["towpath", "dlq", "list", "--group", "billing"]) is None


def is_accounted_for(page: str, block: Block) -> bool:
    """Executed, or something that nobody could execute."""
    if block.language.startswith("{"):
        return True
    if block.language == "text":
        return page in ("README.md", "docs/quickstart.md") or not _LOOKS_LIKE_A_COMMAND.search(block.text)
    return block.language in EXECUTED.get(page, ())


def spans(page: str, command: str) -> list[str]:
    """Commands in backticks within the text of a page, but for those with options of `towpath` itself."""
    text = _FENCED.sub("", (REPOSITORY / page).read_text(encoding="utf-8"))
    return [" ".join(span.split()) for span in re.findall(rf"`({command}[a-z][^`]*)`", text)]


def problem_of_span(span: str) -> str | None:
    """What is wrong with a command in the text; a bare name is no line to type, so it may lack options."""
    words = shlex.split(span)
    path = path_of(words)
    if path in GROUPS and len(words) <= len(path.split()):
        return None
    if (problem := problem_of(words)) or words == path.split():
        return problem
    missing = [names[0] for names in REQUIRED[path] if not set(names) & set(words)]
    return f"{path} needs {missing[0]}" if missing else None


def path_of(words: list[str]) -> str:
    """The command that the words begin with."""
    path = "towpath"
    for word in words[1:3]:
        if f"{path} {word}" in OPTIONS:
            path = f"{path} {word}"
    return path


def problem_of(words: list[str]) -> str | None:
    """What is wrong with a command line; None if nothing is."""
    path = path_of(words)
    if path in GROUPS:
        return f"there is no {' '.join(words[:3])}"
    unknown = [word for word in words if word.startswith("-") and word.split("=")[0] not in OPTIONS[path]]
    return f"{path} has no {unknown[0]}" if unknown else None
