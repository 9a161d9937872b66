"""Checks of Postgres: reachable, protected, set up for us, healthy."""

import asyncio
import time
from typing import Any, Final
from uuid import uuid4

import asyncpg
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import StaticPool

from towpath.cli.checkup.model import Finding, Site, failure, ok, warning
from towpath.cli.output import age
from towpath.cli.session import Session, database_of
from towpath.relay.link import are_sessions_shared
from towpath.relay.wakeup import HEARS_NOTHING, MAY_PREPARE, PROOF_SECONDS
from towpath.store import migrate
from towpath.store.database import POOL_SIZE, SPARE_SESSIONS, store_errors
from towpath.store.installed import ensure_installed
from towpath.store.roles import lacking
from towpath.store.statements import load
from towpath.store.wakeup import WakeupStore
from towpath.transport import is_loopback, postgres_hosts

_CONNECT_SECONDS: Final = 10
_OLDEST_VERSION: Final = 14
_SKEW_SECONDS: Final = 5.0
_OPEN_SECONDS: Final = 300.0
"""A transaction open for longer holds back vacuum enough to be told."""
_RELAY_CONNECTIONS: Final = 10
_NEARLY: Final = 3
"""A role that lacks so few of its grants was meant, and was not granted anew after an upgrade."""


async def is_reachable(site: Site) -> list[Finding]:
    """Opens the connection that the others use: one that a pooler lets through."""
    url, schema = database_of(site.settings)
    with store_errors():
        site.session = Session(await _connection(site, url), schema)
    row = await site.connection.fetchrow("select current_database() as name, current_user as login")
    return ok(f"{row['name']} at {', '.join(postgres_hosts(url))} as {row['login']}")


async def _connection(site: Site, url: str, **settings: str) -> "asyncpg.Connection[Any]":
    connection = await asyncpg.connect(
        url,
        timeout=_CONNECT_SECONDS,
        command_timeout=_CONNECT_SECONDS,
        statement_cache_size=0,
        server_settings={"application_name": "towpath doctor", **settings},
    )
    site.stack.callback(connection.terminate)
    return connection


async def is_encrypted(site: Site) -> list[Finding]:
    """TLS, and verified; on loopback nothing is demanded."""
    url, _ = database_of(site.settings)
    if all(map(is_loopback, postgres_hosts(url))):
        return ok("not needed: the connection stays on this machine")
    tls = site.connection._transport.get_extra_info("ssl_object")  # noqa: SLF001
    if tls is None:
        return warning("the connection is not encrypted: leave sslmode=disable out of TOWPATH_DATABASE_URL")
    if not tls.context.verify_mode:
        return warning("the server's certificate is not verified: say sslmode=verify-full, not require")
    return ok(f"{tls.version()}, certificate verified")


async def is_recent(site: Site) -> list[Finding]:
    """The server's version, and that it may be written to."""
    version, number, is_standby = await site.connection.fetchrow(
        """
        select current_setting('server_version'), current_setting('server_version_num')::int,
               pg_is_in_recovery()
        """
    )
    if number < _OLDEST_VERSION * 10_000:
        return failure(f"PostgreSQL {version} is too old: upgrade it to {_OLDEST_VERSION} or newer")
    if is_standby:
        return failure(f"PostgreSQL {version} is a standby: point TOWPATH_DATABASE_URL at the primary")
    return ok(f"PostgreSQL {version}, a primary")


async def is_durable(site: Site) -> list[Finding]:
    """What a commit means to this login."""
    commit, fsync = await site.connection.fetchrow(
        "select current_setting('synchronous_commit'), current_setting('fsync')"
    )
    if fsync == "off":
        return warning("fsync is off: a crash of the machine can lose the database, set fsync = on")
    if commit == "off":
        return warning(
            "synchronous_commit is off for this login: a crash can lose business changes that seemed "
            "committed, set it to on"
        )
    return ok(f"synchronous_commit is {commit}")


async def has_connections_left(site: Site) -> list[Finding]:
    """Room for one more worker of these settings and a relay."""
    limit, used = await site.connection.fetchrow(
        """
        select current_setting('max_connections')::int
                 - current_setting('superuser_reserved_connections')::int,
               (select count(*) from pg_stat_activity where backend_type = 'client backend')::int
        """
    )
    needed = POOL_SIZE + site.settings.worker.sessions + SPARE_SESSIONS + _RELAY_CONNECTIONS
    if limit - used < needed:
        return warning(
            f"{used} of {limit} connections are in use, a worker and a relay open up to {needed} more: raise "
            "max_connections or lower TOWPATH_WORKER__SESSIONS"
        )
    return ok(f"{used} of {limit} connections are in use, a worker and a relay open up to {needed}")


async def holds_no_horizon(site: Site) -> list[Finding]:
    """Who keeps vacuum from removing dead rows, of those open for long."""
    rows = await site.connection.fetch(
        load("operator", site.session.schema)["horizon_holders"], _OPEN_SECONDS
    )
    if not rows:
        return ok(f"no transaction is open for more than {age(_OPEN_SECONDS)}")
    return warning(
        "; ".join(f"{row['holder']} since {age(row['seconds'])}" for row in rows)
        + ": dead rows cannot be removed meanwhile, end it or set idle_in_transaction_session_timeout"
    )


async def agrees_on_time(site: Site) -> list[Finding]:
    """This machine's clock against the database's. The uncertainty is half of the round trip."""
    began = time.time()
    there: float = await site.connection.fetchval("select extract(epoch from clock_timestamp())::float8")
    ended = time.time()
    skew = there - (began + ended) / 2
    if abs(skew) - (ended - began) / 2 > _SKEW_SECONDS:
        where = "behind" if skew > 0 else "ahead of"
        return warning(f"this machine is {age(abs(skew))} {where} the database: run NTP on both")
    return ok(f"{abs(skew):.3f} s between this machine and the database")


async def is_direct(site: Site) -> list[Finding]:
    """Whether a pooler stands between, and of which kind: none of our processes works by transaction."""
    url, _ = database_of(site.settings)
    try:
        connection = await _connection(site, url, plan_cache_mode="force_generic_plan")
        is_set = await connection.fetchval("select current_setting('plan_cache_mode')")
    except asyncpg.ProtocolViolationError:
        is_set = None
    if is_set == "force_generic_plan":
        return ok("none between, or one that passes everything on")
    if await are_sessions_shared(url):
        return failure(
            "a pooler by transaction: give relays, workers and this command a direct URL or a pool by "
            "session (PgBouncer: pool_mode = session); producers may stay"
        )
    return warning("a pooler by session: fine for a relay, give workers a direct URL")


async def hears_notifications(site: Site) -> list[Finding]:
    """LISTEN, proven by a notification from another connection. Without it a relay polls."""
    store, mode = WakeupStore(site.session.schema), site.settings.relay.wakeup
    if mode == "poll":
        return ok("not needed: TOWPATH_RELAY__WAKEUP=poll")
    demand = failure if mode == "notify" else warning
    cost = "an idle relay looks every TOWPATH_RELAY__POLL_MAX instead"
    if mode == "auto" and await store.may_prepare(site.connection):
        return warning(f"{MAY_PREPARE}: {cost}; set it to 0 if nothing prepares")
    token, heard = uuid4().hex, asyncio.Event()

    def note(_connection: object, _pid: int, _channel: str, payload: object) -> None:
        if payload == token:
            heard.set()

    url, _ = database_of(site.settings)
    await site.connection.add_listener(store.channel, note)
    await store.notify(await _connection(site, url), token)
    try:
        async with asyncio.timeout(PROOF_SECONDS):
            await heard.wait()
    except TimeoutError:
        return demand(f"{HEARS_NOTHING} {cost}; give the relay a direct URL")
    await site.connection.remove_listener(store.channel, note)
    return ok("LISTEN hears what another connection notifies")


async def has_the_schema(site: Site) -> list[Finding]:
    """What `towpath db check` says; a login that may not look at all of it sees the version alone."""
    await ensure_installed(site.connection, site.session.schema)
    table = f"{site.session.schema}.alembic_version"
    may_look = "select has_table_privilege(to_regclass($1), 'select')"
    if not await site.connection.fetchval(may_look, table):
        return ok("of the right version (this login may not compare it whole)")

    async def opened() -> "asyncpg.Connection[Any]":
        return await _connection(site, database_of(site.settings)[0])

    engine = create_async_engine("postgresql+asyncpg://", async_creator=opened, poolclass=StaticPool)
    async with engine.connect() as connection:
        problems = await connection.run_sync(migrate.differences, site.session.schema)
    await engine.dispose()
    if problems:
        return failure("; ".join(problems[:3]) + ("; …" if problems[3:] else "") + " (see towpath db check)")
    return ok(f"at revision {migrate.head()}, as the migrations make it")


async def has_grants(site: Site) -> list[Finding]:
    """Which of the least-privilege roles this login can act as."""
    login, is_super, owns = await site.connection.fetchrow(
        """
        select r.rolname, r.rolsuper, pg_has_role(n.nspowner, 'usage')
        from pg_roles r, pg_namespace n where r.rolname = current_user and n.nspname = $1
        """,
        site.session.schema,
    )
    if is_super or owns:
        what = "is a superuser" if is_super else "owns the schema"
        return warning(f"{login} {what}: services need less, towpath db roles prints the roles")
    found = await lacking(site.connection, site.session.schema)
    complete = [role for role, (missing, _) in found.items() if not missing]
    nearly = [
        f"{login} is no {role}, for it lacks {', '.join(missing)}: run what towpath db roles prints"
        for role, (missing, count) in found.items()
        if missing and len(missing) <= _NEARLY and len(missing) < count / 2
    ]
    if site.apps and "worker" not in complete and not nearly:
        return failure(f"{login} is no worker: run what towpath db roles prints, then grant it to {login}")
    if nearly:
        return failure(nearly[0])
    if not complete:
        return failure(f"{login} may do nothing here: run what towpath db roles prints, then grant it a role")
    return ok(f"{login} may do what these do: {', '.join(complete)}")


async def has_relays(site: Site) -> list[Finding]:
    """Somebody publishes each shard, and nothing grows old."""
    rows = await site.connection.fetch(load("operator", site.session.schema)["outbox_backlog"], 1000)
    unowned = [row["shard"] for row in rows if not row["is_owned"]]
    oldest = max((row["oldest_age_seconds"] or 0.0 for row in rows), default=0.0)
    if unowned and any(row["pending"] for row in rows if not row["is_owned"]):
        return failure(
            f"{len(unowned)} of {len(rows)} shards have no owner and messages wait since {age(oldest)}: "
            "run towpath relay run"
        )
    if unowned:
        return warning(f"{len(unowned)} of {len(rows)} shards have no owner: is a relay running?")
    if oldest > _OPEN_SECONDS:
        return warning(f"the oldest message waits since {age(oldest)}: see towpath outbox status")
    return ok(f"every shard has one, the oldest message waits since {age(oldest)}")
