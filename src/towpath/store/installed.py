"""Whether the schema in a database is one that this library can work with. Needs no extra."""

from __future__ import annotations

from functools import cache
from typing import Any, Final, TypeAlias

import asyncpg

from towpath.errors import SchemaMismatch
from towpath.store.statements import DEFAULT_SCHEMA, in_schema

SCHEMA_VERSION: Final = 1
"""The newest migration this library was written for, and the oldest schema it works with.

A newer schema says itself from which version on a library works with it (`compatible_from` in `meta`): a
migration never leaves out the version before it, so that the two may run side by side.
"""

SHARDS_PER_BROKER: Final = 16
"""As in the schema's `shards_per_broker()`; fixed at installation."""

FACTS: Final = """
    select coalesce(max(m.value) filter (where m.name = 'schema_version'), '0')::integer as version,
           coalesce(max(m.value) filter (where m.name = 'compatible_from'), '0')::integer as compatible_from,
           towpath.shards_per_broker()::integer as shards
      from towpath.meta m
"""

Connection: TypeAlias = "asyncpg.Connection[Any] | asyncpg.pool.PoolConnectionProxy[Any] | asyncpg.Pool[Any]"


@cache
def library_version() -> str:
    """The version of this library."""
    from importlib.metadata import version  # noqa: PLC0415  takes a while, and producers never ask

    return version("towpath")


def mismatch(schema: str, *, version: int, compatible_from: int, shards: int) -> str | None:
    """Why this library cannot work with such a schema, and the fix; None: it can."""
    if version < SCHEMA_VERSION:
        return (
            f"the schema {schema} has version {version}, this towpath needs {SCHEMA_VERSION}: "
            "run towpath db upgrade"
        )
    if compatible_from > SCHEMA_VERSION:
        return (
            f"the schema {schema} has version {version} and works with towpath of version {compatible_from} "
            f"or newer, this one is of {SCHEMA_VERSION}: install a newer towpath"
        )
    if shards != SHARDS_PER_BROKER:
        return (
            f"{schema}.shards_per_broker() says {shards}, not {SHARDS_PER_BROKER}: the number of shards is "
            "fixed at installation, others would be read by nobody; put the function back (towpath db check)"
        )
    return None


async def ensure_installed(connection: Connection, schema: str = DEFAULT_SCHEMA) -> None:
    """Raise SchemaMismatch, naming the fix, unless the schema is there and this library works with it."""
    try:
        found = await connection.fetchrow(in_schema(FACTS, schema))
    except (
        asyncpg.UndefinedTableError,
        asyncpg.UndefinedFunctionError,
        asyncpg.InvalidSchemaNameError,
    ) as error:
        raise SchemaMismatch(f"the schema {schema} is not installed: run towpath db upgrade") from error
    if problem := mismatch(schema, **found):
        raise SchemaMismatch(problem)
