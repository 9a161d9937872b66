"""Emitting on SQLAlchemy sessions: exists if and only if the transaction commits, behind every flush."""

from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import pytest
import pytest_asyncio
import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.ext.asyncio import async_scoped_session, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from tests.integration.shop import (
    ACCOUNT_DDL,
    KINDS,
    Account,
    Base,
    BuildReport,
    Charge,
    OrderPlaced,
    PageViewed,
    Runner,
    Target,
    sessions,
)
from towpath import outbox
from towpath.errors import NoTransaction
from towpath.outbox import emit, emit_many, send
from towpath.store.database import sqlalchemy_url

Database = "asyncpg.Connection[Any]"


@pytest_asyncio.fixture(params=KINDS)
async def run(request: pytest.FixtureRequest, db: Any, migrated_url: str) -> AsyncIterator[Runner]:
    await db.execute(ACCOUNT_DDL)
    async with sessions(request.param, migrated_url) as runner:
        yield runner


async def keys(db: Any) -> list[str]:
    return [row["key"] for row in await db.fetch("select key from towpath.outbox order by id")]


async def test_a_committed_event_is_there_with_the_transaction_of_its_cause(db: Any, run: Runner) -> None:
    """P1 P4"""

    def work(target: Target, session: Session) -> str:
        with session.begin():
            session.add(Account(id="a"))
            return str(emit(target, OrderPlaced(order_id="a", amount=7), headers={"tenant": "ü"}))

    message_id = await run(work)

    row = await db.fetchrow("""
        select o.*, o.headers::text as pairs,
               o.shard = towpath.shard('orders', 'a', o.message_id) as in_shard,
               o.xid::text::bigint % 4294967296 = a.xmin::text::bigint as same_transaction
        from towpath.outbox o, account a""")
    assert str(row["message_id"]) == message_id
    assert (row["kind"], row["destination"], row["type"], row["key"]) == (
        "event",
        "orders",
        "order.placed",
        "a",
    )
    assert (row["payload"], row["content_type"]) == (b'{"order_id":"a","amount":7}', "application/json")
    assert row["pairs"] == '[["tenant","ü"]]'
    assert row["in_shard"]
    assert row["same_transaction"]


async def test_a_rolled_back_event_does_not_exist(db: Any, run: Runner) -> None:
    """P1"""

    def work(target: Target, session: Session) -> None:
        session.begin()
        session.add(Account(id="a"))
        emit(target, OrderPlaced(order_id="a"))
        session.rollback()
        with session.begin():
            session.add(Account(id="b"))
            emit(target, OrderPlaced(order_id="b"))
        session.begin()
        emit(target, OrderPlaced(order_id="c"))
        session.close()

    await run(work)

    assert await keys(db) == ["b"]


async def test_a_failing_block_leaves_no_event(db: Any, run: Runner) -> None:
    """P1"""

    def work(target: Target, session: Session) -> None:
        with session.begin():
            emit(target, OrderPlaced(order_id="a"))
            session.add_all([Account(id="a"), Account(id="a")])

    with pytest.raises(sa.exc.IntegrityError):
        await run(work)

    assert await keys(db) == []


async def test_rolling_back_a_savepoint_drops_what_was_emitted_inside_it(db: Any, run: Runner) -> None:
    """P1"""

    def work(target: Target, session: Session) -> None:
        with session.begin():
            emit(target, OrderPlaced(order_id="before"))
            savepoint = session.begin_nested()
            emit(target, OrderPlaced(order_id="dropped"))
            savepoint.rollback()
            emit(target, OrderPlaced(order_id="between"))
            with suppress(ZeroDivisionError), session.begin_nested():
                emit(target, OrderPlaced(order_id="dropped too"))
                raise ZeroDivisionError
            with session.begin_nested():
                emit(target, OrderPlaced(order_id="released"))
            emit(target, OrderPlaced(order_id="after"))

    await run(work)

    assert await keys(db) == ["before", "between", "released", "after"]


async def test_a_released_savepoint_falls_with_the_one_around_it(db: Any, run: Runner) -> None:
    """P1"""

    def work(target: Target, session: Session) -> None:
        with session.begin():
            outer = session.begin_nested()
            emit(target, OrderPlaced(order_id="outer"))
            with session.begin_nested():
                emit(target, OrderPlaced(order_id="inner"))
                inmost = session.begin_nested()
                emit(target, OrderPlaced(order_id="inmost"))
                inmost.rollback()
            outer.rollback()
            emit(target, OrderPlaced(order_id="kept"))

    await run(work)

    assert await keys(db) == ["kept"]


async def test_a_savepoint_that_a_failed_flush_ended_takes_its_events_along(db: Any, run: Runner) -> None:
    """P1"""

    def work(target: Target, session: Session) -> None:
        with session.begin():
            session.add(Account(id="a"))
            emit(target, OrderPlaced(order_id="a"))
            with suppress(sa.exc.IntegrityError), session.begin_nested():
                emit(target, OrderPlaced(order_id="twice"))
                session.add(Account(id="a"))
                session.flush()
            emit(target, OrderPlaced(order_id="b"))

    await run(work)

    assert await keys(db) == ["a", "b"]


async def test_a_submit_in_a_rolled_back_savepoint_leaves_nothing(db: Any, run: Runner) -> None:
    """P1"""

    def work(target: Target, session: Session) -> None:
        with session.begin():
            savepoint = session.begin_nested()
            outbox.submit(session, Charge("dropped"))
            savepoint.rollback()
            outbox.submit(session, Charge("kept"))

    await run(work)

    assert await keys(db) == ["kept"]
    assert await db.fetch("select key, state from towpath.task") == [("kept", "ACCEPTED")]


async def test_a_whole_rollback_drops_what_savepoints_had_released(db: Any, run: Runner) -> None:
    """P1"""

    def work(target: Target, session: Session) -> None:
        session.begin()
        with session.begin_nested():
            session.add(Account(id="a"))
            emit(target, OrderPlaced(order_id="a"))
        session.rollback()
        with session.begin():
            session.add(Account(id="b"))

    await run(work)

    assert await keys(db) == []


async def test_a_commit_over_an_open_savepoint_writes_what_was_emitted_in_it(db: Any, run: Runner) -> None:
    """P1: the session's before_commit sees only the savepoint then."""

    def work(target: Target, session: Session) -> None:
        with session.begin():
            session.begin_nested()
            emit(target, OrderPlaced(order_id="a"))

    await run(work)

    assert await keys(db) == ["a"]


def statements_of(session: Session) -> list[str]:
    """What the session's transaction sends from now on, shortened."""
    sent: list[str] = []

    def note(conn: Any, cursor: Any, statement: str, *_: Any) -> None:
        sent.append(" ".join(statement.split()[:3]).lower())

    engine = session.get_bind()
    event.listen(engine, "before_cursor_execute", note)
    do_commit = engine.dialect.do_commit

    def commit(connection: Any) -> None:
        sent.append("commit")
        do_commit(connection)

    engine.dialect.do_commit = commit  # type: ignore[method-assign]
    return sent


@pytest.mark.parametrize("autoflush", [True, False])
async def test_the_insert_is_the_last_statement_behind_the_final_flush(
    db: Any, run: Runner, autoflush: bool
) -> None:
    """P8"""
    await db.execute("insert into account values ('a', 0)")

    def work(target: Target, session: Session) -> list[str]:
        sent = statements_of(session)
        with session.begin():
            account = session.get_one(Account, "a")
            emit(target, OrderPlaced(order_id="a"))
            account.version += 1
            emit_many(target, [OrderPlaced(order_id="b"), PageViewed("/")])
        return sent

    sent = await run(work, autoflush=autoflush)

    assert [s for s in sent if not s.startswith("select")][-3:] == [
        "update account set",
        "insert into towpath.outbox",
        "commit",
    ]
    assert await keys(db) == ["a", "b", None]


async def test_flush_listeners_may_emit_and_their_events_come_last(db: Any, run: Runner) -> None:
    """P8"""

    def work(target: Target, session: Session) -> list[str]:
        @event.listens_for(session, "before_flush")
        def tell_what_will_be(session: Session, *_: Any) -> None:
            for account in session.new:
                emit(target, OrderPlaced(order_id=f"before {account.id}"))

        @event.listens_for(session, "after_flush")
        def tell_what_is(session: Session, *_: Any) -> None:
            for account in session.new:
                emit(target, OrderPlaced(order_id=f"after {account.id}"))

        @event.listens_for(session, "after_flush_postexec")
        def add_another(session: Session, *_: Any) -> None:
            if session.get(Account, "second") is None:
                session.add(Account(id="second"))

        sent = statements_of(session)
        with session.begin():
            session.add(Account(id="first"))
        return sent

    sent = await run(work)

    assert [s for s in sent if not s.startswith("select")][-4:] == [
        "insert into account",
        "insert into account",
        "insert into towpath.outbox",
        "commit",
    ]
    assert await keys(db) == ["before first", "after first", "before second", "after second"]


async def test_a_before_commit_listener_sees_the_unflushed_session_and_may_emit(db: Any, run: Runner) -> None:
    """P8: emitting never flushes early, which would hide new objects from such listeners."""

    def work(target: Target, session: Session) -> list[str]:
        seen: list[str] = []

        @event.listens_for(session, "before_commit")
        def tell(session: Session) -> None:
            seen.extend(account.id for account in session.new)
            emit(target, OrderPlaced(order_id="late"))

        with session.begin():
            session.add(Account(id="a"))
            emit(target, OrderPlaced(order_id="early"))
        return seen

    assert await run(work) == ["a"]
    assert await keys(db) == ["early", "late"]


async def test_a_before_commit_listener_may_emit_where_nothing_else_happened(db: Any, run: Runner) -> None:
    """P8"""

    def work(target: Target, session: Session) -> None:
        event.listen(session, "before_commit", lambda _: emit_many(target, []))
        event.listen(session, "before_commit", lambda _: emit(target, OrderPlaced(order_id="only")))
        session.begin()
        session.commit()

    await run(work)

    assert await keys(db) == ["only"]


async def test_an_event_alone_is_a_transaction_of_its_own(db: Any, run: Runner) -> None:
    """P4"""

    def work(target: Target, session: Session) -> None:
        with session.begin():
            emit(target, PageViewed("/"))

    await run(work)

    assert await keys(db) == [None]


async def test_events_of_one_transaction_are_one_statement_in_emit_order(db: Any, run: Runner) -> None:
    """P4"""

    def work(target: Target, session: Session) -> list[str]:
        sent = statements_of(session)
        with session.begin():
            for number in range(300):
                emit(target, OrderPlaced(order_id=str(number)))
                if number == 100:
                    outbox.submit(session, BuildReport(name="r"))
        return sent

    sent = await run(work)

    assert sent.count("insert into towpath.outbox") == 1
    assert [*map(str, range(101)), None, *map(str, range(101, 300))] == await keys(db)


async def test_a_sent_task_carries_its_body_and_a_submitted_one_does_not(db: Any, run: Runner) -> None:
    def work(target: Target, session: Session) -> None:
        with session.begin():
            send(target, Charge("a"))
            outbox.submit(session, Charge("b"))

    await run(work)

    rows = await db.fetch("select kind, destination, key, payload from towpath.outbox order by id")
    assert rows == [
        ("task", "tasks.billing", "a", b'{"order_id":"a","amount":1}'),
        ("task", "tasks.billing", "b", None),
    ]
    assert await db.fetch("select key, payload from towpath.task") == [("b", b'{"order_id":"b","amount":1}')]


async def test_outside_a_transaction_the_call_is_refused(db: Any, run: Runner) -> None:
    """P4"""

    def work(target: Target, session: Session) -> None:
        with pytest.raises(NoTransaction, match=r"begin one first"):
            emit(target, OrderPlaced(order_id="a"))
        with session.begin():
            session.add(Account(id="a"))
        with pytest.raises(NoTransaction):
            emit(target, OrderPlaced(order_id="a"))
        with pytest.raises(NoTransaction):
            outbox.submit(session, Charge("a"))

    await run(work)

    assert await keys(db) == []


async def test_emitting_after_the_commit_is_refused(db: Any, run: Runner) -> None:
    """P1"""

    def work(target: Target, session: Session) -> None:
        @event.listens_for(session, "after_commit")
        def too_late(session: Session) -> None:
            with pytest.raises(NoTransaction, match="committed already"):
                emit(target, OrderPlaced(order_id="late"))

        with session.begin():
            session.add(Account(id="a"))

    await run(work)

    assert await keys(db) == []


async def test_when_the_insert_fails_nothing_commits_and_the_pool_gets_a_clean_connection(
    db: Any, run: Runner
) -> None:
    """P1"""
    await db.execute("alter table towpath.outbox add constraint no_luck check (key <> 'unlucky')")

    def fail(target: Target, session: Session) -> None:
        session.begin()
        session.add(Account(id="a"))
        emit(target, OrderPlaced(order_id="unlucky"))
        try:
            session.commit()
        finally:
            session.close()

    def go_on(target: Target, session: Session) -> None:
        with session.begin():
            session.add(Account(id="b"))
            emit(target, OrderPlaced(order_id="b"))

    with pytest.raises(sa.exc.IntegrityError, match="no_luck"):
        await run(fail)
    await run(go_on)

    assert await keys(db) == ["b"]
    assert await db.fetchval("select string_agg(id, ',') from account") == "b"


@pytest.mark.parametrize("mode", ["rollback_only", "control_fully", "create_savepoint"])
@pytest.mark.parametrize("outer", ["commit", "rollback"])
def test_a_session_in_an_outer_transaction_shares_its_fate(migrated_url: str, mode: Any, outer: str) -> None:
    """P1"""
    engine = sa.create_engine(migrated_url.replace("://", "+psycopg://"))
    Base.metadata.create_all(engine)
    with engine.connect() as connection:
        transaction = connection.begin()
        for name in ("a", "b"):
            with Session(connection, join_transaction_mode=mode) as session:
                if not connection.in_transaction():
                    break  # control_fully: the first session committed it
                session.begin()
                session.add(Account(id=name))
                emit(session, OrderPlaced(order_id=name))
                session.commit()
        if transaction.is_active:
            getattr(transaction, outer)()
    with engine.connect() as connection:
        accounts = connection.scalars(sa.text("select id from account order by id")).all()
        found = connection.scalars(sa.text("select key from towpath.outbox order by id")).all()
    engine.dispose()

    assert found == accounts
    assert accounts == (["a"] if mode == "control_fully" else ["a", "b"] if outer == "commit" else [])


async def test_what_a_session_left_behind_is_never_written_by_the_next_one(db: Any, run: Runner) -> None:
    """P1: pooled connections are shared one after the other, and some sessions are never closed."""
    abandoned: list[Any] = []

    def abandon(target: Target, session: Session) -> None:
        session.begin()
        session.add(Account(id="abandoned"))
        session.flush()
        emit(target, OrderPlaced(order_id="abandoned"))
        session.connection().connection.close()  # as when the pool reclaims it
        abandoned.append(session)

    def go_on(target: Target, session: Session) -> None:
        with session.begin():
            session.add(Account(id="b"))
            emit(target, OrderPlaced(order_id="b"))
        with session.begin():
            session.add(Account(id="c"))

    await run(abandon)
    await run(go_on)

    assert await keys(db) == ["b"]
    assert await db.fetchval("select string_agg(id, ',' order by id) from account") == "b,c"


async def test_a_session_emits_in_one_transaction_after_the_other(db: Any, run: Runner) -> None:
    """P1: also where the pooled connection stays the same."""

    def work(target: Target, session: Session) -> int:
        for number in range(20):
            with session.begin():
                session.add(Account(id=str(number)))
                if number % 2:
                    emit(target, OrderPlaced(order_id=str(number)))
        with session.begin():
            return len(session.connection().info["towpath.outbox"])

    assert await run(work) == 1
    assert await keys(db) == [str(number) for number in range(1, 20, 2)]


async def test_scoped_sessions_stand_for_the_session_of_their_scope(db: Any, migrated_url: str) -> None:
    """P4"""
    engine = sa.create_engine(sqlalchemy_url(migrated_url, "psycopg"))
    scoped = scoped_session(sessionmaker(engine))
    with scoped.begin():
        emit(scoped, OrderPlaced(order_id="scoped"))
        assert outbox.submit(scoped, Charge("scoped task")).created
    scoped.remove()
    engine.dispose()
    async_engine = create_async_engine(sqlalchemy_url(migrated_url))
    async_scoped = async_scoped_session(async_sessionmaker(async_engine), scopefunc=lambda: None)
    async with async_scoped.begin():
        emit(async_scoped, OrderPlaced(order_id="async scoped"))
        assert (await outbox.submit(async_scoped, Charge("async task"))).created
    await async_scoped.remove()
    await async_engine.dispose()

    assert await keys(db) == ["scoped", "scoped task", "async scoped", "async task"]
