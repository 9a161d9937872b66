"""Reading the settings: what is wrong with them is told in one line, all together, without a secret."""

import difflib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from pydantic import BaseModel, ValidationError
from pydantic_settings.exceptions import SettingsError as SourceError

from towpath.errors import SettingsError
from towpath.settings.file import values_of_file
from towpath.settings.model import FILE_VARIABLE, PREFIX, Settings
from towpath.settings.types import DATABASE_EXAMPLE

_FOREIGN: Final = ("TOWPATH_TEST_", "TOWPATH_CRASH_")
"""Read by the test tooling, not by the deployables."""
_FREE: Final = f"{PREFIX}BROKER_OPTIONS"
"""Its keys are the client library's."""


def load(**values: Any) -> Settings:
    """The settings from environment and file; `values` win over both.

    Raises SettingsError in one line that names every wrong variable or key; it never shows a secret.
    """
    file = os.environ.get(FILE_VARIABLE)
    given = values_of_file(file, FILE_VARIABLE)
    unknown = [*_unknown(os.environ), *(f"{line} (in {file})" for line in _unknown_keys(given))]
    if unknown:
        raise SettingsError("; ".join(unknown))
    try:
        return Settings(**values)
    except ValidationError as error:
        raise SettingsError("; ".join(_explained(error, given, file))) from None
    except SourceError as error:
        name = re.search(r'field "(\w+)"', str(error))
        variable = PREFIX + name[1].upper() if name else "a variable"
        raise SettingsError(f"{variable} is not valid JSON") from None


def load_offline() -> Settings:
    """The settings for what needs no database, whether one is named or not. Raises SettingsError."""
    return load(database_url="postgresql://localhost")


def variables(model: type[BaseModel] = Settings, prefix: str = PREFIX) -> Iterator[str]:
    """The environment variables that are read, in the order of their declaration."""
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from variables(field.annotation, f"{prefix}{name.upper()}__")
        else:
            yield f"{prefix}{name.upper()}"


def key_of(variable: str) -> str:
    """How the file spells a setting: `relay.poll_max`."""
    return variable.removeprefix(PREFIX).replace("__", ".").lower()


def _unknown(environment: Iterable[str]) -> Iterator[str]:
    known = [*variables(), FILE_VARIABLE]
    sections = {name.partition("__")[0] for name in known if "__" in name}
    for given in sorted(environment):
        name = given.upper()
        if not name.startswith(PREFIX) or name.startswith(_FOREIGN) or name in known or name in sections:
            continue
        if not name.startswith(f"{_FREE}__"):
            yield _not_a_setting(given, name, known)


def _unknown_keys(tree: Mapping[str, Any]) -> Iterator[str]:
    known = list(map(key_of, variables()))
    for key in _keys(tree):
        is_table = any(name.startswith(f"{key}.") for name in known)
        if not is_table and key not in known and not key.startswith(f"{key_of(_FREE)}."):
            yield _not_a_setting(key, key, known)


def _keys(tree: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _keys(value, f"{prefix}{name}.")
        else:
            yield prefix + name


def _not_a_setting(given: str, name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    hint = f", did you mean {close[0]}?" if close else ", see towpath config show for those that are"
    return f"{given} is not a setting{hint}"


def _explained(error: ValidationError, given: Mapping[str, Any], file: str | None) -> Iterator[str]:
    from_file = set(_keys(given))
    for detail in error.errors(include_url=False, include_input=False, include_context=False):
        name = PREFIX + "__".join(str(part).upper() for part in detail["loc"])
        if detail["type"] == "missing":
            yield f"{name} is not set, export for example {name}={DATABASE_EXAMPLE}"
            continue
        is_from_file = key_of(name) in from_file and name not in map(str.upper, os.environ)
        place = f"{key_of(name)} in {file}" if is_from_file else name
        yield f"{place} {detail['msg'].removeprefix('Value error, ')}"
