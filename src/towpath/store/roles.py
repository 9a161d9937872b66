"""The least-privilege roles: who needs which grant. Printed for a person, never run by the library."""

import re
from importlib.resources import files

from towpath.errors import UsageError
from towpath.store.statements import in_schema


def grants(schema: str, prefix: str = "towpath") -> str:
    """The SQL of `sql/roles.sql` for one schema, its roles named `<prefix>_producer` and so on.

    Raises UsageError for a prefix that is not a plain lower-case identifier.
    """
    if not re.fullmatch(r"[a-z_][a-z0-9_]{0,50}", prefix) or prefix.startswith("pg_"):
        raise UsageError(f"the prefix {prefix[:60]!r} is not a plain lower-case identifier such as 'towpath'")
    text = in_schema((files("towpath.store") / "sql" / "roles.sql").read_text(encoding="utf-8"), schema)
    text = re.sub(r"\bschema towpath\b", f"schema {schema}", text)
    return re.sub(r"\btowpath_(?=producer|relay|worker|operator|reader)", f"{prefix}_", text)
