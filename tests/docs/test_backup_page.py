"""docs/backup-and-restore.md, followed from the dump to the end, for a database that is lost meanwhile."""

import asyncio
import os
import shlex
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeAlias

import asyncpg
import pytest

from tests.docs.pages import Block, blocks, commands
from tests.docs.test_operations import OF_A_LOST_DATABASE, is_as_shown
from tests.fixtures.fix_postgres import PROGRAMS
from tests.fixtures.graveyard import bury
from tests.integration.relaying import FAST, RecordingBroker, emit, eventually, relaying
from tests.integration.test_copies import refusal, until
from towpath.cli.root import run
from towpath.store import migrate
from towpath.testing.services import PostgresServer

pytestmark = pytest.mark.services

Db: TypeAlias = "asyncpg.Connection[Any]"

CALM = replace(FAST, publish_deadline=5)
ALL_SENT = "select not exists (select from towpath.outbox_message where status <> 'SENT')"


class Reader:
    """Somebody who follows the page, in a directory of their own."""

    def __init__(
        self, directory: Path, environment: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self._environment, self._capsys = environment, capsys
        environment.chdir(directory)
        environment.setenv("PATH", str(PROGRAMS), prepend=os.pathsep)

    async def towpath(self, url: str, line: str) -> str:
        """What a command prints at the database of this URL."""
        self._environment.setenv("TOWPATH_DATABASE_URL", url)
        self._capsys.readouterr()
        code = await asyncio.to_thread(run, shlex.split(line)[1:])
        out, err = self._capsys.readouterr()
        assert code == 0, f"{line}\n{err}"
        return out

    async def follow(self, url: str, block: Block, since: str = "") -> None:
        """Run a block; its commands print what it shows."""
        if block.language == "sh":
            self._environment.setenv("TOWPATH_DATABASE_URL", url)
            process = await asyncio.create_subprocess_exec("bash", "-ec", block.text)
            assert await process.wait() == 0
            return
        for line, output in commands(block.text.replace("2026-01-31T14:00Z", since)):
            printed = await self.towpath(url, line)
            assert is_as_shown(output, printed), (
                f"{OF_A_LOST_DATABASE}:{block.line} {line}\nprinted\n{printed}\nand shows\n{output}"
            )


@pytest.fixture
def reader(
    tmp_path: Path, clean_environment: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Reader:
    return Reader(tmp_path, clean_environment, capsys)


@asynccontextmanager
async def session(url: str) -> AsyncIterator[Db]:
    connection = await asyncpg.connect(url, timeout=60)
    try:
        yield connection
    finally:
        await connection.close(timeout=60)


async def order(db: Db, *names: str) -> None:
    """Orders of one customer and their messages, each in a transaction."""
    for name in names:
        async with db.transaction():
            await db.execute("insert into shop_order values ($1)", name)
            await emit(db, "customer", name.encode())


async def sent(db: Db, broker: RecordingBroker, last: bytes) -> list[bytes | None]:
    """What came, once this came and the journal knows of it."""
    await eventually(lambda: last in broker.payloads, seconds=60)
    await until(db, ALL_SENT)
    return broker.payloads


@pytest.mark.timeout(300)
async def test_a_lost_database_is_restored_as_the_page_says_and_nothing_committed_is_lost(
    reader: Reader,
) -> None:
    """R20: the relay refuses the dump, goes on after `rebase`, and sends again what was forgotten."""
    dump, restore, look, begin, again, copy = blocks(OF_A_LOST_DATABASE)
    broker = RecordingBroker()
    since = (datetime.now(UTC) - timedelta(hours=1)).strftime("%Y-%m-%dT%H:%MZ")
    summary = "towpath dlq summary --json"
    with PostgresServer() as lost:
        url = lost.create_database("shop")
        await asyncio.to_thread(migrate.upgrade, url)
        async with session(url) as db, session(url) as slow:
            # Ids far from those of the other cluster, whose first rows would count as seen.
            await db.execute(
                "do $$ begin for i in 1..3000 loop perform pg_current_xact_id(); commit; end loop; end $$"
            )
            await db.execute(await reader.towpath(url, "towpath db roles"))
            await db.execute("create table shop_order (name text primary key)")
            await bury(db, ["o-1", "o-1", "o-2"])
            async with relaying(url, broker, CALM):
                await order(db, "sent 1", "sent 2")
                await sent(db, broker, b"sent 2")
            await order(db, "pending 1", "pending 2", "pending 3")
            committed = await db.fetch("select message_id, payload from towpath.outbox order by id")
            dead = await reader.towpath(url, summary)
            async with slow.transaction():
                await slow.execute("insert into shop_order values ('too late')")
                await emit(slow, "customer", b"too late")
                await reader.follow(url, dump)
            async with relaying(url, broker, CALM):  # of which the dump knows nothing
                await sent(db, broker, b"too late")
        lost.stop(immediate=True)

    with PostgresServer() as server:
        url, broker = server.create_database("shop"), RecordingBroker()
        await reader.follow(url, restore)
        assert "towpath outbox rebase" in await refusal(url)
        await reader.follow(url, look)
        assert "towpath outbox rebase" in await refusal(url)
        await reader.follow(url, begin)
        async with relaying(url, broker, CALM), session(url) as db:
            assert await sent(db, broker, b"pending 3") == [b"pending 1", b"pending 2", b"pending 3"]
            broker.arrivals.clear()
            await reader.follow(url, again, since)
            await order(db, "new")
            await sent(db, broker, b"new")
            orders = await db.fetch("select name from shop_order order by name")
        *came, new = [(each.message.message_id, each.message.payload) for each in broker.arrivals]
        assert came == [tuple(row) for row in committed]
        assert new[1] == b"new"
        assert [row["name"].encode() for row in orders] == sorted(
            [*(row["payload"] for row in committed), b"new"]
        )
        assert await reader.towpath(url, summary) == dead

        url, broker = server.create_database("copy"), RecordingBroker()
        await reader.follow(url, restore)
        assert "towpath outbox rebase" in await refusal(url)
        await reader.follow(url, copy)
        await reader.towpath(url, "towpath outbox rebase --to now --yes")
        async with relaying(url, broker, CALM), session(url) as db:
            await order(db, "of the copy")
            assert await sent(db, broker, b"of the copy") == [b"of the copy"]
