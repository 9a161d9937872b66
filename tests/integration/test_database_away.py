"""An outage of the database: nothing is acknowledged or spent, and work goes on by itself."""

import asyncio
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import pytest

from tests.integration.engine import EFFECTS, Posted, bench, depot, effects, until
from tests.integration.test_effects import write
from towpath.backoff import RetryPolicy
from towpath.context import Call, Tx
from towpath.errors import StoreUnavailable
from towpath.store.claims import ClaimStore
from towpath.testing.proxy import Direction, TcpProxy

SHORT = {"lease": timedelta(milliseconds=800), "beat_every": timedelta(milliseconds=100)}


@pytest.fixture
def far_url(migrated_url: str, postgres_proxy: TcpProxy) -> str:
    """The database as members see it: through a link that tests break."""
    parts = urlsplit(migrated_url)
    user = f"{parts.username}@" if parts.username else ""
    return urlunsplit(parts._replace(netloc=f"{user}127.0.0.1:{postgres_proxy.port}"))


@pytest.mark.parametrize("how", ["cut", "hang"])
async def test_messages_wait_at_the_broker_while_the_database_is_away(
    migrated_url: str, far_url: str, postgres_proxy: TcpProxy, how: str
) -> None:
    """C13."""
    app = depot(retry=RetryPolicy(attempts=1))

    @app.transactional()
    async def sort(parcel: Posted, tx: Tx) -> None:
        await write(tx, parcel)

    async with bench(app, migrated_url, **SHORT) as engine:
        await engine.db.execute(EFFECTS)
        async with engine.member(url=far_url) as member:
            await engine.reaches(await engine.publish(Posted("before")), "SUCCEEDED")
            await engine.is_drained()
            await (postgres_proxy.cut() if how == "cut" else postgres_proxy.hang())
            ids = [await engine.publish(Posted(f"k{number}", number)) for number in range(20)]
            await until(lambda: not member.consumer.health.is_ready)
            assert engine.unacknowledged() == 20
            assert not member.task.done()
            await postgres_proxy.restore()
            for id_ in ids:
                row = await engine.reaches(id_, "SUCCEEDED", "DEAD")
                assert (row["state"], row["attempt"]) == ("SUCCEEDED", 1)
            await engine.is_drained()
            await until(lambda: member.consumer.health.is_ready)
        assert len(await effects(engine)) == 21
        assert await engine.letters() == []


@pytest.mark.parametrize("how", ["cut", "hang"])
async def test_a_transactional_handler_that_loses_its_connection_is_not_at_fault(
    migrated_url: str, far_url: str, postgres_proxy: TcpProxy, how: str
) -> None:
    """C13, C6: its transaction is gone with the link; the message spends nothing and runs again."""
    app = depot(retry=RetryPolicy(attempts=1, base="10ms", cap="50ms"))
    started, go = asyncio.Event(), asyncio.Event()

    @app.transactional()
    async def sort(parcel: Posted, tx: Tx) -> None:
        await write(tx, parcel)
        started.set()
        await go.wait()
        await write(tx, parcel)

    async with bench(app, migrated_url, **SHORT) as engine:
        await engine.db.execute(EFFECTS)
        async with engine.member(url=far_url):
            id_ = await engine.publish(Posted("a"))
            await started.wait()
            await (postgres_proxy.cut() if how == "cut" else postgres_proxy.hang())
            go.set()
            await asyncio.sleep(1.5)
            assert engine.unacknowledged() == 1
            await postgres_proxy.restore()
            row = await engine.reaches(id_, "SUCCEEDED", "DEAD")
            await engine.is_drained()
        assert (row["state"], row["attempt"]) == ("SUCCEEDED", 1)
        assert await effects(engine) == [("a", 0)] * 2


async def test_a_result_is_settled_when_the_database_is_back(
    migrated_url: str, far_url: str, postgres_proxy: TcpProxy
) -> None:
    """C13: the outside call is not repeated for a short outage."""
    app, calls, go = depot(), list[int](), asyncio.Event()

    @app.idempotent()
    async def sort(parcel: Posted, call: Call) -> str:
        calls.append(1)
        await go.wait()
        return "done"

    async with bench(app, migrated_url, lease=timedelta(seconds=30)) as engine:
        async with engine.member(url=far_url):
            id_ = await engine.publish(Posted("a"))
            await until(lambda: calls == [1])
            await postgres_proxy.cut()
            go.set()
            await asyncio.sleep(0.5)
            assert engine.unacknowledged() == 1
            await postgres_proxy.restore()
            row = await engine.reaches(id_, "SUCCEEDED")
            await engine.is_drained()
        assert (calls, row["attempt"], row["deliveries"]) == ([1], 1, 1)


async def test_a_failure_is_written_down_when_the_database_is_back(
    migrated_url: str, far_url: str, postgres_proxy: TcpProxy
) -> None:
    """C13, D2."""
    app, go = depot(retry=RetryPolicy(attempts=1)), asyncio.Event()

    @app.idempotent()
    async def sort(parcel: Posted, call: Call) -> None:
        await go.wait()
        raise RuntimeError("no")

    async with bench(app, migrated_url, lease=timedelta(seconds=30)) as engine:
        async with engine.member(url=far_url):
            id_ = await engine.publish(Posted("a"))
            await engine.reaches(id_, "RUNNING")
            await postgres_proxy.cut()
            go.set()
            await asyncio.sleep(0.3)
            await postgres_proxy.restore()
            row = await engine.reaches(id_, "DEAD")
            await engine.is_drained()
        assert row["attempt"] == 1
        assert len(await engine.letters()) == len(await engine.outbox("copy")) == 1


async def test_shutdown_ends_in_time_with_the_database_away(
    migrated_url: str, far_url: str, postgres_proxy: TcpProxy
) -> None:
    """S4: unfinished work is unspent, its message unacknowledged."""
    app, started = depot(), asyncio.Event()

    @app.idempotent()
    async def sort(parcel: Posted, call: Call) -> None:
        started.set()
        await asyncio.sleep(60)

    async with bench(
        app, migrated_url, lease=timedelta(seconds=60), drain_timeout=timedelta(milliseconds=100)
    ) as engine:
        async with engine.member(url=far_url) as member:
            id_ = await engine.publish(Posted("a"))
            await started.wait()
            await postgres_proxy.hang()
            async with asyncio.timeout(60):
                await member.stop()
        row = await engine.row(id_)
        assert (row["state"], row["attempt"], engine.unacknowledged()) == ("RUNNING", 0, 1)
        await postgres_proxy.restore()


async def test_a_lease_that_lapses_behind_a_frozen_link_ends_what_runs_under_it(
    migrated_url: str, far_url: str, postgres_proxy: TcpProxy
) -> None:
    """C8, C13: the worker knows by its own clock, however long the link stays frozen."""
    app, started, cancelled = depot(), asyncio.Event(), asyncio.Event()

    @app.idempotent()
    async def sort(parcel: Posted, call: Call) -> None:
        started.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async with bench(app, migrated_url, **SHORT) as engine, engine.member(url=far_url):
        for _ in range(2):  # connections that lie idle, and one that beats
            await engine.publish(Posted("a"))
        await started.wait()
        await postgres_proxy.hang()
        async with asyncio.timeout(60):
            await cancelled.wait()
        await postgres_proxy.restore()


async def test_a_member_started_without_a_database_waits_for_it_and_can_be_stopped(
    migrated_url: str, far_url: str, postgres_proxy: TcpProxy
) -> None:
    """C13, S4."""
    app = depot()

    @app.transactional()
    async def sort(parcel: Posted) -> None: ...

    async with bench(app, migrated_url) as engine:
        await postgres_proxy.cut()
        starting = asyncio.create_task(_started(engine, far_url))
        await asyncio.sleep(0.3)
        assert not starting.done()
        assert engine.broker.hub.group("depot").members == []
        await postgres_proxy.restore()
        id_ = await engine.publish(Posted("a"))
        await engine.reaches(id_, "SUCCEEDED")
        await starting


async def _started(engine: Any, url: str) -> None:
    async with engine.member(url=url):
        await engine.is_drained()


def answer_lost(method: Callable[..., Any], times: int) -> Callable[..., Any]:
    """The statement commits, and its answer is lost on the way back."""
    left = times

    async def call(self: Any, *arguments: Any, **options: Any) -> Any:
        nonlocal left
        result = await method(self, *arguments, **options)
        found = result if isinstance(result, list) else result.started
        if left and found:
            left -= 1
            raise StoreUnavailable("the answer was lost")
        return result

    return call


@pytest.mark.parametrize("statement", ["claim", "start_due", "findings"])
async def test_a_claim_whose_answer_was_lost_is_made_again(
    migrated_url: str, monkeypatch: pytest.MonkeyPatch, statement: str
) -> None:
    """C13: its row says that this living worker runs it, and nobody does."""
    app, starts = depot(retry=RetryPolicy(attempts=9, base="1ms", cap="1ms")), list[str]()

    @app.idempotent()
    async def sort(parcel: Posted, call: Call) -> None:
        starts.append(parcel.parcel)
        if len(starts) == 1:
            raise RuntimeError("no")

    if statement == "findings":
        real = ClaimStore.findings
        is_lost = False

        async def findings(self: ClaimStore, ids: Any) -> Any:
            nonlocal is_lost
            if not is_lost:
                is_lost = True
                raise StoreUnavailable("no answer")
            return await real(self, ids)

        monkeypatch.setattr(ClaimStore, "findings", findings)
    else:
        monkeypatch.setattr(ClaimStore, statement, answer_lost(getattr(ClaimStore, statement), 2))
    async with bench(app, migrated_url) as engine:
        old = await engine.publish(Posted("old"))
        if statement == "findings":  # one of the batch was claimed before
            await engine.db.execute(
                "insert into towpath.task (consumer_group, id, type, kind, source, state, held_by, "
                "finished_at) values ('depot', $1, 'parcel.posted', 'event', 'parcels', 'SUCCEEDED', "
                "'broker', now())",
                old,
            )
        id_ = await engine.publish(Posted("a"))
        async with engine.member():
            row = await engine.reaches(id_, "SUCCEEDED")
            await engine.reaches(old, "SUCCEEDED")
            await engine.is_drained()
        assert row["attempt"] <= 2
        assert starts.count("a") <= 2


@pytest.mark.parametrize("direction", list(Direction))
async def test_a_link_that_hangs_in_one_direction_loses_and_doubles_nothing(
    migrated_url: str, far_url: str, postgres_proxy: TcpProxy, direction: Direction
) -> None:
    """C13, C6: what the database did and never told, and what it was never asked."""
    app = depot(retry=RetryPolicy(attempts=3, base="1ms", cap="10ms"))

    @app.transactional()
    async def sort(parcel: Posted, tx: Tx) -> None:
        await write(tx, parcel)

    async with bench(app, migrated_url, **SHORT) as engine:
        await engine.db.execute(EFFECTS)
        async with engine.member(url=far_url):
            ids = [await engine.publish(Posted(f"k{number % 5}", number)) for number in range(40)]
            await asyncio.sleep(0.05)
            await postgres_proxy.hang(direction)
            await asyncio.sleep(1.2)
            await postgres_proxy.restore()
            for id_ in ids:
                row = await engine.reaches(id_, "SUCCEEDED", "DEAD")
                assert row["state"] == "SUCCEEDED"
            await engine.is_drained()
        found = await effects(engine)
        assert sorted(number for _, number in found) == list(range(40))
        for key in range(5):
            mine = [number for parcel, number in found if parcel == f"k{key}"]
            assert mine == sorted(mine)


async def test_a_restart_of_the_server_is_an_outage_like_any_other(migrated_url: str) -> None:
    """C13: every connection is ended by an administrator."""
    app = depot(retry=RetryPolicy(attempts=1))

    @app.transactional()
    async def sort(parcel: Posted, tx: Tx) -> None:
        await write(tx, parcel)
        await asyncio.sleep(0.01)

    async with bench(app, migrated_url) as engine:
        await engine.db.execute(EFFECTS)
        async with engine.member():
            ids = [await engine.publish(Posted(f"k{number}", number)) for number in range(60)]
            for _ in range(3):
                await asyncio.sleep(0.03)
                await engine.db.execute(
                    "select pg_terminate_backend(pid) from pg_stat_activity "
                    "where datname = current_database() and pid <> pg_backend_pid()"
                )
            for id_ in ids:
                row = await engine.reaches(id_, "SUCCEEDED", "DEAD")
                assert (row["state"], row["attempt"]) == ("SUCCEEDED", 1), dict(row)
            await engine.is_drained()
        assert sorted(number for _, number in await effects(engine)) == list(range(60))
