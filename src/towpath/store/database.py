"""The engines' own connections to Postgres, and what a driver error means."""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final, TypeVar

import asyncpg

from towpath.errors import MissingExtra, StoreUnavailable
from towpath.store.statements import DEFAULT_SCHEMA, in_schema
from towpath.transport import postgres_url_with_tls

if TYPE_CHECKING:  # and imported where it is used: the relay, and most commands, start without it
    from sqlalchemy import Engine
    from sqlalchemy.ext.asyncio import AsyncEngine

T = TypeVar("T")

POOL_SIZE: Final = 10
SPARE_SESSIONS: Final = 10
"""Beside those of transactional handlers: for batches, and for calls that end in a transaction."""
_UNAVAILABLE_CLASSES: Final = ("08", "53", "57P", "58", "25006")

PLANNER_PINS: Final = {
    "plan_cache_mode": "force_generic_plan",
    "enable_seqscan": "off",
    "enable_bitmapscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "max_parallel_workers_per_gather": "0",
    "jit": "off",
    "default_transaction_isolation": "read committed",
}
"""Every hot statement is a lookup by index; without pins a never-analysed table gets a scan.

A statement after a lock must see what the lock waited for, hence READ COMMITTED.
"""


def is_unavailable(error: BaseException) -> bool:
    """Whether the error means "the database is away", not "the statement is wrong"."""
    if isinstance(error, StoreUnavailable | OSError | TimeoutError | ssl.SSLError):
        return True
    if isinstance(error, asyncpg.PostgresError):
        state = str(getattr(error, "sqlstate", None) or "")
        return state.startswith(_UNAVAILABLE_CLASSES)
    if isinstance(error, asyncpg.InterfaceError):
        text = str(error)
        return "closed" in text or "connection" in text
    # The driver's own state machine, confused by a connection that broke at a bad moment.
    return isinstance(error, asyncpg.InternalClientError)


@contextmanager
def store_errors() -> Iterator[None]:
    """Turn a driver's "the database is away" into StoreUnavailable; other errors pass."""
    try:
        yield
    except StoreUnavailable:
        raise
    except Exception as error:
        if is_unavailable(error):
            raise StoreUnavailable(f"the database is unavailable: {error}") from error
        raise


async def within(seconds: float, act: Coroutine[Any, Any, T]) -> T:
    """Its result, or TimeoutError after that time for certain.

    asyncpg does not give a cancelled statement's connection back before the server has answered the cancel
    request, so on a frozen link `asyncio.timeout` around one waits for ever: here it is left behind.
    """
    task = asyncio.create_task(act)
    task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # nobody else may ask
    try:
        await asyncio.wait([task], timeout=seconds)
        if not task.done():
            raise TimeoutError
        return task.result()
    finally:
        task.cancel()


class Database:
    """One process's connections: a pool for the engines' statements, an engine for handlers.

    `session_count` transactional handlers find a session free at any time, with a few to spare.
    `url` is `postgresql://user:password@host:port/database`; a `+driver` suffix is ignored.
    """

    def __init__(
        self,
        url: str,
        *,
        schema: str = DEFAULT_SCHEMA,
        pool_size: int = POOL_SIZE,
        session_count: int = 20,
        command_timeout_seconds: float = 30,
        lease_seconds: float = 30,
    ) -> None:
        in_schema("", schema)
        self.url = plain_url(url)
        self.schema = schema
        self._pool_size = pool_size
        self._session_count = session_count
        self._command_timeout = command_timeout_seconds
        self._pool: asyncpg.Pool[Any] | None = None
        self._lease_seconds = lease_seconds
        self._engine: AsyncEngine | None = None
        self._has_learned = self._has_learned_in_thread = False
        self._sync_engine: Engine | None = None
        self._sync_lock = threading.Lock()

    async def start(self) -> None:
        """Open the pool. Raises StoreUnavailable; idempotent."""
        if self._pool is None:
            with store_errors():
                self._pool = await asyncpg.create_pool(
                    self.url,
                    min_size=1,
                    max_size=self._pool_size,
                    command_timeout=self._command_timeout,
                    timeout=10,
                    server_settings={"application_name": "towpath", **PLANNER_PINS},
                    reset=_nothing_to_reset,
                )

    async def learn_server(self) -> None:
        """Before the first handler's session: what SQLAlchemy asks a server once, and never again.

        Raises StoreUnavailable where the session ends meanwhile: a statement after that would say "This
        Connection is closed", as to a handler that uses a session of its own wrongly.
        """
        if not self._has_learned:
            with _first_questions():
                async with self.engine.connect():
                    self._has_learned = True

    def learn_server_in_thread(self) -> None:
        """The same for handlers that are plain functions."""
        if not self._has_learned_in_thread:
            with _first_questions(), self.sync_engine.connect():
                self._has_learned_in_thread = True

    async def aclose(self) -> None:
        """Close pool and engine; bounded; idempotent."""
        with self._sync_lock:
            pool, engine, self._pool, self._engine = self._pool, self._engine, None, None
            sync_engine, self._sync_engine = self._sync_engine, None
        self._has_learned = self._has_learned_in_thread = False
        if sync_engine is not None:
            _dispose_under_threads(sync_engine)
        if engine is not None:
            await engine.dispose()
        if pool is not None:
            pool.terminate()

    @property
    def pool(self) -> asyncpg.Pool[Any]:
        """The open pool. Its connections have the planner pinned to index scans."""
        if self._pool is None:
            raise StoreUnavailable("the database pool is not open")
        return self._pool

    @property
    def engine(self) -> AsyncEngine:
        """A SQLAlchemy engine on the same database for handlers' sessions; not pinned."""
        if self._engine is None:
            from towpath.store.idling import raise_when_idled  # noqa: PLC0415

            self._engine = async_engine(
                self.url,
                self._handler_settings,
                pool_size=self._session_count,
                max_overflow=SPARE_SESSIONS,
            )
            raise_when_idled(self._engine.sync_engine, self._idle_milliseconds / 1000)
        return self._engine

    @property
    def sync_engine(self) -> Engine:
        """The same for handlers that are plain functions, over psycopg.

        Raises MissingExtra, and StoreUnavailable in a thread that comes after the end.
        """
        with self._sync_lock:
            if self._pool is None:
                raise StoreUnavailable("the database pool is not open")
            if self._sync_engine is None:
                if find_spec("psycopg") is None:
                    raise MissingExtra("psycopg", "a transactional handler that is a plain function")
                from sqlalchemy import create_engine  # noqa: PLC0415

                from towpath.store.idling import raise_when_idled  # noqa: PLC0415

                self._sync_engine = create_engine(
                    sqlalchemy_url(self.url, "psycopg"),
                    pool_size=self._session_count,
                    max_overflow=SPARE_SESSIONS,
                    connect_args={
                        "options": " ".join(f"-c {k}={v}" for k, v in self._handler_settings.items())
                    },
                )
                raise_when_idled(self._sync_engine, self._idle_milliseconds / 1000)
            return self._sync_engine

    @property
    def _handler_settings(self) -> dict[str, str]:
        """A handler's transaction neither waits nor idles longer than its worker's lease lasts."""
        return {
            "lock_timeout": str(round(self._lease_seconds * 500)),
            "idle_in_transaction_session_timeout": str(self._idle_milliseconds),
        }

    @property
    def _idle_milliseconds(self) -> int:
        return round(self._lease_seconds * 900)

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[asyncpg.pool.PoolConnectionProxy[Any]]:
        """A pooled connection inside a READ COMMITTED transaction; driver errors are translated."""
        with store_errors():
            async with self.pool.acquire(timeout=10) as connection, connection.transaction():
                yield connection


def _dispose_under_threads(engine: Engine) -> None:
    """Close its connections: now, or when a thread that was left to itself gives one back."""
    from sqlalchemy import event  # noqa: PLC0415

    event.listen(engine.pool, "checkin", lambda _connection, record: record.invalidate())
    engine.dispose()


@contextmanager
def _first_questions() -> Iterator[None]:
    """SQLAlchemy's own, of a new server: it has closed its connection before it raises what ended it."""
    from sqlalchemy.exc import ResourceClosedError  # noqa: PLC0415

    try:
        yield
    except ResourceClosedError as error:
        raise StoreUnavailable(f"the database is unavailable: {error}") from error


async def _nothing_to_reset(_: object) -> None:
    """The engines set nothing on a session; the pool's own reset would be one more statement after each."""


def plain_url(url: str) -> str:
    """`postgresql+asyncpg://…` as asyncpg and libpq understand it, with TLS to other machines.

    Raises ConfigurationError for a URL that may send in the clear without saying so.
    """
    scheme, separator, rest = url.partition("://")
    return postgres_url_with_tls(f"{scheme.partition('+')[0]}{separator}{rest}")


def sqlalchemy_url(url: str, driver: str = "asyncpg") -> str:
    """The URL with SQLAlchemy's driver suffix. For asyncpg to another machine see `async_engine`."""
    _, separator, rest = url.partition("://")
    return f"postgresql+{driver}{separator}{rest}"


def async_engine(url: str, server_settings: Mapping[str, str] | None = None, **arguments: Any) -> AsyncEngine:
    """SQLAlchemy's engine over asyncpg, for which the URL means what it means to asyncpg itself.

    `arguments` are those of `create_async_engine`.
    """
    dsn = plain_url(url)

    async def connect() -> asyncpg.Connection[Any]:
        return await asyncpg.connect(dsn, timeout=10, server_settings=dict(server_settings or {}))

    from sqlalchemy.ext.asyncio import create_async_engine  # noqa: PLC0415

    return create_async_engine("postgresql+asyncpg://", async_creator=connect, **arguments)
