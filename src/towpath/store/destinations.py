"""What this installation is and where its destinations are.

A destination without a row is its own address, at the default broker.
"""

from collections.abc import Sequence

from towpath.store.database import Database, store_errors
from towpath.store.statements import in_schema

_ADDRESSES = "select name, address from towpath.destination where name = any($1::text[])"
_INSTALLATION = "select value from towpath.meta where name = 'installation_id'"


async def addresses_of(database: Database, names: Sequence[str]) -> dict[str, str]:
    """The address of each destination. Raises StoreUnavailable."""
    with store_errors():
        rows = await database.pool.fetch(in_schema(_ADDRESSES, database.schema), list(names))
    mapped = {row["name"]: row["address"] for row in rows}
    return {name: mapped.get(name, name) for name in names}


async def installation_of(database: Database) -> str:
    """The identity of this database, as it stands in every message. Raises StoreUnavailable."""
    with store_errors():
        value: str = await database.pool.fetchval(in_schema(_INSTALLATION, database.schema))
    return value
