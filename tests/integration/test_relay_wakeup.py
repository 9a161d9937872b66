"""How an idle relay hears of new rows, what that costs, and what becomes of it when the database fails it."""

import asyncio
import math
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import pytest

from tests.integration.relaying import FAST, RecordingBroker, emit, eventually, relaying
from towpath.relay import Relay, RelayOptions
from towpath.relay.link import Link
from towpath.relay.options import CANARY_EVERY_SECONDS
from towpath.store import migrate
from towpath.store.installed import FACTS
from towpath.store.outbox import poll_and_look
from towpath.store.statements import load
from towpath.store.wakeup import Asleep, WakeupStore
from towpath.testing.proxy import TcpProxy
from towpath.testing.services import PostgresServer

QUICK = replace(FAST, poll_max=0.02)
NEVER = replace(QUICK, poll_asleep=600.0)
"""Asleep it does not poll at all, so that what arrives was notified."""
ASLEEP_FOR_LONG = (
    "select setval('towpath.relays_asleep_until', floor(extract(epoch from now()))::bigint + 600)"
)
ASLEEP_UNTIL = "select last_value from towpath.relays_asleep_until"
STORE = WakeupStore()


async def sleeping(db: Any, relay: Relay, seconds: float = 0.5) -> None:
    """Wait until the relay listens and its reader has not polled for a while."""
    await eventually(lambda: relay.status().wakeup == "notify")
    deadline = time.monotonic() + 30
    while not await db.fetchval(
        "select bool_and(state = 'idle' and clock_timestamp() - state_change > make_interval(secs => $1)) "
        "from pg_stat_activity "
        "where datname = current_database() and application_name = 'towpath relay reader'",
        seconds,
    ):
        assert time.monotonic() < deadline, "it does not fall asleep"
        await asyncio.sleep(0.05)


@asynccontextmanager
async def hearing(url: str) -> AsyncIterator[list[str]]:
    """The payloads notified meanwhile."""
    heard: list[str] = []
    connection = await asyncpg.connect(url, timeout=30)
    await connection.add_listener(STORE.channel, lambda *found: heard.append(found[3]))
    try:
        yield heard
    finally:
        await connection.close(timeout=10)


async def after_a_mark(db: Any, heard: list[str], mark: str) -> list[str]:
    """What was heard before a mark that is sent now: notifications come in order."""
    await STORE.notify(db, mark)
    await eventually(lambda: mark in heard)
    return heard[: heard.index(mark)]


@asynccontextmanager
async def nobody_asking(db: Any, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """What relays ask for is over, and when they ask anew they have to wait for the end of this."""
    stay_asleep, waits, end = WakeupStore.stay_asleep, asyncio.Event(), asyncio.Event()

    async def wait(store: WakeupStore, connection: Any, last_id: int | None) -> Asleep:
        waits.set()
        await end.wait()
        return await stay_asleep(store, connection, last_id)

    monkeypatch.setattr(WakeupStore, "stay_asleep", wait)
    async with asyncio.timeout(60):
        await waits.wait()
    await db.execute(
        f"select pg_sleep(greatest(0, ({ASLEEP_UNTIL}) - extract(epoch from clock_timestamp()) + 0.01))"
    )
    yield
    end.set()


async def test_only_while_a_relay_asks_for_it_does_an_insert_notify(db: Any, migrated_url: str) -> None:
    """P6, R13: and it says so to transactions that began before."""
    async with hearing(migrated_url) as heard:
        await emit(db, "k", b"1")
        assert await after_a_mark(db, heard, "not asked") == []
        heard.clear()
        old = await asyncpg.connect(migrated_url, timeout=30)
        transaction = old.transaction(isolation="repeatable_read")
        await transaction.start()
        await old.execute("select pg_current_xact_id()")
        left = (await STORE.stay_asleep(db, None)).seconds_left
        assert left is not None
        assert 1 < left <= 2
        await db.execute(ASLEEP_FOR_LONG)
        await emit(old, "k", b"2")
        await emit(old, "k", b"3")
        await transaction.commit()
        await old.close(timeout=10)
        assert await after_a_mark(db, heard, "asked") == [""]
        heard.clear()
        await db.execute(
            "select setval('towpath.relays_asleep_until', floor(extract(epoch from now()))::bigint)"
        )
        await emit(db, "k", b"4")
        assert await after_a_mark(db, heard, "over") == []


async def test_asking_is_left_off_while_rows_come_fast(db: Any) -> None:
    """P6: a relay whose shards are quiet does not tax the writers of another's."""
    first = await STORE.stay_asleep(db, None)
    await db.execute("select setval('towpath.relays_asleep_until', 0)")
    for _ in range(60):
        await db.execute("select nextval('towpath.outbox_id_seq')")
    busy = await STORE.stay_asleep(db, first.last_id)
    assert busy.seconds_left is None
    assert await db.fetchval(ASLEEP_UNTIL) == 0
    assert (await STORE.stay_asleep(db, busy.last_id)).seconds_left is not None


async def test_a_request_written_by_a_clock_ahead_is_replaced(db: Any) -> None:
    """P6: else every transaction would notify until that time."""
    await db.execute("select setval('towpath.relays_asleep_until', 99999999999)")
    left = (await STORE.stay_asleep(db, None)).seconds_left
    assert left is not None
    assert left <= 2
    assert await db.fetchval(ASLEEP_UNTIL) < 99999999999


async def test_a_sleeping_relay_is_woken_by_a_row(db: Any, migrated_url: str) -> None:
    """R13: it does not poll, and every row arrives."""
    broker = RecordingBroker()
    async with relaying(migrated_url, broker, NEVER) as relay:
        for number in range(2):
            await sleeping(db, relay)
            await emit(db, "k", b"%d" % number)
            await eventually(lambda count=number + 1: len(broker.arrivals) == count)  # type: ignore[misc]
    assert broker.payloads == [b"0", b"1"]


async def test_a_relay_that_is_awake_takes_its_request_back(db: Any, migrated_url: str) -> None:
    """P6: writers of a burst pay for the notification that wakes it, not for two seconds of them."""
    broker = RecordingBroker()
    async with relaying(migrated_url, broker, NEVER) as relay:
        await sleeping(db, relay)
        deadline = time.monotonic() + 30
        while await db.fetchval(ASLEEP_UNTIL):
            assert time.monotonic() < deadline
            await emit(db, "k", b"1")


async def test_beside_a_long_transaction_and_another_relay_both_are_woken(db: Any, migrated_url: str) -> None:
    """R1, R13: neither a writer that stays open nor a second relay keeps rows from being notified."""
    broker = RecordingBroker()
    long = await asyncpg.connect(migrated_url, timeout=30)
    transaction = long.transaction()
    await transaction.start()
    await emit(long, "long", b"uncommitted")
    async with relaying(migrated_url, broker, NEVER) as one, relaying(migrated_url, broker, NEVER) as other:
        await eventually(lambda: len(one.status().shards) == len(other.status().shards) == 8)
        for relay in (one, other):
            await sleeping(db, relay)
        for number in range(32):
            await emit(db, str(number), b"%d" % number)
        await eventually(lambda: len(broker.arrivals) == 32)
        assert {arrival.publisher for arrival in broker.arrivals} == {1, 2}
        await transaction.rollback()
    await long.close(timeout=10)


async def test_a_row_written_before_it_was_asked_for_is_found_by_the_next_poll(
    db: Any, migrated_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R13: the race that no notification can win: INSERT, then the relay falls asleep, then COMMIT."""
    broker = RecordingBroker()
    writer = await asyncpg.connect(migrated_url, timeout=30)
    options = replace(QUICK, poll_asleep=1.5)
    async with hearing(migrated_url) as heard, relaying(migrated_url, broker, options) as relay:
        await eventually(lambda: relay.status().wakeup == "notify")
        transaction = writer.transaction()
        await transaction.start()
        async with nobody_asking(db, monkeypatch):
            await emit(writer, "k", b"late")
        await sleeping(db, relay, 1.0)
        await transaction.commit()
        await eventually(lambda: len(broker.arrivals) == 1)
        assert "" not in await after_a_mark(db, heard, "mark")
    await writer.close(timeout=10)


async def test_a_row_committed_between_an_empty_poll_and_the_asking_is_found(
    db: Any, migrated_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R13: the other order: the relay does not go to sleep on a poll from before it was asked for."""
    broker = RecordingBroker()
    async with relaying(migrated_url, broker, NEVER) as relay:
        await eventually(lambda: relay.status().wakeup == "notify")
        other = await asyncpg.connect(migrated_url, timeout=30)
        async with nobody_asking(db, monkeypatch):
            await emit(other, "k", b"between")
        await other.close(timeout=10)
        await eventually(lambda: len(broker.arrivals) == 1)


async def end_session(db: Any, name: str) -> None:
    await db.execute(
        "select pg_terminate_backend(pid) from pg_stat_activity "
        "where datname = current_database() and application_name = $1",
        f"towpath relay {name}",
    )


async def test_a_killed_listener_is_back_within_seconds(db: Any, migrated_url: str) -> None:
    """R13: rows arrive meanwhile, and afterwards it sleeps again."""
    broker = RecordingBroker()
    async with relaying(migrated_url, broker, NEVER) as relay:
        await sleeping(db, relay)
        await end_session(db, "wakeup")
        await emit(db, "k", b"1")
        await eventually(lambda: len(broker.arrivals) == 1)
        await eventually(lambda: relay.status().wakeup == "notify")
        await sleeping(db, relay)
        await end_session(db, "reader")
        await emit(db, "k", b"2")
        await eventually(lambda: len(broker.arrivals) == 2)
    assert broker.payloads == [b"1", b"2"]


async def test_links_that_break_while_it_sleeps_are_noticed(
    db: Any, migrated_url: str, postgres_proxy: TcpProxy
) -> None:
    """R13, R19: every session is reset, the listener's and the reader's too; nothing is lost or waits."""
    parts = urlsplit(migrated_url)
    through = urlunsplit(parts._replace(netloc=f"{parts.username}@127.0.0.1:{postgres_proxy.port}"))
    broker = RecordingBroker()
    async with relaying(through, broker, NEVER) as relay:
        await sleeping(db, relay)
        await postgres_proxy.drop_connections()
        await emit(db, "k", b"1")
        await eventually(lambda: len(broker.arrivals) == 1)
        await sleeping(db, relay)
        await emit(db, "k", b"2")
        await eventually(lambda: len(broker.arrivals) == 2)
    assert broker.payloads == [b"1", b"2"]


async def test_a_listener_that_hears_nothing_any_more_leaves_the_relay_polling(
    db: Any, migrated_url: str, postgres_proxy: TcpProxy
) -> None:
    """R13: a link that is open and carries nothing is found out by asking on it."""
    parts = urlsplit(migrated_url)
    through = urlunsplit(parts._replace(netloc=f"{parts.username}@127.0.0.1:{postgres_proxy.port}"))
    broker = RecordingBroker()
    async with relaying(migrated_url, broker, QUICK) as relay:
        relay._wakeup._link._url = through
        await end_session(db, "wakeup")
        await eventually(lambda: postgres_proxy.connection_count == 1)
        await sleeping(db, relay)
        await postgres_proxy.hang()
        await eventually(lambda: relay.status().wakeup.startswith("poll:"))
        await emit(db, "k", b"1")
        await eventually(lambda: len(broker.arrivals) == 1)
        await postgres_proxy.restore()
        await eventually(lambda: relay.status().wakeup == "notify")


async def test_a_relay_that_is_set_to_poll_asks_for_nothing(db: Any, migrated_url: str) -> None:
    """R13: no connection for listening, no request to producers."""
    broker = RecordingBroker()
    async with relaying(migrated_url, broker, replace(QUICK, wakeup="poll")) as relay:
        await eventually(lambda: len(relay.status().shards) == 16)
        await asyncio.sleep(1)
        await emit(db, "k", b"1")
        await eventually(lambda: len(broker.arrivals) == 1)
        assert relay.status().wakeup == "poll: so it was set"
        assert relay.status().is_ready
        assert await db.fetchval(ASLEEP_UNTIL) == 0


async def test_where_transactions_can_be_prepared_auto_polls_and_preparing_works() -> None:
    """R13, P4: PREPARE TRANSACTION is refused after NOTIFY."""
    with PostgresServer(settings={"max_prepared_transactions": "5"}) as server:
        url = server.create_database("prepared")
        await asyncio.to_thread(migrate.upgrade, url)
        db = await asyncpg.connect(url, timeout=30)
        broker = RecordingBroker()
        async with relaying(url, broker, QUICK) as relay:
            await eventually(lambda: "max_prepared_transactions" in relay.status().wakeup)
            await asyncio.sleep(1)
            await db.execute("begin")
            await emit(db, "k", b"1")
            await db.execute("prepare transaction 'one'")
            await db.execute("commit prepared 'one'")
            await eventually(lambda: len(broker.arrivals) == 1)
            assert relay.status().is_ready
        async with relaying(url, broker, replace(QUICK, wakeup="notify")) as relay:
            await sleeping(db, relay)
        await db.close(timeout=10)


FAMILIES = ("relay", "wakeup", "scheduled", "status", "retention", "canary", "parking")
NAMES = {sql: name for family in FAMILIES for name, sql in load(family).items()} | {
    FACTS: "facts",
    poll_and_look(): "poll",
}
OF_A_ROUND = ("write", "age", "confirm", "append_progress")
"""Of a round of canaries, where one window has them all."""
NOW_AND_THEN = ("trim_journal", "sweep_journal", "move", "be_awake")
"""Once a start, and after many rounds."""


def intervals(options: RelayOptions) -> dict[str, float]:
    """Seconds between two of each statement that an idle relay repeats; what may vary is at its shortest."""
    poll = options.poll_max if options.wakeup == "poll" else options.poll_asleep
    looks = math.ceil(poll / options.scheduled_poll) - 1  # beside those that polls include
    beats = dict.fromkeys(("facts", "beat_relay", "renew_leases"), options.renew_every)
    often = {"poll": poll, "look": poll / looks if looks else math.inf, **beats}
    if options.wakeup != "poll":
        often["stay_asleep"] = 0.75
    canaries = dict.fromkeys(OF_A_ROUND, options.canary_every)
    ring = {"survey": 150 / 2, **dict.fromkeys(("arm", "verdict", "oldest_age"), 150 / 3)}
    return {**often, **canaries, **ring, "backlog": 0.75 * 15}


@pytest.mark.parametrize("mode", ["auto", "poll"])
async def test_an_idle_relay_costs_at_most_five_statements_a_second(
    db: Any, migrated_url: str, monkeypatch: pytest.MonkeyPatch, mode: Any
) -> None:
    """R13: by what it repeats how often, and how often that is with the default settings."""
    options = RelayOptions(wakeup=mode, canary_every=3.0)
    counts: Counter[str] = Counter()
    opened = Link._open

    def note(asked: Any) -> None:
        if "pg_catalog" not in asked.query and "'jit'" not in asked.query:  # the driver's own, once a session
            counts[NAMES.get(asked.query, asked.query)] += 1

    async def counted(link: Link) -> Any:
        connection = await opened(link)
        connection.add_query_logger(note)
        return connection

    monkeypatch.setattr(Link, "_open", counted)
    async with relaying(migrated_url, RecordingBroker(), options) as relay:
        await eventually(lambda: len(relay.status().shards) == 16 and relay._reading._pace.is_idle)
        await eventually(lambda: mode == "poll" or relay.status().wakeup == "notify")
        await eventually(lambda: relay.status().is_ready and relay._mover.is_waiting)
        counts.clear()
        began = time.monotonic()
        await eventually(lambda: counts["confirm"] >= 1 and counts["beat_relay"] >= 1)
        assert relay._reading._pace.is_idle, "canaries are no reason to poll soon"
        took, found = time.monotonic() - began, counts.copy()
    expected = intervals(options)
    assert found.keys() <= {*expected, *NOW_AND_THEN}
    for name, seconds in (expected | {"poll": options.poll_max, "look": options.scheduled_poll}).items():
        assert found[name] <= took / seconds + 5, (name, found, took)
    by_default = intervals(replace(options, canary_every=CANARY_EVERY_SECONDS))
    assert sum(1 / seconds for seconds in by_default.values()) <= 5


@pytest.mark.parametrize("mode", ["auto", "notify"])
async def test_without_the_grants_it_polls_and_says_so(db: Any, migrated_url: str, mode: Any) -> None:
    """R13: an upgrade before `towpath db roles` stops nothing; who demands notifications is told."""
    user = f"t{time.time_ns()}"
    await db.execute(f"create role {user} login; grant usage on schema towpath to {user}")
    await db.execute(f"grant all on all tables in schema towpath to {user}")
    await db.execute(f"grant execute on all functions in schema towpath to {user}")
    parts = urlsplit(migrated_url)
    url = urlunsplit(parts._replace(netloc=f"{user}@{parts.hostname}:{parts.port}"))
    broker = RecordingBroker()
    async with relaying(url, broker, replace(QUICK, wakeup=mode)) as relay:
        await eventually(lambda: "lacks a grant" in relay.status().wakeup)
        await emit(db, "k", b"1")
        await eventually(lambda: len(broker.arrivals) == 1)
        await eventually(lambda: relay.status().is_ready is (mode == "auto"))
        problems = relay.status().problems
        assert problems == [] if mode == "auto" else "WAKEUP=notify" in problems[0]
    await db.execute(f"drop owned by {user}; drop role {user}")
