"""What this installation is and where its destinations are.

A destination without a row is its own address, at the default broker.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import asyncpg

from towpath.errors import UsageError
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
    connection: "asyncpg.Connection[Any]",
    name: str,
    address: str | None,
    on_poison: str | None,
    broker: str | None,
    schema: str,
) -> Mapping[str, Any]:
    """Write a row; None leaves a field as it is, or makes it the name itself, `park` and the first broker.

    Raises UsageError for a broker that is not there, and where messages are on their way to the old one.
    """
    number = None
    if broker is not None:
        number = await _number_of(connection, broker, schema)
        await _check_move(connection, name, number, schema)
    row: Mapping[str, Any] | None = await connection.fetchrow(
        load("operator", schema)["set_destination"], name, address, on_poison, number
    )
    if row is None:
        raise RuntimeError("the destination statement returned no row")
    return row


async def forget_destination(connection: "asyncpg.Connection[Any]", name: str, schema: str) -> bool:
    """Delete a row; whether there was one. Raises UsageError as `set_destination` does."""
    await _check_move(connection, name, 0, schema)
    return await connection.fetchval(load("operator", schema)["forget_destination"], name) is not None


async def all_brokers(connection: "asyncpg.Connection[Any]", schema: str) -> Sequence[Mapping[str, Any]]:
    """Every broker by number, with its relays and destinations counted."""
    rows: Sequence[Mapping[str, Any]] = await connection.fetch(load("operator", schema)["brokers"])
    return rows


async def add_broker(connection: "asyncpg.Connection[Any]", name: str, schema: str) -> int:
    """Add a broker, as the owner of the schema; returns its number. The caller's transaction, no savepoint.

    Raises UsageError where the name is taken.
    """
    statements = load("brokers", schema)
    await connection.execute(statements["lock_brokers"])
    number: int | None = await connection.fetchval(statements["add_broker"], name)
    if number is None:
        raise UsageError(f"there is a broker {name} already: see towpath broker list")
    return number


async def _check_move(connection: "asyncpg.Connection[Any]", name: str, number: int, schema: str) -> None:
    """What the old broker has not confirmed could be overtaken at the new one."""
    found = await connection.fetchrow(load("operator", schema)["is_moving"], name, number)
    if found is not None and found["is_moving"] and found["is_used"]:
        raise UsageError(
            f"messages to {name} are not published yet: stop its producers, wait until the relay has sent "
            "them (towpath outbox status, towpath destination list), then move it"
        )


async def _number_of(connection: "asyncpg.Connection[Any]", broker: str, schema: str) -> int:
    brokers = {row["name"]: row["number"] for row in await all_brokers(connection, schema)}
    if broker not in brokers:
        raise UsageError(
            f"there is no broker {broker[:40]!r}, only {', '.join(brokers)}: towpath broker add makes one"
        )
    number: int = brokers[broker]
    return number
