"""Bad input is refused at the call, by name, and leaves the caller's transaction usable."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from tests.integration.shop import ACCOUNT_DDL, Account, BuildReport, Charge, OrderPlaced, PageViewed
from towpath.errors import InvalidMessage, NoTransaction, PayloadTooLarge, UnknownType, UsageError
from towpath.messages import RawMessage, event
from towpath.outbox import Outbox, emit, emit_many, send, submit
from towpath.store.database import sqlalchemy_url


@event("meeting.set", destination="meetings", key="room")
@dataclass
class MeetingSet:
    room: Any
    at: Any = None


class Undeclared:
    pass


class Inheriting(OrderPlaced):
    pass


Call = Callable[[Any], object]
naive = datetime(2026, 1, 1)  # noqa: DTZ001 - the point of it
unfit: Any = 1
soon: Any = datetime.now(UTC)
large = "x" * 16384

REFUSED: dict[str, tuple[type[UsageError], str, Call]] = {
    "an undeclared class": (UnknownType, "Undeclared", lambda t: emit(t, Undeclared())),
    "bare bytes": (UnknownType, "RawMessage", lambda t: emit(t, b"bytes")),
    "a subclass": (
        UnknownType,
        "only OrderPlaced",
        lambda t: emit(t, type("Sub", (OrderPlaced,), {})(order_id="a")),
    ),
    "a task emitted": (InvalidMessage, "submit it", lambda t: emit(t, Charge("a"))),
    "an event submitted": (InvalidMessage, "emit it", lambda t: submit(t, PageViewed("/"))),
    "an event sent": (InvalidMessage, "emit it", lambda t: send(t, PageViewed("/"))),
    "a large body": (PayloadTooLarge, "1048576", lambda t: emit(t, PageViewed("x" * 1_048_576))),
    "a large task": (PayloadTooLarge, "1048576", lambda t: submit(t, BuildReport(name="x" * 1_048_576))),
    "a naive datetime": (InvalidMessage, "naive", lambda t: emit(t, MeetingSet("r", naive))),
    "a naive datetime within": (
        InvalidMessage,
        r"\$\.at\.0\.x",
        lambda t: emit(t, MeetingSet("r", [{"x": naive}])),
    ),
    "a NaN": (InvalidMessage, "nan", lambda t: emit(t, MeetingSet("r", float("nan")))),
    "no JSON": (InvalidMessage, "JSON", lambda t: emit(t, MeetingSet("r", object()))),
    "a key that is a float": (InvalidMessage, "str, int or UUID", lambda t: emit(t, MeetingSet(1.5))),
    "a key that is a bool": (InvalidMessage, "str, int or UUID", lambda t: emit(t, MeetingSet(True))),
    "a key that is bytes": (InvalidMessage, "str, int or UUID", lambda t: emit(t, MeetingSet(b"r"))),
    "a long key": (InvalidMessage, "512 bytes", lambda t: emit(t, MeetingSet("ü" * 257))),
    "a NUL in the key": (InvalidMessage, "NUL", lambda t: emit(t, MeetingSet("a\0"))),
    "half a surrogate": (InvalidMessage, "surrogate", lambda t: emit(t, PageViewed("/"), key="\ud800")),
    "a long given key": (InvalidMessage, "512 bytes", lambda t: emit(t, PageViewed("/"), key="x" * 513)),
    "a destination": (InvalidMessage, "destination", lambda t: emit(t, PageViewed("/"), destination="a b")),
    "a long destination": (InvalidMessage, "200", lambda t: emit(t, PageViewed("/"), destination="x" * 201)),
    "an empty destination": (InvalidMessage, "200", lambda t: emit(t, PageViewed("/"), destination="")),
    "an id that is a number": (
        InvalidMessage,
        "uuid.UUID",
        lambda t: emit(t, PageViewed("/"), message_id=unfit),
    ),
    "a reserved header": (InvalidMessage, "ce_", lambda t: emit(t, PageViewed("/"), headers={"Ce_Id": "1"})),
    "a header that is a number": (
        InvalidMessage,
        "int",
        lambda t: emit(t, PageViewed("/"), headers={"a": 1}),
    ),  # type: ignore[dict-item]
    "many headers": (
        InvalidMessage,
        "16384",
        lambda t: emit(t, PageViewed("/"), headers={"a": large}),
    ),
    "a long type": (InvalidMessage, "200", lambda t: emit(t, RawMessage("x" * 201, b"", "d"))),
    "a long owner": (InvalidMessage, "200", lambda t: submit(t, Charge("a"), owner="x" * 201)),
    "a long dedupe key": (
        InvalidMessage,
        "512 bytes",
        lambda t: submit(t, Charge("a"), dedupe_key="ü" * 257),
    ),
    "an empty dedupe key": (InvalidMessage, "1 to 512", lambda t: submit(t, Charge("a"), dedupe_key="")),
    "a naive deadline": (InvalidMessage, "naive", lambda t: submit(t, Charge("a"), deadline=naive)),
    "a deadline in no unit": (InvalidMessage, "duration", lambda t: submit(t, Charge("a"), deadline="soon")),
    "a naive time": (InvalidMessage, "naive", lambda t: emit(t, PageViewed("/"), at=naive)),
    "a time that is text": (
        InvalidMessage,
        "a datetime with a time zone",
        lambda t: emit(t, PageViewed("/"), at=unfit),
    ),
    "a delay that is a time": (
        InvalidMessage,
        "takes an instant",
        lambda t: emit(t, PageViewed("/"), delay=soon),
    ),
    "a delay in no unit": (InvalidMessage, "duration", lambda t: emit(t, PageViewed("/"), delay="5")),
    "a negative delay": (
        InvalidMessage,
        "negative",
        lambda t: emit_many(t, [PageViewed("/")], delay=timedelta(seconds=-1)),
    ),
    "a delay of an age": (InvalidMessage, "too long", lambda t: submit(t, Charge("a"), delay="99999d")),
    "a time and a delay": (
        InvalidMessage,
        "both",
        lambda t: emit(t, PageViewed("/"), at=datetime.now(UTC), delay="1h"),
    ),
    "a task's naive time": (InvalidMessage, "naive", lambda t: submit(t, Charge("a"), at=naive)),
    "a time beyond the years": (
        InvalidMessage,
        "refused",
        lambda t: emit(t, PageViewed("/"), at=datetime.max.replace(tzinfo=timezone(timedelta(hours=-1)))),
    ),
    "a large body for later": (
        PayloadTooLarge,
        "1048576",
        lambda t: emit(t, PageViewed("x" * 1_048_576), delay="1h"),
    ),
    "one of many": (UnknownType, "Undeclared", lambda t: emit_many(t, [PageViewed("/"), Undeclared()])),
}


async def test_on_an_asyncpg_connection_bad_input_is_refused(db: Any) -> None:
    """P7 P11"""
    for error, text, call in REFUSED.values():
        async with db.transaction():
            with pytest.raises(error, match=text):
                await call(db)  # type: ignore[misc]
            await emit(db, PageViewed("/still usable"))

    assert await db.fetchval("select count(*) from towpath.outbox") == len(REFUSED)
    assert await db.fetchval("select count(*) from towpath.scheduled") == 0
    assert await db.fetchval("select count(*) from towpath.task") == 0


async def test_on_a_session_bad_input_is_refused(db: Any, migrated_url: str) -> None:
    """P7 P11"""
    await db.execute(ACCOUNT_DDL)
    engine = sa.create_engine(sqlalchemy_url(migrated_url, "psycopg"))
    with Session(engine) as session, session.begin():
        session.add(Account(id="a"))
        for error, text, call in REFUSED.values():
            with pytest.raises(error, match=text):
                call(session)
        emit(session, PageViewed("/"))
    engine.dispose()

    assert await db.fetchval("select id from account") == "a"
    assert await db.fetchval("select count(*) from towpath.outbox") == 1
    assert await db.fetchval("select count(*) from towpath.task") == 0


@pytest.mark.parametrize("target", [None, object(), "session", sa.create_engine("postgresql+psycopg://")])
def test_something_else_than_a_session_or_connection_is_refused(target: Any) -> None:
    """P4"""
    for call in (emit, submit):
        with pytest.raises(
            NoTransaction, match="SQLAlchemy session or connection, or a connection of asyncpg or psycopg 3"
        ):
            call(target, PageViewed("/") if call is emit else Charge("a"))


async def test_what_is_just_within_the_limits_is_stored_as_it_is(db: Any) -> None:
    """P7 P11"""
    key, type_, destination = "ü" * 256, "t" * 200, "d" * 200
    async with db.transaction():
        await emit(db, RawMessage(type_, b"\0\xff", destination, key))
        await emit(db, PageViewed("x" * (1_048_576 - len('{"url":""}'))))
        await submit(db, Charge("a"), owner="ü" * 200, dedupe_key="ü" * 256)
        await emit(db, PageViewed("/"), headers={"n" * 128: b"x" * (16384 - 128)})

    rows = await db.fetch("select * from towpath.outbox order by id")
    assert (rows[0]["key"], rows[0]["type"], rows[0]["destination"]) == (key, type_, destination)
    assert (rows[0]["payload"], rows[0]["content_type"]) == (b"\0\xff", "application/octet-stream")
    assert len(rows[1]["payload"]) == 1_048_576
    assert await db.fetchval("select length(owner) from towpath.task") == 200


async def test_the_limit_of_a_body_can_be_set(db: Any) -> None:
    """P7"""
    small = Outbox(max_payload_bytes=20)
    async with db.transaction():
        with pytest.raises(PayloadTooLarge, match="the limit is 20"):
            await small.emit(db, PageViewed("a long address indeed"))
        await small.emit(db, PageViewed("/"))


async def test_an_empty_and_a_missing_key_are_different(db: Any) -> None:
    """P11"""
    async with db.transaction():
        await emit(db, MeetingSet(""))
        await emit(db, MeetingSet(None))
        await emit(db, MeetingSet("r"), key=None)
        await emit(db, MeetingSet("r"), key="")
        await emit(db, MeetingSet(42))

    rows = await db.fetch("select key from towpath.outbox order by id")
    assert [row["key"] for row in rows] == ["", None, None, "", "42"]
