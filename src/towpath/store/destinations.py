"""What this installation is and where its destinations are.

A destination without a row is its own address, at the default broker.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import asyncpg

from towpath.store.database import Database, store_errors
from towpath.store.statements import in_schema, load

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


async def all_destinations(connection: "asyncpg.Connection[Any]", schema: str) -> Sequence[Mapping[str, Any]]:
    """Every row, with what waits there for a person's decision; counted up to 10,000."""
    rows: Sequence[Mapping[str, Any]] = await connection.fetch(
        load("operator", schema)["destinations"], 10_000
    )
    return rows


async def set_destination(
    connection: "asyncpg.Connection[Any]", name: str, address: str | None, on_poison: str | None, schema: str
) -> Mapping[str, Any]:
    """Write a row; None leaves a field as it is, or makes it the name itself and `park`."""
    row: Mapping[str, Any] | None = await connection.fetchrow(
        load("operator", schema)["set_destination"], name, address, on_poison
    )
    if row is None:
        raise RuntimeError("the destination statement returned no row")
    return row


async def forget_destination(connection: "asyncpg.Connection[Any]", name: str, schema: str) -> bool:
    """Delete a row; whether there was one."""
    return await connection.fetchval(load("operator", schema)["forget_destination"], name) is not None
