"""Migration, relay, worker, operator and reader at their whole work, each logged in as no more than that."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import pytest
import pytest_asyncio

from tests.fixtures.fix_cli import Run
from tests.integration.engine import Posted, bench, depot, until
from tests.integration.relaying import FAST, eventually, relaying
from tests.integration.test_cli_commands import ask
from tests.integration.test_publish_gates import Sick
from towpath import emit
from towpath.context import Tx
from towpath.store import migrate
from towpath.store.roles import ROLES, grants

Urls = dict[str, str]
GATES = "select count(*) from towpath.publish_gate"


def as_user(url: str, user: str) -> str:
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=f"{user}:x@{parts.hostname}:{parts.port}"))


@pytest_asyncio.fixture
async def urls(database_url: str) -> AsyncIterator[Urls]:
    """A database that its owner migrated, who is no superuser, and a login for each role and for nobody."""
    admin = await asyncpg.connect(database_url, timeout=60)
    name = await admin.fetchval("select current_database()")
    prefix = name
    made = {role: f"{prefix}_{role}_login" for role in (*ROLES, "stranger")}
    await admin.execute(
        f"create role {prefix}_owner login password 'x' createrole; grant create on database {name} to"
        f" {prefix}_owner"
    )
    owner_url = as_user(database_url, f"{prefix}_owner")
    await asyncio.to_thread(migrate.upgrade, owner_url)
    owner = await asyncpg.connect(owner_url, timeout=60)
    await owner.execute(grants("towpath", prefix))
    for role, login in made.items():
        await owner.execute(f"create role {login} login password 'x'")
        if role != "stranger":
            await owner.execute(f"grant {prefix}_{role} to {login}")
    await owner.close(timeout=60)
    yield {role: as_user(database_url, login) for role, login in made.items()} | {"owner": owner_url}
    for role in (*made.values(), *(f"{prefix}_{each}" for each in (*ROLES, "owner"))):
        await admin.execute(f"drop owned by {role} cascade; drop role {role}")
    await admin.close(timeout=60)


async def test_every_process_does_its_whole_work_as_its_own_role(
    urls: Urls, towpath: Run, clean_environment: pytest.MonkeyPatch
) -> None:
    """X5: the owner migrates, a relay relays, parks, moves and looks, a worker works, an operator decides."""
    app, calls = depot(), list[int]()

    @app.transactional()
    async def keep(posted: Posted, tx: Tx) -> None:
        calls.append(posted.number)
        if posted.number == 3:
            raise ValueError("no")

    owner = await asyncpg.connect(urls["owner"], timeout=60)
    await owner.execute(
        "insert into towpath.destination (name, address, on_poison) values ('orders', 'orders', 'park_key')"
    )
    broker = Sick(b"1")
    options = replace(FAST, canary_every=0.5)
    producer = await asyncpg.connect(urls["producer"], timeout=60)
    async with relaying(urls["relay"], broker, options) as relay:
        for body in (b"0", b"1", b"2"):
            await producer.execute("select towpath.emit('orders', 't', $1, 'k')", body)
        await producer.execute("select towpath.emit('views', 't', 'later', due_at => now())")
        await eventually(lambda: relay.status().gate_count == 1)
        await eventually(lambda: b"later" in broker.payloads)
        assert broker.of_key("k") == [b"0"]
        await eventually(lambda: relay.status().figures["slots_free_count"] is not None)
        assert (relay.status().problems, relay.status().figures["slots_blocked_count"]) == ([], 0)
        await eventually(lambda: relay.status().figures["pending_count"] is not None)
        broker.poison.clear()
        clean_environment.setenv("TOWPATH_DATABASE_URL", urls["operator"])
        replayed = await ask(towpath, "dlq", "replay", "--stage", "publish", "--yes", "--reason", "mended")
        assert replayed["done"] == 1
        await eventually(lambda: broker.of_key("k") == [b"0", b"1", b"2"])
        await eventually(lambda: relay.status().gate_count == 0)
        status = await ask(towpath, "outbox", "status")
        assert (status["relay_count"], status["slots_free"]) == (1, 3)
        again = await ask(towpath, "outbox", "republish", "--since", "1h", "--where", "key=k", "--yes")
        assert again["done"] == 3
        await eventually(lambda: len(broker.of_key("k")) == 6)
        proved = "select count(*) from towpath.canary where is_confirmed"
        await until(lambda: _is(owner, proved, 16))
    assert await owner.fetchval(GATES) == 0

    async with bench(app, urls["owner"]) as engine:
        async with engine.member(url=urls["worker"]):
            good, bad = await engine.publish(Posted("a", 1)), await engine.publish(Posted("b", 3))
            await engine.reaches(good, "SUCCEEDED")
            await engine.reaches(bad, "DEAD", "WAITING")
        assert 3 in calls
    async with producer.transaction():
        await emit(producer, Posted("a", 9))
    await producer.close(timeout=60)
    clean_environment.setenv("TOWPATH_DATABASE_URL", urls["reader"])
    reader = await asyncpg.connect(urls["reader"], timeout=60)
    assert await reader.fetchval("select count(*) from towpath.task") == 2
    await reader.close(timeout=60)
    await owner.close(timeout=60)


async def _is(db: Any, query: str, expected: object) -> bool:
    return bool(await db.fetchval(query) == expected)


@pytest.mark.parametrize("role", [*ROLES, "stranger"])
async def test_nobody_but_its_owner_makes_a_schema(urls: Urls, role: str) -> None:
    """X5: the roles of processes are not those of a migration."""
    with pytest.raises(asyncpg.InsufficientPrivilegeError):
        await asyncio.to_thread(migrate.upgrade, urls[role], "another")
