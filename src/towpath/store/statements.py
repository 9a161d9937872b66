"""Named SQL statements from `sql/*.sql`, with the schema name substituted.

The files are written for the schema `towpath` and can be run as they are in psql. A statement
starts at `-- name: <name>`; the comment lines below say what it is for, which locks it takes and
which index it relies on.
"""

import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Final

from towpath.errors import SettingsError

DEFAULT_SCHEMA: Final = "towpath"
_IDENTIFIER: Final = re.compile(r"[a-z_][a-z0-9_]{0,62}")
_SCHEMA_NAME: Final = re.compile(r"\btowpath\b(?=\.|;)|(?<=\bschema )towpath\b")
_BLOCK: Final = re.compile(r"^-- name: (\w+)$", re.MULTILINE)


def in_schema(sql: str, schema: str) -> str:
    """The text with every `towpath.` and `schema towpath` moved to `schema`.

    Raises SettingsError when `schema` is not a plain lower-case identifier: it is the only thing
    ever substituted into SQL.
    """
    if not _IDENTIFIER.fullmatch(schema) or schema.startswith("pg_"):
        raise SettingsError(f"the schema {schema!r} is not a plain lower-case identifier such as 'towpath'")
    return sql if schema == DEFAULT_SCHEMA else _SCHEMA_NAME.sub(schema, sql)


@cache
def load(family: str, schema: str = DEFAULT_SCHEMA) -> Mapping[str, str]:
    """The statements of `sql/<family>.sql` by name."""
    text = (files("towpath.store") / "sql" / f"{family}.sql").read_text(encoding="utf-8")
    parts = _BLOCK.split(in_schema(text, schema))
    return MappingProxyType(
        {name: body.strip().rstrip(";") for name, body in zip(parts[1::2], parts[2::2], strict=True)}
    )
