"""What this installation is and where its destinations are.

A destination without a row is its own address, at the default broker.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from towpath.store.database import Database, store_errors
from towpath.store.statements import in_schema

_ADDRESSES = "select name, address from towpath.destination where name = any($1::text[])"
_INSTALLATION = "select value from towpath.meta where name = 'installation_id'"


class Fetches(Protocol):
    """A pool or a connection."""

    async def fetch(self, sql: str, /, *arguments: object) -> list[Any]: ...


async def addresses_of(source: Fetches, names: Sequence[str], schema: str) -> dict[str, str]:
    """The address of each destination. Raises StoreUnavailable."""
    with store_errors():
        rows = await source.fetch(in_schema(_ADDRESSES, schema), list(names))
    mapped = {row["name"]: row["address"] for row in rows}
    return {name: mapped.get(name, name) for name in names}


async def installation_of(database: Database) -> str:
    """The identity of this database, as it stands in every message. Raises StoreUnavailable."""
    with store_errors():
        value: str = await database.pool.fetchval(in_schema(_INSTALLATION, database.schema))
    return value
