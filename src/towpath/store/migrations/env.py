"""What alembic runs: the revisions, on the connection that `store.migrate` opened and locked.

The version table lives inside towpath's own schema, so it never meets the one of the service that
shares the database.
"""

from alembic import context
from sqlalchemy import Connection

from towpath.store.statements import in_schema

VERSION_TABLE = "alembic_version"


def _run() -> None:
    options = context.config.attributes
    schema: str = options["schema"]
    connection: Connection | None = options.get("connection")
    context.configure(
        connection=connection,
        dialect_name=None if connection is not None else "postgresql",
        version_table=VERSION_TABLE,
        version_table_schema=schema,
        literal_binds=connection is None,
        dialect_opts={"paramstyle": "named"},  # otherwise every % of the text is doubled
    )
    with context.begin_transaction():
        # alembic makes its version table before the first revision runs.
        context.execute(in_schema("create schema if not exists towpath;", schema))
        context.run_migrations()


_run()
