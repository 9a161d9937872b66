"""The relay on databases that are not the ones its journal was written in: restored, promoted, moved."""

import asyncio
import json
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import asyncpg
import pytest

from tests.fixtures.fix_cli import Run
from tests.integration.relaying import (
    FAST,
    RecordingBroker,
    emit,
    eventually,
    relaying,
)
from towpath.cli.root import run
from towpath.errors import ConfigurationError
from towpath.relay import Relay
from towpath.testing.services import PostgresServer

Rebase: TypeAlias = Callable[..., Awaitable[dict[str, Any]]]


@pytest.fixture(scope="module")
def other_cluster() -> Iterator[PostgresServer]:
    """A second cluster, with transaction ids of its own."""
    with PostgresServer() as server:
        yield server


async def refusal(url: str) -> str:
    """What a relay says that does not start."""
    with pytest.raises(BaseExceptionGroup) as raised:
        async with asyncio.timeout(30):
            await Relay(url, RecordingBroker(), FAST).run(asyncio.Event())
    found = raised.value.split(ConfigurationError)[0]
    assert found is not None
    return str(found.exceptions[0])


@pytest.fixture
def rebase(clean_environment: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Rebase:
    """`towpath outbox rebase --json …` on a database."""

    async def command(url: str, *arguments: str) -> dict[str, Any]:
        clean_environment.setenv("TOWPATH_DATABASE_URL", url)
        capsys.readouterr()
        code = await asyncio.to_thread(run, ("outbox", "rebase", "--json", *arguments))
        out, err = capsys.readouterr()
        assert code == 0, err
        found: dict[str, Any] = json.loads(out)
        return found

    return command


async def sent(url: str, count: int) -> list[bytes | None]:
    """What a relay sends there, when it has sent that much and then a sentinel."""
    broker = RecordingBroker()
    async with relaying(url, broker):
        await eventually(lambda: len(broker.arrivals) >= count)
        db = await asyncpg.connect(url)
        await emit(db, None, b"sentinel")
        await db.close()
        await eventually(lambda: b"sentinel" in broker.payloads)
    return [payload for payload in broker.payloads if payload != b"sentinel"]


@pytest.fixture
def dump(postgres_server: PostgresServer) -> Iterator[Path]:
    """Where a test's dump goes; the servers' owner may write there."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o777)
        yield Path(directory) / "dump"


async def restored(
    migrated_url: str, postgres_server: PostgresServer, other_cluster: PostgresServer, dump: Path, name: str
) -> str:
    """The database, dumped and restored into the other cluster."""
    await asyncio.to_thread(postgres_server.run, "pg_dump", "-Fc", "-f", str(dump), migrated_url)
    url = await asyncio.to_thread(other_cluster.create_database, name)
    await asyncio.to_thread(postgres_server.run, "pg_restore", "-d", url, str(dump))
    return url


async def test_a_restored_database_goes_on_where_the_copied_journal_stood(
    db: "asyncpg.Connection[Any]",
    migrated_url: str,
    postgres_server: PostgresServer,
    other_cluster: PostgresServer,
    dump: Path,
    rebase: Rebase,
) -> None:
    """R20: sent stays sent, the rest is sent, also what was written since in a savepoint, or for later."""
    # Ids far from those of the other cluster, whose first rows would count as seen.
    await db.execute(
        "do $$ begin for i in 1..3000 loop perform pg_current_xact_id(); commit; end loop; end $$"
    )
    broker = RecordingBroker()
    async with relaying(migrated_url, broker):
        for number in range(20):
            await emit(db, str(number), b"sent %d" % number)
        await eventually(lambda: len(broker.arrivals) == 20)
    for number in range(20):
        await emit(db, str(number), b"pending %d" % number)
    await db.execute(
        """
        insert into towpath.scheduled (due_at, message_id, destination, type, key, content_type, payload)
        values (towpath.clock() + interval '3 seconds', gen_random_uuid(), 'orders', 't', 'k', 'text/plain',
                'later')
        """
    )
    url = await restored(migrated_url, postgres_server, other_cluster, dump, "continued")
    copy = await asyncpg.connect(url)
    await copy.execute(
        "do $$ begin perform 1; begin "
        "insert into towpath.outbox (shard, message_id, kind, destination, type, key, content_type, payload) "
        "select 3, gen_random_uuid(), 'event', 'orders', 't', 'k', 'text/plain', 'since'; "
        "exception when division_by_zero then null; end; end $$"
    )
    assert "towpath outbox rebase" in await refusal(url)
    plan = await rebase(url, "--to", "journal", "--dry-run")
    assert (plan["unsent"], plan["sent"], plan["dropped"]) == (21, 20, 0)
    assert "towpath outbox rebase" in await refusal(url)
    assert (await rebase(url, "--to", "now", "--dry-run"))["dropped"] == 1
    await rebase(url, "--to", "journal", "--yes", "--reason", "restored", "--actor", "ann")
    payloads = await sent(url, 22)
    assert sorted(payloads, key=str) == sorted(
        [*(b"pending %d" % number for number in range(20)), b"since", b"later"], key=str
    )
    audit = await copy.fetchrow("select actor, reason, filter, counts from towpath.audit")
    assert (audit["actor"], audit["reason"], json.loads(audit["filter"])) == (
        "ann", "restored", {"to": "journal"},
    )  # fmt: skip
    await copy.close()


async def test_the_point_says_what_a_copy_sends(
    db: "asyncpg.Connection[Any]",
    migrated_url: str,
    postgres_server: PostgresServer,
    other_cluster: PostgresServer,
    dump: Path,
    rebase: Rebase,
) -> None:
    """R20: nothing, everything in order, or what was written since a time, sent before or not."""
    broker = RecordingBroker()
    async with relaying(migrated_url, broker):
        for number in range(5):
            await emit(db, "k", b"%d" % number)
        await eventually(lambda: len(broker.arrivals) == 5)
    await db.execute("update towpath.outbox set created_at = towpath.clock() - interval '1 hour'")
    for number in range(5, 8):
        await emit(db, "k", b"%d" % number)
    url = await restored(migrated_url, postgres_server, other_cluster, dump, "pointed")
    await rebase(url, "--to", "now", "--yes")
    assert await sent(url, 0) == []
    await rebase(url, "--to", "30m", "--yes")
    assert (await sent(url, 4))[:3] == [b"5", b"6", b"7"]
    await rebase(url, "--to", "oldest", "--yes")
    assert await sent(url, 8) == [b"%d" % number for number in range(8)]


async def test_a_starting_point_is_not_set_under_a_running_relay(
    db: "asyncpg.Connection[Any]", migrated_url: str, towpath: Run
) -> None:
    """R20: its memory would write over it."""
    async with relaying(migrated_url, RecordingBroker()) as relay:
        await eventually(lambda: len(relay.status().shards) == 16)
        ran = await asyncio.to_thread(towpath, "outbox", "rebase", "--to", "oldest", "--yes")
    assert ran.code == 2
    assert "stop the relays" in ran.err
    assert await db.fetchval("select count(*) from towpath.audit") == 0
