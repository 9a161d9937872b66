"""`towpath doctor`: every check runs, and each failure says what to do."""

import asyncio
import json
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import AsyncExitStack
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, TypeAlias
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import pytest

from tests.fixtures.fix_cli import Run
from towpath.brokers.memory.admin import MemoryAdmin
from towpath.cli import health
from towpath.cli.checkup import CHECKS, database, model
from towpath.cli.checkup.model import Check, Site, carry_out, ok
from towpath.store.roles import grants
from towpath.testing.proxy import TcpProxy
from towpath.testing.services import PgBouncerServer

Db: TypeAlias = "asyncpg.Connection[Any]"
PRINTS = "towpath db roles prints"
Report: TypeAlias = Mapping[str, tuple[str, str]]
"""By check: the worst status, and what was said."""


@pytest.fixture
def examine(towpath: Run, clean_environment: pytest.MonkeyPatch) -> Callable[..., tuple[int, Report]]:
    """Exit code and report of `towpath doctor`, with a broker that is nobody's trouble."""
    clean_environment.setenv("TOWPATH_BROKER_URL", f"memory://{uuid.uuid4()}")
    clean_environment.setenv("TOWPATH_RELAY__CANARIES", "false")
    clean_environment.setattr(database, "PROOF_SECONDS", 60.0)
    for place, name in ((database, "_CONNECT_SECONDS"), (model, "SECONDS"), (health, "_SECONDS")):
        clean_environment.setattr(place, name, 60)  # a busy machine is not frozen

    def run(*arguments: str) -> tuple[int, Report]:
        ran = towpath("doctor", "--json", *arguments)
        document = json.loads(ran.out)
        assert ran.err == ""
        assert document["ok"] is (ran.code == 0)
        report: dict[str, tuple[str, str]] = {}
        for line in document["checks"]:
            status, said = report.get(line["check"], (line["status"], ""))
            report[line["check"]] = (status, f"{said}\n{line['message']}".strip())
        assert list(report) == [check.name for check in CHECKS]
        return ran.code, report

    return run


def on_port(url: str, port: int) -> str:
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=f"{parts.netloc.rpartition(':')[0]}:{port}"))


@pytest.fixture
def free_port() -> Iterator[int]:
    """A port that is taken and refuses every connection, so that nobody can come to listen there."""
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        yield int(deaf.getsockname()[1])


def test_all_is_well(examine: Callable[..., tuple[int, Report]], towpath: Run) -> None:
    """O3"""
    code, report = examine()

    assert code == 0
    assert {status for status, _ in report.values()} <= {"ok", "warning", "not checked"}
    for check in ("settings", "database", "clock", "pooler", "listener", "schema", "broker", "topology"):
        assert report[check][0] == "ok", report[check]
    lines = towpath("doctor").out.splitlines()
    assert len(lines) == len(CHECKS)
    assert lines[0] == "ok           settings           read from the environment"


def test_wrong_settings_leave_everything_else_unchecked(
    examine: Callable[..., tuple[int, Report]], clean_environment: pytest.MonkeyPatch
) -> None:
    """O3 O2"""
    clean_environment.setenv("TOWPATH_RELAY__POL_MAX", "1s")

    code, report = examine()

    assert code == 2
    assert report.pop("settings") == (
        "failure",
        "TOWPATH_RELAY__POL_MAX is not a setting, did you mean TOWPATH_RELAY__POLL_MAX?",
    )
    assert {status for status, _ in report.values()} == {"not checked"}


def test_a_database_that_is_down_does_not_keep_the_broker_from_being_checked(
    examine: Callable[..., tuple[int, Report]],
    clean_environment: pytest.MonkeyPatch,
    migrated_url: str,
    free_port: int,
) -> None:
    """O3"""
    clean_environment.setenv("TOWPATH_DATABASE_URL", on_port(migrated_url, free_port))

    code, report = examine()

    assert code == 4
    assert report["database"][0] == "failure"
    assert "is it running where TOWPATH_DATABASE_URL says?" in report["database"][1]
    assert report["schema"] == ("not checked", "it needs the check database, which failed")
    assert report["broker"] == ("ok", "in memory")


@pytest.mark.parametrize("scheme", ["kafka", "amqp"])
def test_a_broker_that_is_down_does_not_keep_the_database_from_being_checked(
    examine: Callable[..., tuple[int, Report]],
    clean_environment: pytest.MonkeyPatch,
    free_port: int,
    scheme: str,
) -> None:
    """O3"""
    clean_environment.setenv("TOWPATH_BROKER_URL", f"{scheme}://127.0.0.1:{free_port}/")

    code, report = examine()

    assert code == 4
    assert "is the broker running where TOWPATH_BROKER_URL says?" in report["broker"][1]
    assert report["topology"][0] == "not checked"
    assert report["grants"][0] != "not checked"


def test_a_schema_that_is_missing_or_another(
    examine: Callable[..., tuple[int, Report]], clean_environment: pytest.MonkeyPatch, database_url: str
) -> None:
    """O3 O2"""
    clean_environment.setenv("TOWPATH_DATABASE_URL", database_url)

    code, report = examine()

    assert code == 3
    assert report["schema"] == ("failure", "the schema towpath is not installed: run towpath db upgrade")
    assert report["grants"][0] == "not checked"


async def test_what_differs_in_the_schema_is_told(examine: Callable[..., tuple[int, Report]], db: Db) -> None:
    """O3"""
    await db.execute("alter table towpath.task drop column owner cascade")

    code, report = await asyncio.to_thread(examine)

    assert code == 3
    assert "column task.owner is missing" in report["schema"][1]


async def test_the_grants_of_the_login_are_compared_with_the_roles(
    examine: Callable[..., tuple[int, Report]],
    clean_environment: pytest.MonkeyPatch,
    db: Db,
    migrated_url: str,
) -> None:
    """O3 X5 O2: every grant of `towpath db roles` counts, and a missing one is named."""
    prefix = f"t{uuid.uuid4().hex[:10]}"
    await db.execute(grants("towpath", prefix))
    await db.execute(f"create role {prefix} login")
    clean_environment.setenv("TOWPATH_DATABASE_URL", migrated_url.replace("postgres@", f"{prefix}@"))
    try:
        await db.execute(
            f"grant usage on schema towpath to {prefix}; grant select on towpath.meta to {prefix}"
        )
        code, report = await asyncio.to_thread(examine)
        assert code == 3
        assert report["grants"] == (
            "failure",
            f"{prefix} may do nothing here: run what {PRINTS}, then grant it a role",
        )
        for role, able in {
            "relay": "relay",
            "reader": "reader, relay",
            "worker": "producer, reader, relay, worker",
            "operator": "producer, reader, relay, worker, operator",
        }.items():
            await db.execute(f"grant {prefix}_{role} to {prefix}")
            code, report = await asyncio.to_thread(examine)
            assert report["grants"] == ("ok", f"{prefix} may do what these do: {able}")
        await db.execute(f"revoke {prefix}_operator, {prefix}_relay from {prefix}")
        await db.execute(f"revoke delete on towpath.key_gate from {prefix}_worker")
        code, report = await asyncio.to_thread(examine)
        assert code == 3
        assert report["grants"] == (
            "failure",
            f"{prefix} is no worker, for it lacks delete on towpath.key_gate: run what {PRINTS}",
        )
    finally:
        roles = [f"{prefix}_{role}" for role in ("producer", "reader", "relay", "worker", "operator")]
        for name in [prefix, *roles]:
            await db.execute(f"drop owned by {name}; drop role {name}")


async def test_settings_of_the_server_that_cost_something_are_warned_of(
    examine: Callable[..., tuple[int, Report]],
    clean_environment: pytest.MonkeyPatch,
    db: Db,
    migrated_url: str,
) -> None:
    """O3"""
    clean_environment.setenv("TOWPATH_WORKER__SESSIONS", "100000")
    clean_environment.setattr(database, "_OPEN_SECONDS", 0.0)
    clean_environment.setattr(database.time, "time", lambda: time.monotonic() - 1000)
    idle = await asyncpg.connect(migrated_url, server_settings={"application_name": "forgotten"})
    await idle.execute("begin; select pg_current_xact_id()")
    try:
        code, report = await asyncio.to_thread(examine)
    finally:
        await idle.close()

    assert code == 0, "warnings change nothing"
    assert report["connections"][0] == "warning"
    assert "lower TOWPATH_WORKER__SESSIONS" in report["connections"][1]
    assert report["open transactions"][0] == "warning"
    assert "idle in transaction" in report["open transactions"][1]
    assert "forgotten" in report["open transactions"][1]
    assert report["clock"][0] == "warning"
    assert "behind the database: run NTP on both" in report["clock"][1]


def test_a_pooler_by_transaction_is_told_from_one_by_session(
    examine: Callable[..., tuple[int, Report]],
    clean_environment: pytest.MonkeyPatch,
    migrated_url: str,
    session_pooler: PgBouncerServer,
    transaction_pooler: PgBouncerServer,
) -> None:
    """O3 O2: LISTEN is refused or deaf there."""
    clean_environment.setenv("TOWPATH_DATABASE_URL", session_pooler.before(migrated_url))
    code, report = examine()
    assert code == 0
    assert report["pooler"] == ("warning", "a pooler by session: fine for a relay, give workers a direct URL")
    assert report["listener"][0] == "ok"

    clean_environment.setenv("TOWPATH_DATABASE_URL", transaction_pooler.before(migrated_url))
    clean_environment.setenv("TOWPATH_RELAY__WAKEUP", "notify")
    clean_environment.setattr(database, "PROOF_SECONDS", 0.5)
    code, report = examine()
    assert code == 3
    assert report["pooler"][0] == "failure"
    assert "pool_mode = session" in report["pooler"][1]
    assert report["listener"][0] == "failure"
    assert "give the relay a direct URL" in report["listener"][1]


def test_what_a_group_needs_is_checked_with_it(
    examine: Callable[..., tuple[int, Report]],
    clean_environment: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """O3 C25"""

    async def for_ever(*_: object) -> timedelta:
        return timedelta.max

    clean_environment.setattr(MemoryAdmin, "kept_for", for_ever)
    (tmp_path / "doctored.py").write_text(
        "import msgspec\nfrom towpath import App, event\n"
        '@event("doctored.happened", destination="doctored")\n'
        "class Happened(msgspec.Struct):\n    x: int\n"
        'app = App("doctored")\nother = App("doctored")\nhollow = App("hollow")\n'
        "@app.idempotent()\nasync def on(happened: Happened) -> None: ...\n"
        "@other.idempotent()\nasync def on_other(happened: Happened) -> None: ...\n"
    )
    clean_environment.syspath_prepend(tmp_path)

    code, report = examine("--app", "doctored:app")
    assert code == 3
    assert report["app"] == ("ok", "doctored")
    assert report["topology"][0] == "failure"
    fix = "does not exist: run towpath broker apply --app doctored:app"
    assert f"address doctored {fix}" in report["topology"][1]
    assert "doctored keeps messages for ever and group doctored its rows for 7 days" in report["topology"][1]

    code, report = examine("--app", "doctored:app", "--app", "doctored:other", "--app", "doctored:hollow")
    assert code == 3
    assert "hollow: group 'hollow' has no handlers" in report["app"][1]
    assert "two of these apps are the group doctored: give each its name" in report["app"][1]

    assert "cannot import" in examine("--app", "not_there:app")[1]["app"][1]


async def test_another_app_under_the_name_of_a_running_group_is_found(
    examine: Callable[..., tuple[int, Report]], db: Db
) -> None:
    """O2 O3"""
    await db.execute(
        """
        insert into towpath.consumer_group (name, ordering) values ('orders', 'none');
        insert into towpath.worker (id, consumer_group, host, types, lease_until)
          values (gen_random_uuid(), 'orders', 'elsewhere', '{order.changed,stock.counted}', 'infinity');
        """
    )
    target = ("--app", "consumers.groups.orders.app:app")

    _, report = await asyncio.to_thread(examine, *target)
    assert report["groups"][0] == "failure"
    assert "orders is ordered by 'none' and this app says 'key', while 1 members" in report["groups"][1]

    await db.execute("update towpath.consumer_group set ordering = 'key'")
    _, report = await asyncio.to_thread(examine, *target)
    assert report["groups"][0] == "warning"
    assert "on elsewhere do not both handle invoice.requested, stock.counted" in report["groups"][1]


@pytest.fixture
def draining_relay() -> Iterator[int]:
    """The port of a health endpoint that says no."""

    class Endpoint(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(503)
            self.end_headers()
            self.wfile.write(b'{"ok": false, "is_draining": true}')

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Endpoint) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def test_processes_of_this_machine_are_asked(
    examine: Callable[..., tuple[int, Report]],
    clean_environment: pytest.MonkeyPatch,
    draining_relay: int,
    free_port: int,
) -> None:
    """O3"""
    clean_environment.setenv("TOWPATH_RELAY__HEALTH_PORT", str(draining_relay))
    clean_environment.setenv("TOWPATH_WORKER__HEALTH_PORT", str(free_port))

    code, report = examine()

    assert code == 3
    assert report["relay"][0] == "failure"
    assert "is_draining True" in report["relay"][1]
    assert report["worker"][0] == "not checked"
    assert "no worker answers at" in report["worker"][1]


async def test_a_frozen_database_ends_the_checks_that_need_it(
    examine: Callable[..., tuple[int, Report]],
    clean_environment: pytest.MonkeyPatch,
    migrated_url: str,
    postgres_proxy: TcpProxy,
) -> None:
    """O3"""
    clean_environment.setattr(database, "_CONNECT_SECONDS", 1)
    clean_environment.setenv("TOWPATH_DATABASE_URL", on_port(migrated_url, postgres_proxy.port))
    await postgres_proxy.hang()

    code, report = await asyncio.to_thread(examine)

    assert code == 4
    assert report["database"][0] == "failure"
    assert report["broker"][0] == "ok"


@pytest.mark.parametrize("broker", ["kafka", "rabbitmq"])
async def test_a_frozen_broker_ends_the_checks_that_need_it(
    examine: Callable[..., tuple[int, Report]],
    clean_environment: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    broker: str,
) -> None:
    """O3"""
    async with TcpProxy("127.0.0.1", 1) as proxy:
        await proxy.hang()
        scheme, option = ("kafka", "request") if broker == "kafka" else ("amqp", "connect")
        clean_environment.setenv("TOWPATH_BROKER_URL", f"{scheme}://127.0.0.1:{proxy.port}/")
        clean_environment.setenv("TOWPATH_BROKER_OPTIONS", json.dumps({f"{option}_timeout_ms": 1000}))
        code, report = await asyncio.to_thread(examine)

    assert code == 4
    assert report["broker"][0] == "failure"
    assert report["topology"][0] == "not checked"
    assert report["schema"][0] == "ok"


async def test_a_database_that_freezes_between_two_checks_is_given_up(
    towpath: Run, clean_environment: pytest.MonkeyPatch, migrated_url: str, postgres_proxy: TcpProxy
) -> None:
    """O3"""
    clean_environment.setenv("TOWPATH_DATABASE_URL", on_port(migrated_url, postgres_proxy.port))
    by_name = {check.name: check for check in CHECKS}

    async def freeze(_: Site) -> list[model.Finding]:
        await postgres_proxy.hang()
        clean_environment.setattr(model, "SECONDS", 1.0)
        return ok("frozen")

    chosen = [by_name["settings"], by_name["database"], Check("freeze", freeze)]
    chosen += [by_name["schema"], by_name["clock"], by_name["grants"]]
    async with AsyncExitStack() as stack:
        found = {name: finding async for name, finding in carry_out(chosen, Site([], stack))}

    assert found["schema"].status == "failure"
    assert found["schema"].code == 4
    assert found["clock"].text == "no answer any more since the check schema"
    assert found["grants"].status == "not checked"
