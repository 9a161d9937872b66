"""Handlers that are plain functions run in threads: effects once, and never on the loop."""

import logging
import threading
import time
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from sqlalchemy import text

from tests.integration.engine import EFFECTS, Engine, Note, Posted, Sorted, depot, effects, running, until
from tests.integration.test_worker_pauses import beats
from towpath import Reject, RetryPolicy, SyncCall, SyncTx
from towpath.errors import UsageError
from towpath.telemetry.logging import facts

QUICK = RetryPolicy(attempts=2, base="5ms", cap="10ms")
INSERT = text("insert into public.effect (parcel, number) values (:p, :n)")


async def test_sql_state_and_events_of_a_plain_function_commit_together(migrated_url: str) -> None:
    """C6: once, in order per key, on a thread of its own."""
    app = depot(retry=QUICK)
    threads: set[int] = set()

    @app.transactional()
    def legacy(posted: Posted, tx: SyncTx) -> Reject | None:
        threads.add(threading.get_ident())
        tx.session.execute(INSERT, {"p": posted.parcel, "n": posted.number})
        if posted.number == 3 and tx.attempt.attempt == 1:
            raise ValueError("once")
        tx.emit(Sorted(posted.parcel))
        return Reject("enough") if posted.number == 5 else None

    async with running(app, migrated_url) as depot_:
        await depot_.db.execute(EFFECTS)
        ids = [await depot_.publish(Posted("a", number), times=2) for number in range(1, 6)]
        for number, message_id in enumerate(ids, 1):
            await depot_.reaches(message_id, "FAILED" if number == 5 else "SUCCEEDED")
        assert [("a", number) for number in range(1, 6)] == await effects(depot_)
        assert len(await depot_.outbox()) == 5
        assert await depot_.gates() == 0
        rejected = [event["event"] for event in await depot_.events(ids[-1])]
        assert "task.failed" in rejected
    assert threading.get_ident() not in threads


async def test_a_blocking_function_does_not_hold_up_the_others(migrated_url: str) -> None:
    """C2: the loop goes on, leases are renewed."""
    app = depot(retry=QUICK)
    free = threading.Event()

    @app.idempotent()
    def block(posted: Posted, call: SyncCall) -> str:
        assert call.idempotency_key("step").endswith(":step")
        call.progress(0.5)
        assert free.wait(30)
        return "done"

    @app.idempotent()
    def note(left: Note, call: SyncCall) -> None: ...

    async with running(app, migrated_url) as depot_:
        slow = await depot_.publish(Posted("a"))
        await depot_.reaches(await depot_.publish(Note(1)), "SUCCEEDED")
        await beats(depot_)
        assert await depot_.state(slow) == "RUNNING"
        free.set()
        row = await depot_.reaches(slow, "SUCCEEDED")
        assert (row["result"], row["attempt"], row["deliveries"]) == (b'"done"', 1, 1)


async def test_a_function_that_overstays_finds_its_token_gone(migrated_url: str) -> None:
    """C2: a thread cannot be stopped, but its transaction can be refused."""
    app = depot(retry=RetryPolicy(attempts=20, base="5ms", cap="10ms"))  # a slow machine overstays, too
    free = threading.Event()
    ended: list[BaseException | None] = []

    @app.transactional(timeout="2s")
    def overstay(posted: Posted, tx: SyncTx) -> None:
        tx.session.execute(INSERT, {"p": posted.parcel, "n": tx.attempt.attempt})
        if tx.attempt.attempt == 1:
            free.wait(30)
            ended.append(None)

    async with running(app, migrated_url) as depot_:
        await depot_.db.execute(EFFECTS)
        message_id = await depot_.publish(Posted("a"))
        row = await depot_.reaches(message_id, "SUCCEEDED")
        assert row["attempt"] > 1
        free.set()
        await until(lambda: len(ended) == 1)
        await until(lambda: _nobody_is_in_a_transaction(depot_))
        assert await effects(depot_) == [("a", row["attempt"])]


async def _nobody_is_in_a_transaction(depot_: Engine) -> bool:
    count = await depot_.db.fetchval(
        "select count(*) from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()"
        " and xact_start is not null and backend_type = 'client backend'"
    )
    return bool(count == 0)


@pytest.mark.parametrize("statement", range(1, 8))
async def test_a_session_that_the_server_ends_at_any_statement_of_a_plain_function_spends_nothing(
    migrated_url: str, monkeypatch: pytest.MonkeyPatch, statement: int
) -> None:
    """C13, C6: at what SQLAlchemy asks a new server first, in the handler's SQL, or where it is settled."""
    app, asked = depot(retry=RetryPolicy(attempts=1, base="5ms", cap="10ms")), list[str]()
    execute = psycopg.Cursor.execute

    def execute_or_end(cursor: Any, query: Any, *arguments: Any, **options: Any) -> Any:
        asked.append(str(query))
        if len(asked) == statement:
            with psycopg.connect(migrated_url, autocommit=True) as administrator:
                terminate = "select pg_terminate_backend(%s, 10000)"
                execute(administrator.cursor(), terminate, [cursor.connection.info.backend_pid])
        return execute(cursor, query, *arguments, **options)

    @app.transactional()
    def legacy(posted: Posted, tx: SyncTx) -> None:
        tx.session.execute(INSERT, {"p": posted.parcel, "n": posted.number})

    async with running(app, migrated_url) as depot_:
        await depot_.db.execute(EFFECTS)
        monkeypatch.setattr(psycopg.Cursor, "execute", execute_or_end)
        row = await depot_.reaches(await depot_.publish(Posted("a", 1)), "SUCCEEDED", "DEAD")
        assert (row["state"], row["attempt"]) == ("SUCCEEDED", 1), (row["reason_code"], asked[:statement])
        assert await effects(depot_) == [("a", 1)]
        assert len(asked) > statement


async def test_a_session_of_a_plain_function_cannot_be_committed(migrated_url: str) -> None:
    app = depot(retry=RetryPolicy(attempts=1))
    found: list[str] = []

    @app.transactional()
    def commit(posted: Posted, tx: SyncTx) -> None:
        for forbidden in (tx.session.commit, tx.session.rollback):
            with pytest.raises(UsageError) as refused:
                forbidden()
            found.append(str(refused.value))

    async with running(app, migrated_url) as depot_:
        await depot_.reaches(await depot_.publish(Posted("a")), "SUCCEEDED")
    assert len(found) == 2


async def test_a_handler_that_blocks_the_loop_is_named(
    migrated_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """C2: blocking is found out and reported with the handler's name."""
    app = depot(retry=QUICK)

    def named() -> list[object]:
        told = [facts(record) for record in [*caplog.records]]
        return [fact["handler"] for fact in told if fact["event"] == "worker.loop_blocked"]

    @app.idempotent()
    async def hog(posted: Posted) -> None:
        deadline = time.monotonic() + 60
        while "hog" not in named() and time.monotonic() < deadline:
            time.sleep(0.05)

    caplog.set_level(logging.WARNING)
    async with running(app, migrated_url, lease=timedelta(minutes=2)) as depot_:
        await depot_.reaches(await depot_.publish(Posted("a")), "SUCCEEDED")
    assert "hog" in named()
