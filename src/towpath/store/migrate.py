"""Bringing a database to the newest schema, and saying where it stands. Needs the `cli` extra.

The functions block; from a running event loop call them in a thread.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from importlib.resources import files
from io import StringIO
from typing import TYPE_CHECKING, Final, TypeVar

import asyncpg
from sqlalchemy import Connection, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool

from towpath.errors import MissingExtra, SchemaMismatch, StoreError, UsageError
from towpath.store import fingerprint, installed
from towpath.store.database import async_engine, store_errors
from towpath.store.statements import DEFAULT_SCHEMA, in_schema

if TYPE_CHECKING:
    from alembic.config import Config

T = TypeVar("T")

_ONE_AT_A_TIME: Final = threading.Lock()
"""alembic hands its environment to the revisions through globals of its own."""

_LOCK_WAIT: Final = "500ms"
"""For all tables together. Below the server's deadlock_timeout: the migration gives way before anybody who
holds one of them and waits for another is made to."""
_PATIENCE_SECONDS: Final = 60.0


def upgrade(url: str, schema: str = DEFAULT_SCHEMA) -> str:
    """Run the missing migrations in one transaction and return the revision reached.

    Several callers at once wait for each other on an advisory lock, and the later ones find nothing
    to do. Nor is there anything to do for a library older than the schema that still works with it.
    Tables that are in use are waited for briefly and often, for a minute. Raises StoreUnavailable,
    SchemaMismatch when the database is too new for this library, StoreError when a migration fails
    (nothing of it is kept).
    """
    config = _config(schema)

    def run(connection: Connection) -> str:
        connection.execute(
            text("select pg_advisory_xact_lock(hashtext(:name))"), {"name": f"towpath migrations of {schema}"}
        )
        revision = _revision(connection, schema)
        if revision is not None:
            if revision == head() or _is_ahead(connection, schema, revision):
                return revision
            _lock_tables(connection, schema)
        from alembic import command  # noqa: PLC0415  # the extra was checked by _config

        config.attributes["connection"] = connection
        with _ONE_AT_A_TIME:
            command.upgrade(config, "head")
        return _revision(connection, schema) or ""

    return _patiently(lambda: _in_transaction(url, run))


def script(schema: str = DEFAULT_SCHEMA, *, since: str | None = None, upto: str | None = None) -> str:
    """Migrations as SQL text, for those who run them by hand: after `since`, up to and with `upto`.

    All of them by default. Raises UsageError for revisions that are not known, or in the wrong order.
    """
    config = _config(schema)
    for revision in (since, upto):
        if revision is not None and not _known(revision):
            raise UsageError(f"there is no revision {revision[:40]!r}: the newest is {head()}")
    from alembic import command  # noqa: PLC0415  # the extra was checked by _config

    wanted = upto or head()
    if since is not None and since not in _leading_to(wanted):
        raise UsageError(f"no revisions lead from {since} to {wanted}")
    config.output_buffer = output = StringIO()
    with _ONE_AT_A_TIME:
        command.upgrade(config, wanted if since is None else f"{since}:{wanted}", sql=True)
    return output.getvalue()


def current(url: str, schema: str = DEFAULT_SCHEMA) -> str | None:
    """The revision the database is at; None when the schema was never installed."""
    in_schema("", schema)
    return _in_transaction(url, lambda connection: _revision(connection, schema))


def head() -> str:
    """The newest revision this library knows."""
    from alembic.script import ScriptDirectory  # noqa: PLC0415  # the extra was checked by _config

    return ScriptDirectory.from_config(_config(DEFAULT_SCHEMA)).get_current_head() or ""


def check(url: str, schema: str = DEFAULT_SCHEMA) -> list[str]:
    """What differs between the database and the newest schema, one line each; empty when nothing does.

    Nothing is compared where the schema is newer than this library and works with it.
    """
    in_schema("", schema)
    return _in_transaction(url, lambda connection: differences(connection, schema))


def differences(connection: Connection, schema: str = DEFAULT_SCHEMA) -> list[str]:
    """The same over an open connection."""
    newest, revision = head(), _revision(connection, schema)
    if revision is None:
        return [f"the schema {schema} is not installed: run towpath db upgrade"]
    try:
        if _is_ahead(connection, schema, revision):
            return []
    except SchemaMismatch as error:
        return [str(error)]
    if revision != newest:
        return [f"the schema is at revision {revision}, this towpath needs {newest}: run towpath db upgrade"]
    return list(fingerprint.differences(fingerprint.expected(schema), fingerprint.read(connection, schema)))


def shape(url: str, schema: str = DEFAULT_SCHEMA) -> fingerprint.Fingerprint:
    """What the catalog of the database says about the schema."""
    in_schema("", schema)
    return _in_transaction(url, lambda connection: fingerprint.read(connection, schema))


def _config(schema: str) -> Config:
    in_schema("", schema)
    try:
        from alembic.config import Config  # noqa: PLC0415  # an optional dependency
    except ImportError as error:
        raise MissingExtra("cli", "migrating the database") from error
    config = Config()
    config.set_main_option("script_location", str(files("towpath.store") / "migrations"))
    config.set_main_option("path_separator", "os")
    config.attributes["schema"] = schema
    return config


def _revision(connection: Connection, schema: str) -> str | None:
    table = f"{schema}.alembic_version"
    if connection.scalar(text("select to_regclass(:name)::text"), {"name": table}) is None:
        return None
    revision: str | None = connection.scalar(text(f"select version_num from {table}"))
    return revision


def _leading_to(revision: str) -> set[str]:
    """It, and what has to be there before it."""
    from alembic.script import ScriptDirectory  # noqa: PLC0415  # the extra was checked by _config

    scripts = ScriptDirectory.from_config(_config(DEFAULT_SCHEMA))
    return {step.revision for step in scripts.iterate_revisions(revision, "base")}


def _known(revision: str) -> bool:
    from alembic.script import ScriptDirectory  # noqa: PLC0415  # the extra was checked by _config

    scripts = ScriptDirectory.from_config(_config(DEFAULT_SCHEMA))
    return any(known.revision == revision for known in scripts.walk_revisions())


def _is_ahead(connection: Connection, schema: str, revision: str) -> bool:
    """Whether the schema is newer than this library and works with it. Raises SchemaMismatch if not."""
    if _known(revision):
        return False
    facts = connection.execute(text(in_schema(installed.FACTS, schema))).mappings().one()
    if problem := installed.mismatch(schema, **facts):
        raise SchemaMismatch(problem)
    return True


def _lock_tables(connection: Connection, schema: str) -> None:
    """Take every table at once, or none in time: what follows waits for nobody and deadlocks with nobody."""
    tables = connection.scalars(
        text(
            "select format('%I.%I', cast(:schema as text), c.relname) from pg_class c"
            " where c.relnamespace = to_regnamespace(:schema) and c.relkind in ('r', 'p')"
            " and not c.relispartition order by c.relname"
        ),
        {"schema": schema},
    )
    names = ", ".join(tables)
    connection.execute(text(f"set local statement_timeout = '{_LOCK_WAIT}'"))
    connection.execute(text(f"lock table {names} in access exclusive mode"))
    connection.execute(text("set local statement_timeout = 0"))


def _patiently(act: Callable[[], T]) -> T:
    """Again while another transaction keeps a lock. Raises StoreError when that lasts too long."""
    from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_random  # noqa: PLC0415  # as alembic

    attempts = Retrying(
        retry=retry_if_exception_type(asyncpg.QueryCanceledError),
        stop=stop_after_delay(_PATIENCE_SECONDS),
        wait=wait_random(0.2, 1.0),
        reraise=True,
    )
    try:
        return attempts(act)
    except asyncpg.QueryCanceledError as error:
        raise StoreError(
            f"a transaction has kept a table locked for {_PATIENCE_SECONDS:.0f} seconds: end it "
            "(pg_stat_activity, pg_prepared_xacts) and run towpath db upgrade again; nothing was changed"
        ) from error


def _in_transaction(url: str, work: Callable[[Connection], T]) -> T:
    async def run() -> T:
        engine = async_engine(url, {"application_name": "towpath db"}, poolclass=NullPool)
        try:
            async with engine.begin() as connection:
                return await connection.run_sync(work)
        finally:
            await engine.dispose()

    with store_errors():
        try:
            return asyncio.run(run())
        except DBAPIError as error:
            cause = error.orig.__cause__ if error.orig is not None else None
            if isinstance(cause, asyncpg.PostgresError | asyncpg.InterfaceError):
                raise cause from error
            raise StoreError(f"the database refused: {error.orig}") from error
