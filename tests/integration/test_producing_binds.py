"""Only a real transaction counts, and the message travels on the connection that holds the change."""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import Engine, create_engine, event
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column
from sqlalchemy.sql import Delete, Update

from tests.fixtures.fix_postgres import NewDatabase
from tests.integration.shop import Account, Base, Charge, OrderPlaced
from towpath.errors import NoTransaction
from towpath.outbox import emit, submit
from towpath.store.database import sqlalchemy_url


class OtherBase(DeclarativeBase):
    pass


class Invoice(OtherBase):
    __tablename__ = "invoice"

    id: Mapped[str] = mapped_column(primary_key=True)


@pytest.fixture
def first(migrated_url: str) -> Iterator[Engine]:
    engine = create_engine(sqlalchemy_url(migrated_url, "psycopg"))
    Base.metadata.create_all(engine)
    OtherBase.metadata.create_all(engine)
    yield engine
    engine.dispose()


@pytest.fixture
def second(new_database: NewDatabase, schema_template: str) -> Iterator[Engine]:
    """Another database, with an outbox of its own."""
    with ExitStack() as stack:
        engine = create_engine(sqlalchemy_url(stack.enter_context(new_database(schema_template)), "psycopg"))
        stack.callback(engine.dispose)
        Base.metadata.create_all(engine)
        OtherBase.metadata.create_all(engine)
        yield engine


def keys(engine: Engine) -> list[str]:
    with engine.connect() as connection:
        return list(connection.scalars(sa.text("select key from towpath.outbox order by id")))


def is_empty(engine: Engine, *tables: str) -> bool:
    with engine.connect() as connection:
        return all(connection.scalar(sa.text(f"select count(*) from {table}")) == 0 for table in tables)


def autocommit_engines(url: str) -> dict[str, Engine]:
    return {
        "engine": create_engine(url, isolation_level="AUTOCOMMIT"),
        "options": create_engine(url).execution_options(isolation_level="AUTOCOMMIT"),
        "create options": create_engine(url, execution_options={"isolation_level": "AUTOCOMMIT"}),
        "driver": create_engine(url, connect_args={"autocommit": True}),
    }


@pytest.mark.parametrize("how", ["engine", "options", "create options", "driver"])
@pytest.mark.parametrize("when", ["first", "after a read"])
def test_an_autocommit_engine_is_refused_before_anything_is_written(
    migrated_url: str, first: Engine, how: str, when: str
) -> None:
    """P10"""
    engine = autocommit_engines(sqlalchemy_url(migrated_url, "psycopg"))[how]

    def work(session: Session) -> None:
        with session.begin():
            if when == "after a read":
                session.execute(sa.text("select 1"))
            session.add(Account(id="a"))
            emit(session, OrderPlaced(order_id="a"))

    with Session(engine) as session:
        with pytest.raises(NoTransaction, match="AUTOCOMMIT"):
            work(session)
        with pytest.raises(NoTransaction, match="AUTOCOMMIT"), session.begin():
            submit(session, Charge("a"))
    engine.dispose()

    assert is_empty(first, "towpath.outbox", "towpath.task", "account")


@pytest.mark.parametrize("how", ["session", "transaction"])
def test_a_session_that_asks_for_autocommit_is_refused(first: Engine, how: str) -> None:
    """P10"""
    options = {"isolation_level": "AUTOCOMMIT"}
    with Session(first, execution_options=options if how == "session" else None) as session, session.begin():
        if how == "transaction":
            session.connection(execution_options=options)
        with pytest.raises(NoTransaction, match="AUTOCOMMIT"):
            emit(session, OrderPlaced(order_id="a"))

    assert is_empty(first, "towpath.outbox")


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
@pytest.mark.parametrize("when", ["first", "after a read"])
async def test_an_async_autocommit_engine_is_refused(
    db: Any, migrated_url: str, driver: str, when: str
) -> None:
    """P10"""
    engine = create_async_engine(sqlalchemy_url(migrated_url, driver), isolation_level="AUTOCOMMIT")
    async with AsyncSession(engine) as session, session.begin():
        if when == "after a read":
            await session.execute(sa.text("select 1"))
        with pytest.raises(NoTransaction, match="AUTOCOMMIT"):
            emit(session, OrderPlaced(order_id="a"))
    await engine.dispose()

    assert await db.fetchval("select count(*) from towpath.outbox") == 0


class Routing(Session):
    """Reads go to one engine, writes to another: the recipe in SQLAlchemy's documentation."""

    reader: Engine
    writer: Engine

    def get_bind(self, mapper: Any = None, *, clause: Any = None, bind: Any = None, **_: Any) -> Any:
        if bind is not None:
            return bind
        return self.writer if self._flushing or isinstance(clause, Update | Delete) else self.reader


@pytest.fixture
def routing(first: Engine, second: Engine) -> type[Routing]:
    return type("RoutingHere", (Routing,), {"reader": second, "writer": first})


def test_with_reader_and_writer_the_message_goes_with_the_write(
    first: Engine, second: Engine, routing: type[Routing]
) -> None:
    """P10"""
    with routing() as session:
        with session.begin():
            session.scalars(sa.select(Account)).all()
            session.add(Account(id="a"))
            emit(session, OrderPlaced(order_id="read, write"))
        with session.begin():
            session.add(Account(id="b"))
            emit(session, OrderPlaced(order_id="write"))
        with session.begin():
            session.scalars(sa.select(Account)).all()
            emit(session, OrderPlaced(order_id="read only"))
        with session.begin():
            emit(session, OrderPlaced(order_id="nothing else"))
        with session.begin():
            session.scalars(sa.select(Account)).all()
            submit(session, Charge("submitted"))

    assert keys(first) == ["read, write", "write", "read only", "nothing else", "submitted"]
    assert is_empty(second, "towpath.outbox", "towpath.task", "account")


def test_a_reader_in_autocommit_does_not_matter(migrated_url: str, first: Engine, second: Engine) -> None:
    """P10"""
    reader = second.execution_options(isolation_level="AUTOCOMMIT")
    session_class = type("RoutingHere", (Routing,), {"reader": reader, "writer": first})
    with session_class() as session, session.begin():
        session.scalars(sa.select(Account)).all()
        session.add(Account(id="a"))
        emit(session, OrderPlaced(order_id="a"))

    assert keys(first) == ["a"]


def test_with_a_database_per_class_the_message_goes_to_the_change(first: Engine, second: Engine) -> None:
    """P10"""
    binds: dict[Any, Engine] = {Account: first, Invoice: second}
    with Session(binds=binds) as session:
        for key, change in (("1", Account(id="1")), ("2", Invoice(id="2"))):
            with session.begin():
                session.scalars(sa.select(Account)).all()
                session.scalars(sa.select(Invoice)).all()
                session.add(change)
                emit(session, OrderPlaced(order_id=key))
        with session.begin():
            session.add(Invoice(id="3"))
            emit(session, OrderPlaced(order_id="3"))

    assert keys(first) == ["1"]
    assert keys(second) == ["2", "3"]


def test_with_a_default_bind_the_message_still_goes_to_the_change(first: Engine, second: Engine) -> None:
    """P10"""
    with Session(first, binds={Invoice: second}) as session:
        with session.begin():
            session.add(Invoice(id="1"))
            emit(session, OrderPlaced(order_id="1"))
        with session.begin():
            emit(session, OrderPlaced(order_id="2"))

    assert keys(first) == ["2"]
    assert keys(second) == ["1"]


def test_changes_in_two_databases_refuse_the_message_and_the_commit(first: Engine, second: Engine) -> None:
    """P10"""

    def work(session: Session) -> None:
        with session.begin():
            session.add_all([Account(id="a"), Invoice(id="a")])
            emit(session, OrderPlaced(order_id="a"))

    with Session(binds={Account: first, Invoice: second}) as session:
        with pytest.raises(NoTransaction, match="several databases"):
            work(session)
        with session.begin():  # the session goes on
            session.add(Account(id="b"))
            emit(session, OrderPlaced(order_id="b"))

    assert keys(first) == ["b"]
    assert is_empty(second, "towpath.outbox", "invoice")
    with first.connect() as connection:
        assert connection.scalars(sa.text("select id from account")).all() == ["b"]


def test_two_databases_without_a_change_refuse_the_message(first: Engine, second: Engine) -> None:
    """P10"""

    def work(session: Session, *reads: type[Account | Invoice]) -> None:
        with session.begin():
            for cls in reads:
                session.scalars(sa.select(cls)).all()
            emit(session, OrderPlaced(order_id="a"))

    with Session(binds={Account: first, Invoice: second}) as session:
        with pytest.raises(NoTransaction, match="changed none"):
            work(session)
        with pytest.raises(NoTransaction, match="changed none"):
            work(session, Account, Invoice)

    assert is_empty(first, "towpath.outbox")
    assert is_empty(second, "towpath.outbox")


def test_a_change_in_another_kind_of_database_refuses_the_message(first: Engine) -> None:
    """P10"""
    sqlite = create_engine("sqlite://")
    Base.metadata.create_all(sqlite)

    def work(session: Session) -> None:
        with session.begin():
            session.add(Account(id="a"))
            emit(session, OrderPlaced(order_id="a"))

    with Session(sqlite) as session, pytest.raises(NoTransaction, match="sqlite"):
        work(session)
    with sqlite.connect() as connection:
        assert connection.scalar(sa.text("select count(*) from account")) == 0
    sqlite.dispose()


def test_emitting_asks_the_database_nothing_more(first: Engine) -> None:
    """P6: one INSERT and nothing else on an ordinary session."""
    sent: list[str] = []
    event.listen(
        first, "before_cursor_execute", lambda _c, _u, statement, *_: sent.append(statement.split()[0])
    )
    with Session(first) as session, session.begin():
        session.add(Account(id="a"))
        emit(session, OrderPlaced(order_id="a"))

    assert sent == ["INSERT", "insert"]
