"""What a relay's metrics say of its broker's shards and of the database, compared with the rows."""

import asyncio
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import asyncpg

from tests.fixtures.fix_cli import Run
from tests.fixtures.graveyard import bury
from tests.integration.relaying import FAST, RecordingBroker, emit, eventually, relaying
from tests.integration.test_cli_commands import ask, tell
from towpath.relay import Relay
from towpath.relay.census import CensusLoop
from towpath.relay.hooks import RelayHooks
from towpath.relay.link import READS, Link
from towpath.relay.progress import Shards
from towpath.relay.service import _Probe
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


def readiness(relay: Relay) -> dict[str, object]:
    """What `/readyz` answers."""
    return dict(_Probe(relay).readiness())


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
    for _ in range(3):
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
    assert gauges.values[names.OUTBOX_PENDING.name] == 3
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
        await eventually(lambda: relay.status().published_count == 3)
        await looked(census, db, lambda: gauges.values[names.OUTBOX_OLDEST_AGE.name] == 0)
        assert gauges.values[names.OUTBOX_PENDING.name] == 0
        await looked(census, db, lambda: gauges.values[names.OLDEST_TRANSACTION_AGE.name] == 0)
        assert gauges.values[names.SHARDS_UNOWNED.name] == 0
    census.close()


async def test_a_transaction_that_only_reads_is_told_to_whoever_may_see_it(
    db: "asyncpg.Connection[Any]", migrated_url: str
) -> None:
    """R15: it has no id, and holds the vacuum horizon like one that wrote."""
    gauges = Gauges()
    link = Link(migrated_url, "census", READS, command_timeout_seconds=60)
    hooks = RelayHooks(uuid4(), {}, gauges)
    census = CensusLoop(link, BacklogStore(), Shards(held_bytes=1), FAST, hooks)
    holder = await asyncpg.connect(migrated_url)
    await holder.execute("begin isolation level repeatable read; select count(*) from towpath.outbox")
    await looked(census, db, lambda: gauges.values[names.OLDEST_TRANSACTION_AGE.name] >= 1)
    assert hooks.figures.oldest_transaction_seconds == gauges.values[names.OLDEST_TRANSACTION_AGE.name]
    await holder.close()
    await looked(census, db, lambda: gauges.values[names.OLDEST_TRANSACTION_AGE.name] == 0)
    census.close()


async def test_a_relay_shows_its_figures_at_its_endpoint(
    db: "asyncpg.Connection[Any]", migrated_url: str
) -> None:
    """R15: backlog, ages, shards, ring, journal and the last window, beside whether it is ready."""
    broker = RecordingBroker(is_available=False)
    await emit(db, "k", b"old")
    await emit(db, "k", b"young")
    await db.execute("update towpath.outbox set created_at = towpath.clock() - interval '2 hours'")
    async with relaying(migrated_url, broker) as relay:

        def figures() -> dict[str, Any]:
            found: Any = readiness(relay)["figures"]
            return dict(found)

        await eventually(lambda: None not in (figures()["pending_count"], figures()["slots_free_count"]))
        before = figures()
        assert (before["pending_count"], before["oldest_unsent_seconds"] >= 7200) == (2, True)
        assert before["unowned_shard_count"] in range(17)
        assert before["seen_ago_seconds"] >= 0
        assert (before["slots_free_count"], before["slots_blocked_count"]) == (3, 0)
        assert (before["window_rows"], before["journal_lag_seconds"]) in ((None, 0), (2, 0))
        broker.is_available = True
        await eventually(lambda: len(broker.arrivals) == 2)
        await eventually(lambda: figures()["journal_lag_seconds"] == 0)
        assert figures()["window_rows"] == 2
        assert figures()["publish_latency_seconds"] >= 7200
        assert figures()["oldest_transaction_seconds"] is not None


async def test_the_status_without_a_relay_says_why_a_slot_is_kept(
    db: "asyncpg.Connection[Any]", migrated_url: str, towpath: Run
) -> None:
    """R15, R22: what is unsent, what is held open; and nothing once the next look would clear it."""
    await db.execute(
        "insert into towpath.outbox (slot, shard, message_id, kind, destination, type, content_type,"
        " created_at) select (towpath.ring_slot() + 2) % 4, 1, gen_random_uuid(), 'event', 'd', 't', 'c',"
        " towpath.clock() - interval '7 hours'"
    )

    async def kept() -> list[str]:
        report = await ask(towpath, "outbox", "status")
        found = [slot["kept"] for slot in report["slots"] if not slot["is_empty"]]
        assert report["slots_free"] == 3
        return found

    assert await kept() == ["unsent: shards 1"]
    await db.execute(
        "insert into towpath.journal (shards, epochs, last_ids, snapshot_from, snapshot_to) "
        "values ('{1}', '{1}', '{null}', pg_current_snapshot(), pg_current_snapshot())"
    )
    reader = await asyncpg.connect(migrated_url)
    await reader.execute("begin; select count(*) from towpath.outbox")
    assert await kept() == [f"locked: {reader.get_server_pid()}"]
    assert "3 of 4 slots of the ring are free" in (await tell(towpath, "outbox", "status")).out
    await reader.close()
    assert await kept() == [None]
