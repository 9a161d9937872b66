"""Every plan is looked at on the newest server at hand and on the oldest."""

from collections.abc import Iterator
from typing import Any

import asyncpg
import pytest

from tests.fixtures.fix_postgres import NewDatabase, oldest_postgres
from towpath.store import migrate
from towpath.testing.services import PostgresServer

_TEMPLATE = "migrated"
_ENTERS_BY_LISTS = 17
"""From this version on a list of values for a later column of an index is always a way into it."""


def skip_while_empty(size: str, connection: "asyncpg.Connection[Any]") -> None:
    """Skips where the planner takes a table for too small to care; docs/checklist.md says so."""
    version = connection.get_server_version()
    if size == "empty" and version.major < _ENTERS_BY_LISTS:
        pytest.skip(f"Postgres {version.major} plans by group alone until the first ANALYZE")


@pytest.fixture(scope="session")
def oldest_server() -> Iterator[PostgresServer]:
    """With a migrated database to copy."""
    with oldest_postgres() as server:
        migrate.upgrade(server.create_database(_TEMPLATE))
        yield server


@pytest.fixture(params=["newest", "oldest"])
def migrated_url(
    request: pytest.FixtureRequest, new_database: NewDatabase, schema_template: str
) -> Iterator[str]:
    """The URL of a fresh database with the newest schema, on either server; dropped afterwards."""
    if request.param == "newest":
        with new_database(schema_template) as url:
            yield url
    else:
        server: PostgresServer = request.getfixturevalue("oldest_server")
        yield server.create_database("planned", template=_TEMPLATE)
        server.drop_database("planned")
