"""The likeliest mistakes end in one line that says what, why and the fix, with the promised exit code."""

import asyncio
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import asyncpg
import pytest

from tests.fixtures.fix_cli import Ran, Run, towpath_process
from towpath.errors import UnknownType
from towpath.outbox import emit
from towpath.testing.services import PgBouncerServer, PostgresServer

Db: TypeAlias = "asyncpg.Connection[Any]"

CANARY = "s3cr3t-canary"


def refused(ran: Ran, code: int, *words: str) -> None:
    assert ran.code == code, ran
    assert ran.out == ""
    assert ran.err.startswith("towpath: ")
    assert ran.err.count("\n") == 1, ran.err
    assert CANARY not in ran.err
    for word in words:
        assert word in ran.err


@pytest.fixture
def free_port() -> Iterator[int]:
    """A port that is taken and refuses every connection, so that nobody can come to listen there."""
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        yield int(deaf.getsockname()[1])


def test_no_database_url(towpath: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """O2"""
    monkeypatch.delenv("TOWPATH_DATABASE_URL")

    refused(towpath("dlq", "list"), 2, "TOWPATH_DATABASE_URL is not set, export for example")


def test_a_wrong_database_url(towpath: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """O2"""
    monkeypatch.setenv("TOWPATH_DATABASE_URL", f"postgres:/app:{CANARY}@db/x")

    refused(towpath("dlq", "list"), 2, "TOWPATH_DATABASE_URL is not a URL such as postgresql://")


@pytest.mark.parametrize("arguments", [("dlq", "list"), ("db", "upgrade"), ("db", "check")], ids=" ".join)
def test_the_database_is_down(
    towpath: Run, monkeypatch: pytest.MonkeyPatch, free_port: int, arguments: tuple[str, ...]
) -> None:
    """O2"""
    monkeypatch.setenv("TOWPATH_DATABASE_URL", f"postgresql://app:{CANARY}@127.0.0.1:{free_port}/x")

    refused(towpath(*arguments), 4, "is it running where TOWPATH_DATABASE_URL says?")


@pytest.mark.parametrize("arguments", [("dlq", "list"), ("db", "upgrade")], ids=" ".join)
def test_the_database_does_not_exist(
    towpath: Run, migrated_url: str, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    """O2"""
    monkeypatch.setenv("TOWPATH_DATABASE_URL", f"{migrated_url}_typo")

    refused(towpath(*arguments), 4, "the database does not exist: create it, or correct TOWPATH_DATABASE_URL")


def test_a_login_that_is_refused(towpath: Run, migrated_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """O2"""
    wrong = migrated_url.replace("postgres@", f"nobody-here:{CANARY}@")
    monkeypatch.setenv("TOWPATH_DATABASE_URL", wrong)

    refused(towpath("dlq", "list"), 4, "correct user and password in TOWPATH_DATABASE_URL")


async def test_a_wrong_password(
    db: Db,
    postgres_server: PostgresServer,
    towpath: Run,
    migrated_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """O2: of a role that this server asks for one."""
    rules = postgres_server.data_directory / "pg_hba.conf"
    before = rules.read_text()
    await db.execute("create role careful login password 'right'")
    try:
        rules.write_text(f"host all careful 127.0.0.1/32 scram-sha-256\n{before}")
        await reload(db)
        monkeypatch.setenv("TOWPATH_DATABASE_URL", migrated_url.replace("postgres@", f"careful:{CANARY}@"))

        ran = await asyncio.to_thread(towpath, "dlq", "list")
    finally:
        rules.write_text(before)
        await reload(db)
        await db.execute("drop role careful")

    refused(
        ran, 4, "the database refused the login: correct user and password in TOWPATH_DATABASE_URL", "careful"
    )


async def reload(db: Db) -> None:
    """The configuration. Sessions hear of it behind the process that takes new connections."""
    before = await db.fetchval("select pg_conf_load_time()")
    await db.execute("select pg_reload_conf()")
    while await db.fetchval("select pg_conf_load_time()") == before:  # noqa: ASYNC110 - a server does not tell
        await asyncio.sleep(0.01)


def test_a_pooler_where_a_direct_connection_is_needed(
    towpath: Run,
    migrated_url: str,
    transaction_pooler: PgBouncerServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """O2"""
    monkeypatch.setenv("TOWPATH_DATABASE_URL", transaction_pooler.before(migrated_url))

    refused(towpath("dlq", "list"), 1, "leads through a pooler", "give a direct URL", "towpath doctor")


@pytest.mark.parametrize("noun", ["relay", "worker"])
def test_the_health_port_is_taken(migrated_url: str, noun: str) -> None:
    """O2"""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        ran = towpath_process(
            migrated_url,
            noun,
            "run",
            *(["consumers.groups.orders.app:app"] if noun == "worker" else []),
            environment={
                f"TOWPATH_{noun.upper()}__HEALTH_PORT": port,
                "TOWPATH_BROKER_URL": "memory://taken",
                "TOWPATH_TELEMETRY__LOG_LEVEL": "ERROR",
            },
        )

    refused(ran, 1, f"cannot listen for health checks at 127.0.0.1:{port}: Address already in use: end what")


@pytest.mark.parametrize(
    "arguments", [("dlq", "list"), ("tasks", "list"), ("outbox", "status")], ids=" ".join
)
def test_the_schema_is_missing(
    towpath: Run, database_url: str, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    """O2"""
    monkeypatch.setenv("TOWPATH_DATABASE_URL", database_url)

    refused(towpath(*arguments), 1, "the schema towpath is not installed: run towpath db upgrade")


async def test_the_schema_is_older_or_newer_than_the_code(db: Db, towpath: Run) -> None:
    """O2"""
    for version, oldest, told in (
        (0, 0, "has version 0, this towpath needs 1: run towpath db upgrade"),
        (
            3,
            2,
            "has version 3 and works with towpath of version 2 or newer, this one is of 1: install a newer",
        ),
    ):
        await set_version(db, version, oldest)
        refused(await asyncio.to_thread(towpath, "dlq", "list"), 1, told)


async def test_the_number_of_shards_was_changed(db: Db, towpath: Run) -> None:
    """O2, R15: rows of shards above would have no owner."""
    await db.execute(
        """
        create or replace function towpath.shards_per_broker() returns smallint
          language sql immutable parallel safe as $$ select 32::smallint $$
        """
    )

    refused(
        await asyncio.to_thread(towpath, "dlq", "list"), 1, "says 32, not 16: the number of shards is fixed"
    )


async def set_version(db: Db, version: int, compatible_from: int) -> None:
    """As a migration of another towpath would have left it."""
    await db.execute(
        f"""
        update towpath.meta set value = '{version}' where name = 'schema_version';
        update towpath.meta set value = '{compatible_from}' where name = 'compatible_from';
        """
    )


async def test_a_table_was_dropped(db: Db, towpath: Run) -> None:
    """O2"""
    await db.execute("drop table towpath.key_gate, towpath.audit; alter table towpath.task drop column owner")

    refused(await asyncio.to_thread(towpath, "tasks", "list"), 1, "a column is missing: run towpath db check")


async def test_a_role_lacks_a_grant(
    db: Db, towpath: Run, migrated_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """O2"""
    await db.execute(
        """
        do $$ begin create role poor login; exception when duplicate_object then null; end $$;
        grant usage on schema towpath to poor; grant select on towpath.meta to poor
        """
    )
    monkeypatch.setenv("TOWPATH_DATABASE_URL", migrated_url.replace("postgres@", "poor@"))

    ran = await asyncio.to_thread(towpath, "dlq", "list")

    refused(ran, 1, "the role lacks a grant: towpath db roles prints the statements", "dead_letter")


def test_an_unknown_setting(towpath: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """O2"""
    monkeypatch.setenv("TOWPATH_RELAY__POLL_MAXX", CANARY)

    refused(towpath("config", "show"), 2, "did you mean TOWPATH_RELAY__POLL_MAX?")


def test_a_bad_value_of_a_setting(towpath: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """O2"""
    monkeypatch.setenv("TOWPATH_RELAY__LEASE", "30")

    refused(towpath("relay", "run"), 2, "TOWPATH_RELAY__LEASE cannot read '30' as a duration")


@pytest.mark.parametrize("scheme", ["kafka", "amqp"])
def test_the_broker_is_down(
    towpath: Run, monkeypatch: pytest.MonkeyPatch, free_port: int, scheme: str
) -> None:
    """O2"""
    user = "" if scheme == "kafka" else f"app:{CANARY}@"
    monkeypatch.setenv("TOWPATH_BROKER_URL", f"{scheme}://{user}127.0.0.1:{free_port}/")

    refused(
        towpath("broker", "check", "--address", "orders"),
        4,
        "is the broker running where TOWPATH_BROKER_URL says?",
    )


def test_a_topic_is_absent(towpath: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """O2"""
    monkeypatch.setenv("TOWPATH_BROKER_URL", "memory://absent")

    ran = towpath("broker", "check", "--address", "orders")

    assert (ran.code, ran.err) == (3, "")
    assert "address orders does not exist\n" in ran.out
    assert ran.out.endswith("towpath broker apply with the same options creates what does not exist\n")


def test_a_destination_that_is_not_registered(towpath: Run) -> None:
    """O2"""
    refused(towpath("destination", "unset", "orderz"), 1, "the destination orderz has no row")
    ran = towpath("destination", "set", "orders", "--broker", "elsewhere")
    refused(ran, 2, "there is no broker 'elsewhere', only", "towpath broker add makes one")


async def test_a_message_type_that_is_not_declared(db: Db) -> None:
    """O2"""

    class OrderPlaced: ...

    async with db.transaction():
        with pytest.raises(
            UnknownType, match="OrderPlaced is not a declared message: decorate it with @event or @task"
        ):
            await emit(db, OrderPlaced())


def test_a_broker_option_that_the_client_does_not_know(towpath: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """O2"""
    monkeypatch.setenv("TOWPATH_BROKER_OPTIONS", '{"compresion_type": "lz4"}')

    ran = towpath("broker", "check", "--address", "orders")

    refused(ran, ran.code, "compresion_type")
    assert ran.code in (1, 2)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("nowhere.to.be.found:app", "cannot import"),
        ("json:loads", "is not a towpath App"),
        ("json:missing", "is not a towpath App"),
        ("json", "module:attribute"),
    ],
)
def test_an_app_that_cannot_be_found(towpath: Run, target: str, words: str) -> None:
    """O2"""
    for arguments in (("worker", "validate", target), ("worker", "run", target)):
        ran = towpath(*arguments)
        refused(ran, ran.code, words)
        assert ran.code in (1, 2)


def test_an_app_without_handlers_is_said_no_to(
    towpath: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """O2"""
    (tmp_path / "hollow_group.py").write_text('from towpath import App\napp = App("hollow")\n')
    monkeypatch.syspath_prepend(tmp_path)

    ran = towpath("worker", "validate", "hollow_group:app")

    assert (ran.code, ran.out, ran.err) == (3, "group 'hollow' has no handlers\n", "")


def test_a_mistyped_command_and_option(towpath: Run) -> None:
    """O2"""
    refused(towpath("dlq", "replai"), 2, "No such command 'replai'", "see towpath dlq --help")
    refused(towpath("dlq", "list", "--grup", "x"), 2, "No such option", "see towpath dlq list --help")
    refused(towpath("dlq", "show"), 2, "Missing argument")


def test_the_extra_is_not_installed(migrated_url: str, tmp_path: Path) -> None:
    """O2"""
    (tmp_path / "typer.py").write_text("raise ModuleNotFoundError(\"No module named 'typer'\", name='typer')")

    ran = towpath_process(migrated_url, "version", environment={"PYTHONPATH": str(tmp_path)})

    refused(ran, 2, 'pip install "towpath[cli]"')


@pytest.mark.parametrize(("module", "scheme"), [("aiokafka", "kafka"), ("aio_pika", "amqp")])
def test_the_extra_of_the_broker_is_not_installed(
    migrated_url: str, tmp_path: Path, module: str, scheme: str
) -> None:
    """O2"""
    extra = {"kafka": "kafka", "amqp": "rabbitmq"}[scheme]
    (tmp_path / f"{module}.py").write_text(f"raise ModuleNotFoundError('No module', name='{module}')")

    ran = towpath_process(
        migrated_url,
        *("broker", "check", "--address", "orders"),
        environment={"PYTHONPATH": str(tmp_path), "TOWPATH_BROKER_URL": f"{scheme}://127.0.0.1/"},
    )

    refused(ran, 2, f'pip install "towpath[{extra}]"')


def test_a_bug_shows_its_traceback_only_on_request(towpath: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """O1"""
    from towpath.cli import session

    def broken() -> None:
        raise ZeroDivisionError(f"password={CANARY}")

    monkeypatch.setattr(session.settings, "load", broken)

    refused(towpath("dlq", "list"), 1, "failed: ZeroDivisionError", "-vv")
    assert "Traceback" in towpath("-vv", "dlq", "list").err


def test_the_other_end_of_a_pipe_may_close(migrated_url: str) -> None:
    import subprocess

    done = subprocess.run(
        f"{sys.executable} -m towpath.cli config show | head -c 1",
        shell=True,
        env={"TOWPATH_DATABASE_URL": migrated_url, "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert (done.returncode, done.stderr) == (0, "")


def test_db_commands_tell_where_the_schema_stands(
    towpath: Run, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """O1"""
    monkeypatch.setenv("TOWPATH_DATABASE_URL", database_url)

    assert towpath("db", "current") == Ran(3, "not installed, newest is 0001\n", "")
    assert towpath("db", "check").code == 3
    assert towpath("db", "upgrade") == Ran(0, "the schema is at revision 0001\n", "")
    assert towpath("db", "upgrade") == Ran(0, "the schema is at revision 0001\n", "")
    assert towpath("db", "current") == Ran(0, "0001, newest is 0001\n", "")
    assert towpath("db", "check") == Ran(0, "the schema is as the migrations make it\n", "")


def test_version(towpath: Run) -> None:
    from importlib.metadata import version

    assert towpath("version") == Ran(0, f"{version('towpath')}\n", "")
