"""The shop of the examples, run as its readers would: three producers, a relay, a group that consumes."""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import asyncpg
import httpx
import pytest

from tests.fixtures.fix_postgres import PROGRAMS, NewDatabase
from tests.integration.wired import new_name
from towpath.store import migrate
from towpath.store.database import sqlalchemy_url
from towpath.store.migrations.scripts import split
from towpath.testing.services.ports import ReservedPort
from towpath.testing.services.processes import Command, ProcessGroup

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

REPOSITORY: Final = Path(__file__).parents[2]
APP: Final = "examples.shop.billing:app"
DJANGO: Final = "examples.shop.django_site"
PSQL_SCRIPT: Final = "examples/shop/place_order.sql"
SECONDS: Final = 120
TRACE: Final = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@dataclass
class Shop:
    """Everything runs, on one database and one broker."""

    url: str
    environment: dict[str, str]
    fastapi: str
    django: str

    def manage(self, *arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
        """manage.py."""
        return self.run(sys.executable, "-m", DJANGO, *arguments, **environment)

    def run(self, *argv: str, **environment: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            argv,
            cwd=REPOSITORY,
            env={**self.environment, **environment},
            capture_output=True,
            text=True,
            check=False,
            timeout=SECONDS,
        )

    def psql(self, **variables: str) -> "subprocess.CompletedProcess[str]":
        """The script with its variables."""
        given = [word for name, value in variables.items() for word in ("-v", f"{name}={value}")]
        return self.run("psql", "-X", "-v", "ON_ERROR_STOP=1", *given, "-f", PSQL_SCRIPT, self.url)

    def ask(self, query: str, *arguments: object) -> list[Any]:
        """Rows of a query."""

        async def fetch() -> list[Any]:
            connection = await asyncpg.connect(self.url, timeout=30)
            try:
                return [tuple(row) for row in await connection.fetch(query, *arguments)]
            finally:
                await connection.close(timeout=30)

        return asyncio.run(fetch())

    def is_paid(self, order: str) -> bool:
        """Whether the group has heard both of the order and of its charge, once each."""
        told = self.ask("select told_by from shop_payment where order_id = $1 order by told_by", order)
        return told == [("event",), ("task",)]

    def counts(self) -> list[Any]:
        """Orders, events and tasks there are."""
        return self.ask(
            "select (select count(*) from shop_order), (select count(*) from orders_order),"
            " (select count(*) from towpath.outbox where kind = 'event' and destination <> 'towpath.canary'),"
            " (select count(*) from towpath.task where kind = 'task')"
        )


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def answers(url: str) -> bool:
    try:
        httpx.get(url, timeout=5)
    except httpx.TransportError:
        return False
    return True


@pytest.fixture(scope="module")
def shop(new_database: NewDatabase, rabbit_url: str) -> Iterator[Shop]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TOWPATH_", "OTEL_"))}
    fastapi, django = ReservedPort(), ReservedPort()
    with new_database(None) as url:
        environment = {
            **kept,
            "PATH": f"{PROGRAMS}{os.pathsep}{kept['PATH']}",
            "PYTHONPATH": str(REPOSITORY),
            "DATABASE_URL": url,
            "TOWPATH_BROKER_URL": rabbit_url,
        }
        made = Shop(
            url, environment, f"http://127.0.0.1:{fastapi.number}", f"http://127.0.0.1:{django.number}"
        )
        processes = ProcessGroup("shop")
        try:
            prepare(made)
            for name, *argv in running(fastapi, django):
                own_url = sqlalchemy_url(url) if name == "fastapi" else url
                processes.spawn(Command(name, argv, {**environment, "DATABASE_URL": own_url}))
            until(lambda: answers(made.fastapi) and answers(made.django))
            yield made
        finally:
            processes.close()
            fastapi.release()
            django.release()


def prepare(shop: Shop) -> None:
    """The schema comes with Django's migrations; the rest as a deployment would make it."""
    migrated = shop.manage("migrate", "--verbosity", "0")
    assert migrated.returncode == 0, migrated.stderr
    for name in ("orders", "tasks.billing"):
        shop.ask("insert into towpath.destination values ($1, 0, $2)", name, new_name(name))
    for statement in split((REPOSITORY / "examples/shop/schema.sql").read_text()):
        shop.ask(statement)
    applied = shop.manage("towpath", "broker", "apply", "--app", APP)
    assert applied.returncode == 0, applied.stderr


def running(fastapi: ReservedPort, django: ReservedPort) -> Iterator[Sequence[str]]:
    python = sys.executable
    yield "fastapi", python, "-m", "uvicorn", "examples.shop.fastapi_app:app", "--port", str(fastapi.number)
    yield "django", python, "-m", DJANGO, "runserver", "--noreload", f"127.0.0.1:{django.number}"
    yield "relay", python, "-m", DJANGO, "towpath", "relay", "run"
    yield "worker", python, "-m", DJANGO, "towpath", "worker", "run", APP


def test_an_order_placed_with_fastapi_is_paid(shop: Shop) -> None:
    placed = httpx.post(f"{shop.fastapi}/orders", json={"id": "f-1", "amount": 5}, timeout=SECONDS)

    assert placed.status_code == 201
    until(lambda: shop.is_paid("f-1"))
    charge = httpx.get(f"{shop.fastapi}/charges/{placed.json()['charge']}", timeout=SECONDS)
    assert charge.json() == {"state": "SUCCEEDED"}


def test_fastapi_says_created_only_when_the_commit_has_succeeded(shop: Shop) -> None:
    """P1: the error comes at COMMIT, behind the end of the endpoint."""
    shop.ask(
        """
        do $$ begin
          create function refuse() returns trigger language plpgsql as
            'begin raise exception ''too late''; end';
          create constraint trigger refuse after insert on shop_order deferrable initially deferred
            for each row when (new.id = 'f-refused') execute function refuse();
        end $$
        """
    )
    before = shop.counts()

    placed = httpx.post(f"{shop.fastapi}/orders", json={"id": "f-refused", "amount": 5}, timeout=SECONDS)

    assert placed.status_code == 500
    assert shop.counts() == before


def test_an_order_placed_with_django_is_paid(shop: Shop) -> None:
    """P4: on the psycopg connection that Django keeps."""
    placed = httpx.post(f"{shop.django}/orders", json={"id": "d-1", "amount": 7}, timeout=SECONDS)

    assert placed.status_code == 201
    until(lambda: shop.is_paid("d-1"))
    before = shop.counts()
    again = httpx.post(f"{shop.django}/orders", json={"id": "d-1", "amount": 7}, timeout=SECONDS)
    assert (again.status_code, shop.counts()) == (500, before)


def test_django_savepoints_take_along_what_they_emitted_and_autocommit_is_refused(shop: Shop) -> None:
    """P1, P4, P10"""
    script = """
from django.db import connection, transaction
from examples.shop.django_site.orders.views import place_order
from examples.shop.messages import OrderPlaced
from towpath import emit
from towpath.errors import NoTransaction

with transaction.atomic():
    place_order("d-kept", 1)
    try:
        with transaction.atomic():
            place_order("d-dropped", 1)
            raise KeyError
    except KeyError:
        pass
try:
    emit(connection.connection, OrderPlaced("d-nowhere", 1))
except NoTransaction:
    print("refused")
"""
    done = shop.manage("shell", "--no-imports", "-c", script)

    assert (done.returncode, done.stdout) == (0, "refused\n"), done.stderr
    until(lambda: shop.is_paid("d-kept"))
    told = shop.ask("select key from towpath.outbox where key in ('d-dropped', 'd-nowhere')")
    assert told == []


def test_the_management_command_is_the_command_line(shop: Shop) -> None:
    listed = shop.manage("towpath", "tasks", "list", "--group", "billing", "--json")

    assert (listed.returncode, listed.stderr) == (0, "")
    json.loads(listed.stdout)
    down = shop.manage("towpath", "dlq", "list", TOWPATH_DATABASE_URL="postgresql://app@127.0.0.1:1/x")
    assert (down.returncode, down.stderr.count("\n")) == (4, 1)


def test_django_migrates_both_schemas_and_does_so_twice(shop: Shop) -> None:
    assert migrate.check(shop.url) == []
    assert shop.manage("migrate", "--verbosity", "0").returncode == 0


def test_djangos_test_runner_makes_a_database_with_both_schemas(shop: Shop) -> None:
    """P1: where tests emit and submit, and leave nothing in the service's own database."""
    before = shop.counts()

    ran = shop.manage("test", "--noinput", "examples.shop.django_site")

    assert (ran.returncode, "Ran 2 tests" in ran.stderr) == (0, True), ran.stderr
    assert shop.counts() == before


def test_an_order_placed_with_psql_is_paid_and_keeps_its_trace(shop: Shop) -> None:
    """O4"""
    placed = shop.psql(order="s'1", amount="9", traceparent=TRACE)

    assert placed.returncode == 0, placed.stderr
    until(lambda: shop.is_paid("s'1"))
    (found,) = shop.ask("select state, trace from towpath.task where id::text = $1", placed.stdout.strip())
    assert found == ("SUCCEEDED", TRACE)


def test_a_script_that_fails_half_way_leaves_nothing(shop: Shop) -> None:
    """P1"""
    assert shop.psql(order="s-2", amount="1").returncode == 0
    before = shop.counts()

    assert shop.psql(order="s-2", amount="1").returncode == 3
    assert shop.counts() == before
