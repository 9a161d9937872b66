"""A short run of the fault suite, with faults whose verdict does not hang on the speed of the machine."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.faults.plan import make_plan
from tests.faults.run import perform
from tests.faults.world import Servers
from towpath.store import migrate
from towpath.testing.proxy import TcpProxy
from towpath.testing.services import PostgresServer, RabbitServer, drop_database

_TEMPLATE = "faults_template"


@pytest_asyncio.fixture
async def servers(
    postgres_server: PostgresServer, rabbit_server: RabbitServer, rabbit_proxy: TcpProxy
) -> AsyncIterator[Servers]:
    """The session's own."""
    await asyncio.to_thread(migrate.upgrade, postgres_server.create_database(_TEMPLATE))
    async with TcpProxy("127.0.0.1", postgres_server.port) as postgres_proxy:
        yield Servers("rabbitmq", postgres_server, rabbit_server, postgres_proxy, rabbit_proxy)
    drop_database(postgres_server.url(), _TEMPLATE)


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_a_killed_relay_and_lost_answers_to_commit_break_no_promise(
    servers: Servers, tmp_path: Path
) -> None:
    """P1, R4, C6, C10, D1, D3: hot keys, rollbacks, poison, retries and replays while it runs."""
    plan = make_plan(1, ("relay_killed", "producer_postgres_half_open"))

    outcome = await perform(plan, servers, _TEMPLATE, tmp_path / "run")

    assert (outcome.breaches, outcome.trouble) == ([], "")
    assert outcome.message_count > 100
