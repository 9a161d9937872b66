"""The least-privilege roles: who needs which grant. Printed for a person, never run by the library."""

import re
from collections.abc import Iterator
from importlib.resources import files
from typing import Any, Final, NamedTuple

import asyncpg

from towpath.errors import UsageError
from towpath.store.statements import in_schema, load


def grants(schema: str, prefix: str = "towpath") -> str:
    """The SQL of `sql/roles.sql` for one schema, its roles named `<prefix>_producer` and so on.

    Raises UsageError for a prefix that is not a plain lower-case identifier.
    """
    if not re.fullmatch(r"[a-z_][a-z0-9_]{0,50}", prefix) or prefix.startswith("pg_"):
        raise UsageError(f"the prefix {prefix[:60]!r} is not a plain lower-case identifier such as 'towpath'")
    text = in_schema((files("towpath.store") / "sql" / "roles.sql").read_text(encoding="utf-8"), schema)
    text = re.sub(r"\bschema towpath\b", f"schema {schema}", text)
    return re.sub(r"\btowpath_(?=producer|relay|worker|operator|reader)", f"{prefix}_", text)


ROLES: Final = ("producer", "reader", "relay", "worker", "operator")
_GRANT: Final = re.compile(r"grant (?P<what>.+) on (?P<on>.+) to (?P<to>[\w, ]+)", re.DOTALL)
_MEMBER: Final = re.compile(r"grant towpath_(\w+) to towpath_(\w+)")
_KINDS: Final = ("schema", "function", "sequence")


class Grant(NamedTuple):
    """One privilege on one thing; `column` where it is for one column of a table alone."""

    kind: str
    thing: str
    privilege: str
    column: str | None


def needed(schema: str) -> dict[str, set[Grant]]:
    """What each role is granted, out of the same SQL; grants on all tables are left out."""
    found: dict[str, set[Grant]] = {role: set() for role in ROLES}
    text = " ".join(re.sub(r"--.*", "", grants(schema)).split())
    for statement in map(str.strip, text.split(";")):
        if member := _MEMBER.fullmatch(statement):
            found[member[2]] |= found[member[1]]
        elif (match := _GRANT.fullmatch(statement)) and not match["on"].startswith("all "):
            for role in re.findall(r"towpath_(\w+)", match["to"]):
                found[role].update(_privileges(match["what"], match["on"]))
    return found


def _privileges(what: str, on: str) -> Iterator[Grant]:
    kind = next((kind for kind in _KINDS if on.startswith(f"{kind} ")), "table")
    things = re.findall(r"[\w.]+(?:\([^)]*\))?", on.removeprefix(f"{kind} "))
    for privilege, columns in re.findall(r"(\w+)(?:\s*\(([^)]*)\))?", what):
        for column in columns.split(", ") if columns else [None]:
            for thing in things:
                yield Grant("column" if column else kind, thing, privilege, column)


async def lacking(connection: "asyncpg.Connection[Any]", schema: str) -> dict[str, tuple[list[str], int]]:
    """For each role: what the login lacks to act as it, and how many grants it has beyond every role's."""
    wanted = needed(schema)
    every = sorted(set[Grant]().union(*wanted.values()), key=str)
    rows = await connection.fetch(load("operator", schema)["lacking"], *map(list, zip(*every, strict=True)))
    common = set.intersection(*wanted.values())
    missing = {Grant(row["kind"], row["thing"], row["privilege"], row["column"]) for row in rows}
    return {
        role: (
            sorted({f"{each.privilege} on {each.thing}" for each in role_grants & missing}),
            len(role_grants - common),
        )
        for role, role_grants in wanted.items()
    }
