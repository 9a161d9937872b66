"""The parts of the reference that are read from the code while the site is built.

A page says `<!-- generated: cli -->` where the text of `PARTS["cli"]` belongs.
"""

import inspect
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo
from typer.main import get_command

from towpath import errors
from towpath import settings as declared
from towpath.cli import exits
from towpath.cli.root import app

INTERNAL: Final = (
    r"towpath\.((app\._|brokers|failures|handlers|messages|store|outbox|context\.(_|Beginning|Settling)).*"
    r"|tasks\.reading\.TaskId|\w+\.[A-Z](_co)?)"
)
"""Names that signatures mention and the reference does not describe."""
_MARKER: Final = re.compile(r"^<!-- generated: (\w+) -->$", re.MULTILINE)


def filled(source: str) -> str:
    """A page with its markers replaced."""
    return _MARKER.sub(lambda match: PARTS[match[1]](), source)


# The command line


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
        f"```text\n{part}\n```" if part.startswith("towpath ") else _escaped(part) for part in paragraphs
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


# Settings


def settings() -> str:
    """A table for each section: variable, what it takes, default, meaning."""
    top, sections = [], []
    for name, field in declared.Settings.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            sections.append((name, field.annotation))
        else:
            top.append(_setting(declared.PREFIX, name, field))
    parts = [_table([_HEADS, *top])]
    for name, model in sections:
        prefix = f"{declared.PREFIX}{name.upper()}__"
        rows = list(_settings_of(model, prefix))
        parts += [f"## `{prefix}…`", inspect.cleandoc(model.__doc__ or ""), _table([_HEADS, *rows])]
    return "\n\n".join(parts)


_HEADS: Final = ["variable", "takes", "default", "what it sets"]


def _settings_of(model: type[BaseModel], prefix: str) -> Iterator[list[str]]:
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _settings_of(field.annotation, f"{prefix}{name.upper()}__")
        else:
            yield _setting(prefix, name, field)


def _setting(prefix: str, name: str, field: FieldInfo) -> list[str]:
    takes = _takes(field)
    return [
        f"`{prefix}{name.upper()}`",
        takes,
        _shown_default(field, takes),
        (field.description or "").strip(),
    ]


def _takes(field: FieldInfo) -> str:
    bounds = {
        name: getattr(each, name)
        for each in field.metadata
        for name in ("ge", "le")
        if getattr(each, name, None) is not None
    }
    if any(getattr(each, "func", None) is declared.parse_size for each in field.metadata):
        return "size"
    return _named(field.annotation) + (f" ≥ {bounds['ge']}" if bounds.get("ge") else "")


def _named(annotation: Any) -> str:
    """A type as people say it."""
    if typing.get_origin(annotation) is typing.Literal:
        return ", ".join(f"`{value}`" for value in typing.get_args(annotation))
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return _named(next(each for each in typing.get_args(annotation) if each is not type(None)))
    if typing.get_origin(annotation) is not None:
        annotation = typing.get_origin(annotation)
    return _WORDS.get(annotation, annotation.__name__)


_WORDS: Final[Mapping[Any, str]] = {
    SecretStr: "secret",
    bool: "`true`, `false`",
    dict: "JSON object",
    int: "number",
    float: "number",
    str: "text",
    timedelta: "duration",
    Path: "path",
}


def _shown_default(field: FieldInfo, takes: str) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, SecretStr):
        value = value.get_secret_value()
    if isinstance(value, timedelta):
        return f"`{_duration(value)}`"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value:,}`" if takes == "size" else "" if value in (None, "", {}) else f"`{value}`"


def _duration(value: timedelta) -> str:
    seconds = value.total_seconds()
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= size and seconds % size == 0:
            return f"{seconds / size:g}{unit}"
    return f"{seconds:g}s" if seconds >= 1 or not seconds else f"{seconds * 1000:g}ms"


# Errors


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
    "settings": settings,
    "error_tree": error_tree,
    "errors": error_reference,
}
