"""The shape of the schema in a database, compared with the shape the migrations make.

Deparsed text is what this server prints for its own catalog; view bodies and NOT NULL constraints
are left out, because server versions print or store them differently (columns of views and the
not-null flag of columns are compared).
"""

import json
from collections.abc import Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, Final, TypeAlias

from sqlalchemy import Connection, text

from towpath.store.statements import in_schema, load

Fingerprint: TypeAlias = Mapping[str, Any]

PATH: Final = Path(str(files("towpath.store.migrations"))) / "fingerprint.json"

_TOLD_LIMIT: Final = 200

PARTS: Final = ("relations", "columns", "constraints", "indexes", "functions", "triggers")


def read(connection: Connection, schema: str) -> Fingerprint:
    """The shape of `schema` in this database, with empty parts when it is absent."""
    # With an empty path every name in a deparsed text is qualified, whoever asks.
    connection.execute(text("select set_config('search_path', '', true)"))
    statements = load("fingerprint")
    return {
        part: {row.name: row.value for row in connection.exec_driver_sql(statements[part], (schema,))}
        for part in PARTS
    }


def expected(schema: str) -> Fingerprint:
    """The shape that the newest migration makes."""
    shape: Fingerprint = json.loads(in_schema(PATH.read_text(encoding="utf-8"), schema))
    return shape


def dump(shape: Fingerprint) -> str:
    """The text that is committed: sorted, one fact a line."""
    parts = []
    for part in PARTS:
        facts = (
            f"  {json.dumps(name)}: {json.dumps(fact, sort_keys=True)}"
            for name, fact in sorted(shape[part].items())
        )
        parts.append(f" {json.dumps(part)}: {{\n" + ",\n".join(facts) + "\n }")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def differences(wanted: Fingerprint, found: Fingerprint) -> Iterator[str]:
    """One line for each thing missing, unexpected or other than wanted."""
    for part in sorted(wanted.keys() | found.keys()):
        want, have = wanted.get(part, {}), found.get(part, {})
        noun = part.removesuffix("s") if part != "indexes" else "index"
        for name in sorted(want.keys() | have.keys()):
            if name not in have:
                yield f"{noun} {name} is missing"
            elif name not in want:
                yield f"{noun} {name} is not part of the schema"
            elif want[name] != have[name]:
                yield from _changed(f"{noun} {name}", want[name], have[name])


def _changed(what: str, want: object, have: object) -> Iterator[str]:
    if isinstance(want, dict) and isinstance(have, dict):
        for field in sorted(want.keys() | have.keys()):
            if want.get(field) != have.get(field):
                yield f"{what}: {field} {_told(want.get(field), have.get(field))}"
    else:
        yield f"{what} {_told(want, have)}"


def _told(want: object, have: object) -> str:
    if len(repr(want)) + len(repr(have)) > _TOLD_LIMIT:
        return "is another one"
    return f"is {have!r}, expected {want!r}"
