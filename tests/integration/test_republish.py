"""`towpath outbox republish`: what was published goes out again, in order, and only what is meant."""

import asyncio
import json
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any, TypeAlias

import asyncpg
import pytest
from sqlalchemy import text

from tests.fixtures.fix_cli import Run, towpath_process
from tests.fixtures.json_documents import check_document
from tests.integration.engine import EFFECTS, Posted, bench, depot, effects
from tests.integration.relaying import FAST, RecordingBroker, emit, eventually, relaying
from tests.integration.test_cli_commands import ask, tell
from tests.integration.test_publish_gates import Sick, policy, until
from towpath.context import Tx
from towpath.errors import UsageError
from towpath.outbox import emit as emit_event
from towpath.outbox import republish
from towpath.outbox.republish import Wanted
from towpath.relay import Relay

Db: TypeAlias = "asyncpg.Connection[Any]"

LONG_AGO = datetime(2020, 1, 1, tzinfo=UTC)
SENT = "select count(*) from towpath.outbox_message where status <> 'SENT'"


@asynccontextmanager
async def running_relay(url: str, broker: Any) -> AsyncIterator[None]:
    """A relay to any broker."""
    stop = asyncio.Event()
    task = asyncio.create_task(Relay(url, broker, FAST).run(stop))
    try:
        yield
    finally:
        stop.set()
        await task


async def again(
    db: Db, *, rate: float | None = None, limit: int | None = None, **wanted: Any
) -> republish.Progress:
    """Plan and carry out."""
    plan = await republish.make_plan(db, Wanted(**{"since": LONG_AGO, **wanted}), limit=limit)
    return (await republish.carry_out(db, plan, actor="ann", reason="test", rate=rate))[1]


async def test_what_a_group_forgot_runs_again_in_order_and_what_it_finished_is_skipped(
    db: Db, migrated_url: str
) -> None:
    """R23, P2: relay and consumer as they are; the same message ids, the effect of finished work once."""
    app = depot()

    @app.transactional()
    async def keep(posted: Posted, tx: Tx) -> None:
        await tx.session.execute(
            text("insert into effect (parcel, number) values (:p, :n)"),
            {"p": posted.parcel, "n": posted.number},
        )

    await db.execute(EFFECTS)
    async with (
        bench(app, migrated_url) as engine,
        running_relay(migrated_url, engine.broker),
        engine.member(),
    ):
        for number in range(10):
            async with db.transaction():
                await emit_event(db, Posted("a", number))
                await emit_event(db, Posted("b", number))
        await until(db, "select count(*) from effect", 20)
        await until(db, SENT, 0)
        # The group lost what it did for parcel a after the fourth.
        await db.execute("delete from effect where parcel = 'a' and number > 3")
        await db.execute(
            "delete from towpath.task where id = any(array("
            "select message_id from towpath.outbox where key = 'a' order by id offset 4))"
        )
        assert (await again(db)).done == 20
        await until(db, "select count(*) from effect", 20)
        await engine.is_drained("parcels")
        assert Counter(await effects(engine)) == Counter(
            (parcel, number) for parcel in "ab" for number in range(10)
        )
        redone = [number for parcel, number in (await effects(engine))[-6:] if parcel == "a"]
        assert redone == [4, 5, 6, 7, 8, 9]
    assert await db.fetchval("select count(*) from towpath.task") == 20


async def test_killed_at_any_batch_the_same_command_finishes_and_repeats_nothing(
    db: Db, migrated_url: str
) -> None:
    """D3: rows and bookkeeping are one transaction; a third run of it begins anew, without the copies."""
    broker = RecordingBroker()
    async with relaying(migrated_url, broker):
        for number in range(1200):
            await emit(db, f"k{number % 7}", b"%d" % number)
        await until(db, SENT, 0)
    command = ("outbox", "republish", "--since", "2020-01-01T00:00Z", "--yes", "--json", "--reason", "gone")

    def run(crash_at: str = "") -> Any:
        environment = {"TOWPATH_CRASH_AT": crash_at} if crash_at else {}
        return towpath_process(migrated_url, *command, environment=environment)

    for crash_at in ("republished_batch:3", "republished_batch:2"):  # in the 2nd batch; behind the next
        assert (await asyncio.to_thread(run, crash_at)).code == -signal.SIGKILL
    ran = await asyncio.to_thread(run)
    check_document(command, ran.out)
    told = json.loads(ran.out)
    assert (told["planned"], told["done"], told["is_complete"]) == (200, 200, True)
    assert told["continued_audit_id"] == told["audit_id"]
    copies = await db.fetch(
        "select message_id from towpath.outbox where headers #>> '{0,0}' = 'towpath-republished' order by id"
    )
    originals = await db.fetch("select message_id from towpath.outbox order by id limit 1200")
    assert told["sample_ids"] == [str(row["message_id"]) for row in originals[1000:1005]]
    assert copies == originals
    (audit,) = await db.fetch("select action, reason, counts from towpath.audit")
    assert (audit["action"], audit["reason"]) == ("outbox.republish", "gone")
    assert json.loads(audit["counts"])["done"] == 1200
    async with relaying(migrated_url, broker):
        await eventually(lambda: len(broker.arrivals) == 2400)
    plan = await republish.make_plan(db, Wanted(since=LONG_AGO))
    assert (plan.count, plan.audit_id) == (1200, None)


async def test_a_message_sent_again_is_the_same_but_for_its_place(db: Db, migrated_url: str) -> None:
    """R17, R26: id, key, payload, headers and the time it was written; marked with the audit row."""
    broker = RecordingBroker()
    headers = json.dumps([["tag", "a"], ["bin", {"b64": "/wA="}]])
    await emit(db, "k", b"x", headers=headers)
    async with relaying(migrated_url, broker):
        await until(db, SENT, 0)
        await again(db)
        await eventually(lambda: len(broker.arrivals) == 2)
    first, second = (each.message for each in broker.arrivals)
    assert (second.message_id, second.key, second.payload) == (first.message_id, "k", b"x")
    assert second.sequence > first.sequence
    own, other = dict(first.headers), dict(second.headers)
    assert datetime.fromisoformat(own["ce_time"].decode()) == datetime.fromisoformat(
        other["ce_time"].decode()
    )
    assert other.pop("towpath-republished").isdigit()
    assert own | {"towpath-sequence": b"", "ce_time": b""} == other | {
        "towpath-sequence": b"",
        "ce_time": b"",
    }
    assert len(second.headers) == len(first.headers) + 1


async def test_only_what_was_published_and_nobody_decided_about_is_meant(db: Db, migrated_url: str) -> None:
    """R8, D7: neither pending nor parked rows, nor refused messages, nor copies of dead letters."""
    await policy(db, "park_key", "held")
    broker = Sick(b"poison")
    for payload in (b"1", b"poison", b"parked"):
        await emit(db, "k", payload, destination="held")
    await emit(db, "k", b"copy", kind="copy", destination="g.orders.dlq")
    await emit(db, "k", b"good")
    async with relaying(migrated_url, broker):
        await until(db, SENT, 1)
    await emit(db, "k", b"pending")
    plan = await republish.make_plan(db, Wanted(since=LONG_AGO))
    assert plan.counts == {("held", "order.placed"): 1, ("orders", "order.placed"): 1}


async def test_headers_that_postgres_cannot_show_are_in_nobodys_way(db: Db, migrated_url: str) -> None:
    """X6: JSON may hold a NUL that no text can; a producer wrote it by hand."""
    await emit(db, "k", b"x", headers='[["trace", "\\u0000"]]')
    broker = RecordingBroker()
    async with relaying(migrated_url, broker):
        await until(db, SENT, 0)
        assert (await again(db)).done == 1
        await eventually(lambda: len(broker.arrivals) == 2)
    assert [("trace", b"\0") in each.message.headers for each in broker.arrivals] == [True, True]


async def test_filters_limit_and_rate_are_kept_and_a_dry_run_changes_nothing(
    db: Db, towpath: Run, migrated_url: str
) -> None:
    """D3, O1: with --max it says how many more there are, and the same command goes on where it ended."""
    for number in range(6):
        await emit(db, f"k{number % 2}", b"%d" % number)
        await emit(db, "k0", b"other", destination="views")
    async with relaying(migrated_url, RecordingBroker()):
        await until(db, SENT, 0)
    wanted = ("outbox", "republish", "--since", "1h", "--destination", "orders", "--where", "key=k0")
    ran = await tell(towpath, *wanted, "--dry-run")
    assert "to send again: 3," in ran.out
    assert ran.out.endswith("dry run: nothing was changed\n")
    assert await db.fetchval("select count(*) from towpath.outbox") == 12
    assert await db.fetchval("select count(*) from towpath.audit") == 0

    ran = await tell(towpath, *wanted, "--dry-run", "--max", "2")
    assert "to send again: 2," in ran.out
    assert "left out: 1 beyond --max 2" in ran.out
    absolute = (datetime.now(UTC) - timedelta(hours=1)).isoformat()
    command = (*wanted[:2], "--since", absolute, *wanted[4:], "--yes", "--max", "2")
    first = await ask(towpath, *command)
    second = await ask(towpath, *command)
    assert (first["done"], first["is_complete"], second["done"], second["is_complete"]) == (2, False, 1, True)
    assert (first["beyond_limit"], second["beyond_limit"]) == (1, 0)
    copies = await db.fetch(
        "select payload from towpath.outbox where headers #>> '{0,0}' = 'towpath-republished' order by id"
    )
    assert [row["payload"] for row in copies] == [b"0", b"2", b"4"]

    began = asyncio.get_running_loop().time()
    assert (await again(db, rate=4.0, destinations=("views",))).done == 6
    assert asyncio.get_running_loop().time() - began >= 1.0


async def test_two_runs_at_once_are_refused(db: Db, migrated_url: str) -> None:
    """D3: their rows would be mixed."""
    await emit(db, "k", b"x")
    async with relaying(migrated_url, RecordingBroker()):
        await until(db, SENT, 0)
    other = await asyncpg.connect(migrated_url)
    try:
        await other.fetchval("select pg_advisory_lock(hashtext('towpath.republish'))")
        with pytest.raises(UsageError, match="another run"):
            await again(db)
    finally:
        await other.close()


@pytest.mark.parametrize(
    "options",
    [
        ("--since", "yesterday"),
        ("--since", "1h", "--where", "payload=x"),
        ("--since", "1h", "--where", "id=7"),
        ("--since", "1h", "--until", "2h"),
    ],
)
async def test_what_cannot_be_meant_is_refused_in_one_line(
    db: Db, towpath: Run, options: tuple[str, ...]
) -> None:
    """O2"""
    ran = await tell(towpath, "outbox", "republish", "--yes", *options)
    assert ran.code == 2
    assert ran.err.count("\n") == 1
