"""The help of every command: an example that may be typed, and the settings that it reads."""

import re
import shlex
from collections.abc import Iterator
from typing import Any

import pytest
from typer.main import get_command

from towpath.cli.root import app
from towpath.settings import variables
from towpath.telemetry.setup import TRACES_FILE_VARIABLE


def commands(command: Any = None, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Every command by its words."""
    command = command or get_command(app)
    if not hasattr(command, "commands"):
        yield " ".join(path), command
    else:
        for name, child in command.commands.items():
            yield from commands(child, (*path, name))


COMMANDS = dict(commands())


@pytest.mark.parametrize("name", COMMANDS)
def test_the_example_of_a_command_is_one_that_it_takes(name: str) -> None:
    """O1"""
    command = COMMANDS[name]
    printed = command.get_help(command.make_context(name, [], resilient_parsing=True, terminal_width=80))
    example = re.search(rf"^  (?:\w+=\S+ )*(towpath {name}.*)$", printed, re.MULTILINE)

    assert example is not None, "an example on a line of its own is missing"
    words = shlex.split(re.split(r" [|>] ", example[1])[0])
    command.make_context(name, words[1 + len(name.split()) :])


@pytest.mark.parametrize("name", sorted(COMMANDS.keys() - {"version"}))
def test_the_help_of_a_command_names_its_settings(name: str) -> None:
    """O1"""
    named = re.findall(r"TOWPATH_\w+", COMMANDS[name].epilog)
    known = [*variables(), TRACES_FILE_VARIABLE, "TOWPATH_CONFIG_FILE"]
    assert named or name == "doctor"
    assert all(any(variable.startswith(each) for variable in known) for each in named if each != "TOWPATH_")


BULK = {
    *("dlq replay", "dlq discard", "dlq import"),
    *("tasks retry", "tasks rerun"),
    "outbox republish",
}
"""What acts on as many rows as a filter or a file means."""


def test_every_bulk_action_takes_the_same_options() -> None:
    """O1"""
    options = {name: {each for p in command.params for each in p.opts} for name, command in COMMANDS.items()}
    assert {name for name, given in options.items() if "--max" in given} == BULK
    for name in BULK:
        assert {"--yes", "--dry-run", "--reason", "--max", "--rate", "--json"} <= options[name], name
