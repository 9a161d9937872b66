"""README.md: its code runs, its commands exist, its links lead somewhere."""

import asyncio
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from uuid import uuid4

import asyncpg
import pytest

from tests.docs.pages import REPOSITORY, blocks, files, links, pages
from towpath.app import App
from towpath.brokers.factory import broker_from_url
from towpath.brokers.ports import GroupTopology
from towpath.consumer.engine import Consumer
from towpath.relay.engine import Relay
from towpath.store.database import Database, sqlalchemy_url
from towpath.telemetry import names

PAGE = "README.md"
PAGES = [PAGE, *pages(), "CHANGELOG.md"]


@pytest.fixture
def modules(
    tmp_path: Path, migrated_url: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[ModuleType, ModuleType]]:
    """`meters` and `ledger` as the page has them."""
    for name, text in files(PAGE).items():
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("DATABASE_URL", sqlalchemy_url(migrated_url))
    yield importlib.import_module("meters"), importlib.import_module("ledger")
    for name in ("meters", "ledger"):
        sys.modules.pop(name, None)


@pytest.mark.timeout(300)
async def test_what_the_first_example_writes_the_second_books_once(
    modules: tuple[ModuleType, ModuleType], migrated_url: str, db: "asyncpg.Connection[Any]"
) -> None:
    meters, ledger = modules
    await db.execute("create table meter as select 'M' || n as id, 0 as kwh from generate_series(1, 2) n")
    await db.execute("create table booking (id text, kwh int)")
    app: App = ledger.app
    broker = broker_from_url(f"memory://{uuid4()}")
    group = GroupTopology(app.name, app.destinations)
    await broker.admin().apply(group.addresses, [group], partitions=2)
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as running:
        running.create_task(Relay(migrated_url, broker).run(stop))
        running.create_task(Consumer(app, Database(migrated_url), broker).run(stop))
        try:
            await meters.record("M1", 1200)
            await meters.record("M2", -3)
            async with asyncio.timeout(180):
                while await db.fetchval("select count(finished_at) from towpath.task") < 2:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
        finally:
            stop.set()
            await meters.sessions.kw["bind"].dispose()
    states = await db.fetch("select key, state, reason_code from towpath.task order by key")
    assert [tuple(row) for row in states] == [("M1", "SUCCEEDED", None), ("M2", "FAILED", "runs_backwards")]
    assert [tuple(row) for row in await db.fetch("select * from booking")] == [("M1", 1200)]


def test_the_commands_are_targets_of_the_makefile() -> None:
    commands = [
        line for block in blocks(PAGE) if block.language == "sh" for line in block.text.strip().splitlines()
    ]
    assert commands == ["make demo", "make check", "make test"]
    for command in commands:
        subprocess.run([*command.split(), "-n"], cwd=REPOSITORY, check=True, capture_output=True)


def test_the_page_is_short() -> None:
    assert len((REPOSITORY / PAGE).read_text().splitlines()) <= 150
    for text in files(PAGE).values():
        statements = [line for line in text.splitlines() if line.strip()]
        assert len(statements) <= 20 + 1  # its name is the first line


@pytest.mark.parametrize("page", PAGES)
def test_links_between_pages_lead_somewhere(page: str) -> None:
    missing = [target for target in links(page) if not (REPOSITORY / page).parent.joinpath(target).exists()]
    assert missing == []


@pytest.mark.parametrize("index", ["docs/operations.md", "docs/relay.md"])
def test_the_first_page_of_a_folder_names_every_page_in_it(index: str) -> None:
    folder = {"docs/operations.md": "operating", "docs/relay.md": "relay"}[index]
    inside = {page.removeprefix("docs/") for page in pages() if page.startswith(f"docs/{folder}/")}
    assert inside - set(links(index)) == set()


@pytest.mark.parametrize("page", PAGES)
def test_modules_and_files_a_page_names_exist(page: str) -> None:
    """Paths below the source tree in backticks, such as `relay/reader.py`."""
    text = (REPOSITORY / page).read_text()
    package = REPOSITORY / "src" / "towpath"
    roots = [REPOSITORY, package.parent, package, package / "store"]
    named = set(re.findall(r"`((?:[\w-]+/)+(?:[\w-]+\.(?:py|sql|md))?)`", text))
    missing = [name for name in sorted(named) if not any((root / name).exists() for root in roots)]
    assert missing == []


@pytest.mark.parametrize("page", PAGES)
def test_metrics_a_page_names_exist(page: str) -> None:
    """Behind the word metric, such as metric `towpath.breakers.open`."""
    text = (REPOSITORY / page).read_text()
    named = set(re.findall(r"metrics? `(towpath\.[a-z_.]+)`", text))
    assert named - {metric.name for metric in names.METRICS} == set()
