"""The parts of the reference that are read from the code while the site is built.

A page says `<!-- generated: cli -->` where the text of `PARTS["cli"]` belongs.
"""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from typer.main import get_command

from towpath import errors
from towpath.cli import exits
from towpath.cli.root import app

INTERNAL: Final = (
    r"towpath\.((app\._|brokers|decorators|failures|handlers|messages|store|outbox|context\.(_|Beginning|Settling)).*"
    r"|tasks\.reading\.TaskId|\w+\.[A-Z](_co)?)"
)
"""Names that signatures mention and the reference does not describe."""
_VERBATIM: Final = "\b\n"
"""Begins a paragraph of a help text that is not folded: an example."""
_MARKER: Final = re.compile(r"^<!-- generated: (\w+) -->$", re.MULTILINE)


def filled(source: str) -> str:
    """A page with its markers replaced."""
    return _MARKER.sub(lambda match: PARTS[match[1]](), source)


def commands(command: Any = None, path: str = "towpath") -> Iterator[tuple[str, Any]]:
    """Every command with its path, groups before what they hold."""
    command = get_command(app) if command is None else command
    if not command.hidden:
        yield path, command
        for name, below in getattr(command, "commands", {}).items():
            yield from commands(below, f"{path} {name}")


def cli() -> str:
    """Every command: what it does, its arguments and options."""
    parts = []
    for path, command in commands():
        depth = min(path.count(" ") + 2, 4)
        parts += [f"{'#' * depth} {path}", _help(command.help or "")]
        if not hasattr(command, "commands") or path == "towpath":
            parts.append(_parameters([each for each in command.params if not getattr(each, "hidden", False)]))
    return "\n\n".join(part for part in parts if part)


def exit_codes() -> str:
    """The table that the module of exit codes draws."""
    table = inspect.cleandoc(exits.__doc__ or "").partition("\n\n")[2]
    return table.strip()


def _help(text: str) -> str:
    """Paragraphs; one that is a command line becomes a block."""
    paragraphs = [part.strip() for part in inspect.cleandoc(text).split("\n\n")]
    return "\n\n".join(
        f"```text\n{part.removeprefix(_VERBATIM)}\n```"
        if part.startswith((_VERBATIM, "towpath "))
        else _escaped(part)
        for part in paragraphs
    )


def _parameters(parameters: list[Any]) -> str:
    if not parameters:
        return ""
    rows = [
        [_spelled(each), _escaped(each.help or ""), _default(each), _variables(each)] for each in parameters
    ]
    heads = ["", "", "default", "variable"]
    kept = [0, 1, *(column for column in (2, 3) if any(row[column] for row in rows))]
    return _table([[heads[column] for column in kept], *([row[column] for column in kept] for row in rows)])


def _spelled(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        name = parameter.metavar or parameter.name.upper()
        return f"`{name}`" + ("" if parameter.required else ", optional")
    names = [*parameter.opts, *parameter.secondary_opts]
    value = "" if parameter.is_flag or parameter.count else " …"
    return ", ".join(f"`{name}{value}`" for name in names) + (", required" if parameter.required else "")


def _default(parameter: Any) -> str:
    default = parameter.default
    if parameter.required or default in (None, "", False) or callable(default) or parameter.count:
        return ""
    return f"`{default}`"


def _variables(parameter: Any) -> str:
    given = parameter.envvar or ()
    return ", ".join(f"`{name}`" for name in ([given] if isinstance(given, str) else given))


def error_classes(
    cls: type[errors.TowpathError] = errors.TowpathError,
) -> Iterator[type[errors.TowpathError]]:
    """The tree, depth first, in the order of its declaration."""
    yield cls
    for below in cls.__subclasses__():
        if below.__module__ == errors.__name__:
            yield from error_classes(below)


def error_tree() -> str:
    """The drawing in the module's docstring."""
    return inspect.cleandoc(errors.__doc__ or "").partition("\n\n")[2]


def error_reference() -> str:
    """Each class: code, whether trying again may help, when it is raised and what to do."""
    parts = []
    for cls in error_classes():
        parts.append(f"```{{eval-rst}}\n.. autoexception:: {cls.__module__}.{cls.__name__}\n```")
        retry = "trying again may help" if cls.retryable else "trying again does not help"
        parts.append(f"`{cls.code}`, {retry}")
    return "\n\n".join(parts)


def _escaped(text: str) -> str:
    return re.sub(r"([<>*|\[\]])", r"\\\1", " ".join(text.split()))


def _table(rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


PARTS: Final[Mapping[str, Callable[[], str]]] = {
    "cli": cli,
    "exit_codes": exit_codes,
    "error_tree": error_tree,
    "errors": error_reference,
}
