"""What a relay's metrics say of its broker's shards and of the database, compared with the rows."""

import asyncio
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import asyncpg

from tests.fixtures.fix_cli import Run
from tests.fixtures.graveyard import bury
from tests.integration.relaying import FAST, RecordingBroker, emit, eventually, relaying
from tests.integration.test_cli_commands import ask
from towpath.relay.census import CensusLoop
from towpath.relay.hooks import RelayHooks
from towpath.relay.link import READS, Link
from towpath.relay.progress import Shards
from towpath.store.backlog import BacklogStore
from towpath.telemetry import names
from towpath.telemetry.metrics import Telemetry
from towpath.telemetry.names import Metric


class Gauges(Telemetry):
    """Keeps the present values."""

    def __init__(self) -> None:
        self.values = dict[str, float]()

    def set(self, metric: Metric, value: float, /, **labels: object) -> None:
        self.values[metric.name] = value


async def looked(census: CensusLoop, db: "asyncpg.Connection[Any]", is_there: Callable[[], bool]) -> None:
    """Look until the gauges say so, while transactions come and go."""
    async with asyncio.timeout(60):
        await census.look()
        while not is_there():
            await db.execute("select pg_current_xact_id()")
            await asyncio.sleep(0.02)
            await census.look()


async def test_a_relay_reports_what_is_unsent_unowned_and_held_open(
    db: "asyncpg.Connection[Any]", migrated_url: str, towpath: Run
) -> None:
    """R15: rows older than its own start, shards that nobody holds, a transaction that does not end.

    R8: and messages that the broker refused, whose dead letters are no group's.
    """
    gauges = Gauges()
    await bury(db, ["a", "b"], stage="publish")
    await bury(db, ["c"])  # its group's members count it
    await emit(db, "k", b"old")
    await db.execute("update towpath.outbox set created_at = towpath.clock() - interval '2 hours'")
    await db.execute(
        "update towpath.shard_lease set relay = gen_random_uuid(), lease_until = towpath.clock() + '1 hour'"
        " where shard < 5"
    )
    link = Link(migrated_url, "census", READS, command_timeout_seconds=60)
    hooks = RelayHooks(uuid4(), {}, gauges)
    census = CensusLoop(link, BacklogStore(), Shards(held_bytes=1), FAST, hooks)
    holder = await asyncpg.connect(migrated_url)
    await census.look()
    assert gauges.values[names.OUTBOX_OLDEST_AGE.name] >= 7200
    assert gauges.values[names.SHARDS_UNOWNED.name] == 11
    assert gauges.values[names.DEAD_LETTERS_OPEN.name] == 2
    transaction = holder.transaction()
    await transaction.start()
    await holder.execute("select pg_current_xact_id()")
    await looked(census, db, lambda: gauges.values[names.OLDEST_TRANSACTION_AGE.name] > 0)
    status = await ask(towpath, "outbox", "status")
    assert status["oldest_transaction"]["pid"] == holder.get_server_pid()
    assert (status["oldest_transaction"]["age_seconds"] > 0, status["slots_free"]) == (True, 3)
    await transaction.rollback()
    await holder.close()
    async with relaying(migrated_url, RecordingBroker()) as relay:
        await db.execute("update towpath.shard_lease set relay = null")
        await eventually(lambda: len(relay.status().shards) == 16)
        await eventually(lambda: relay.status().published_count == 1)
        await looked(census, db, lambda: gauges.values[names.OUTBOX_OLDEST_AGE.name] == 0)
        await looked(census, db, lambda: gauges.values[names.OLDEST_TRANSACTION_AGE.name] == 0)
        assert gauges.values[names.SHARDS_UNOWNED.name] == 0
    census.close()
