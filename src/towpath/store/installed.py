"""Whether the schema in a database is one that this library can work with. Needs no extra."""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import asyncpg

from towpath.errors import SchemaMismatch
from towpath.store.statements import DEFAULT_SCHEMA, in_schema

SCHEMA_VERSION: Final = 1
"""What the migrations write into `meta`; raised by those that old code cannot work with."""

Connection: TypeAlias = "asyncpg.Connection[Any] | asyncpg.pool.PoolConnectionProxy[Any]"


async def ensure_installed(connection: Connection, schema: str = DEFAULT_SCHEMA) -> None:
    """Raise SchemaMismatch, naming the fix, unless the schema is there in the version needed."""
    statement = in_schema("select value from towpath.meta where name = 'schema_version'", schema)
    try:
        found = int(await connection.fetchval(statement) or 0)
    except (asyncpg.UndefinedTableError, asyncpg.InvalidSchemaNameError) as error:
        raise SchemaMismatch(f"the schema {schema} is not installed: run towpath db upgrade") from error
    if found != SCHEMA_VERSION:
        fix = "run towpath db upgrade" if found < SCHEMA_VERSION else "install a newer towpath"
        raise SchemaMismatch(f"the schema {schema} has version {found}, not {SCHEMA_VERSION}: {fix}")
