"""The names of `towpath`, which are imported when they are asked for."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import towpath


def test_a_name_is_at_runtime_what_type_checkers_take_it_for() -> None:
    assert towpath.__file__ is not None
    imported = [
        (node.module, name.name)
        for node in ast.walk(ast.parse(Path(towpath.__file__).read_text()))
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("towpath.")
        for name in node.names
    ]

    homes = [(f"towpath.{home}", name) for home, names in towpath._HOMES.items() for name in names]
    assert homes == imported
    assert sorted(towpath.__all__) == sorted(["tasks", *(name for _, name in homes)])


def test_every_name_is_found_and_listed() -> None:
    names: dict[str, object] = {}
    exec("from towpath import *", names)
    assert set(towpath.__all__) <= set(names)
    assert set(towpath.__all__) <= set(dir(towpath))
    with pytest.raises(AttributeError, match="module 'towpath' has no attribute 'emits'"):
        towpath.emits  # type: ignore[attr-defined]  # noqa: B018


def test_importing_the_package_loads_no_other() -> None:
    """S4: so that an entry point can handle signals before anything that takes its time."""
    program = (
        "import sys; before = set(sys.modules); import towpath, towpath.cli;"
        "print(*{name.partition('.')[0] for name in set(sys.modules) - before} - sys.stdlib_module_names)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "towpath\n"


def test_the_relay_and_the_command_line_load_no_sqlalchemy() -> None:
    """A health check is a command line, every ten seconds beside each process."""
    program = "import sys, towpath.cli.root, towpath.relay.service; print('sqlalchemy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
