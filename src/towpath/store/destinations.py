"""Destinations: names that map to a broker and an address. A name without a row is its own address."""

from collections.abc import Sequence

from towpath.store.database import Database, store_errors
from towpath.store.statements import in_schema

_ADDRESSES = "select name, address from towpath.destination where name = any($1::text[])"


async def addresses_of(database: Database, names: Sequence[str]) -> dict[str, str]:
    """The address of each destination. Raises StoreUnavailable."""
    with store_errors():
        rows = await database.pool.fetch(in_schema(_ADDRESSES, database.schema), list(names))
    mapped = {row["name"]: row["address"] for row in rows}
    return {name: mapped.get(name, name) for name in names}
