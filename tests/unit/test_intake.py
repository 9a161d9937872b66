"""From a delivery to a unit of work, whatever is in it."""

import json
from datetime import UTC, datetime
from typing import Any
from uuid import UUID, uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from towpath.app import App
from towpath.brokers.ports import Delivery, Headers
from towpath.consumer.intake import Undecodable, lane_of, origin_of, read
from towpath.messages import Envelope, wire_headers
from towpath.store.work import Work

NOW = datetime(2026, 1, 2, tzinfo=UTC)
ID = UUID("01890a5d-ac96-774b-bcce-b302099a8057")


def delivery(headers: Headers = (), value: bytes | None = b"{}", **changes: Any) -> Delivery:
    options: dict[str, Any] = {
        "source": "parcels",
        "partition": "parcels:3",
        "offset": 42,
        "key": "a",
        "headers": headers,
        "value": value,
        "timestamp": NOW,
        "is_redelivered": False,
        "epoch": 1,
    }
    return Delivery(**(options | changes))


def wire(**changes: Any) -> Headers:
    options: dict[str, Any] = {
        "message_id": ID,
        "type": "parcel.posted",
        "source": "/s",
        "occurred_at": NOW,
        "content_type": "application/json",
    }
    return wire_headers(Envelope(**(options | changes)))


def work_of(app: App, given_: Delivery) -> Work:
    work = read(app, given_, NOW)
    assert isinstance(work, Work)
    return work


def undecodable(app: App, given_: Delivery) -> Undecodable:
    asked = read(app, given_, NOW)
    assert isinstance(asked, Undecodable)
    return asked


def test_an_event_brings_its_body_and_all_its_headers() -> None:
    headers = wire(sequence=7, headers=(("traceparent", b"00-1-2-01"), ("tenant", b"\xff")))
    work = work_of(App("depot"), delivery(headers))
    assert (work.id, work.type, work.kind, work.source) == (ID, "parcel.posted", "event", "parcels")
    assert (work.key, work.lane, work.position) == ("a", "a", 7)
    assert (work.payload, work.content_type, work.headers) == (b"{}", "application/json", headers)
    assert (work.trace, work.has_body) == ("00-1-2-01", True)


def test_a_submitted_task_has_its_body_in_its_row() -> None:
    headers = wire(kind="task", body="row", headers=(("tenant", b"1"),))
    work = work_of(App("depot"), delivery(headers, None))
    assert (work.kind, work.has_body, work.headers) == ("task", False, (("tenant", b"1"),))


def test_a_message_without_sequence_is_placed_by_its_offset() -> None:
    assert work_of(App("depot"), delivery(wire())).position == 42


@pytest.mark.parametrize(
    ("ordering", "key", "lane"),
    [
        ("key", "a", "a"),
        ("key", "", ""),
        ("key", None, None),
        ("partition", "a", "parcels:3"),
        ("partition", None, "parcels:3"),
        ("none", "a", None),
    ],
)
def test_the_ordering_chooses_the_lane(ordering: Any, key: str | None, lane: str | None) -> None:
    """C10: the empty key is a key."""
    app = App("depot", ordering=ordering)
    assert work_of(app, delivery(wire(), key=key)).lane == lane
    assert lane_of(app, key, "parcels:3") == lane


def test_a_key_beyond_the_limit_is_hashed_and_stays_distinct() -> None:
    """P11."""
    app = App("depot")
    keys = [work_of(app, delivery(wire(), key=key)).key for key in ("ä" * 256, "ä" * 257, "ä" * 258)]
    assert keys[0] == "ä" * 256
    assert all(key is not None and key.startswith("sha256:") and len(key) == 71 for key in keys[1:])
    assert keys[1] != keys[2]
    assert keys[1] == work_of(app, delivery(wire(), key="ä" * 257)).lane


@pytest.mark.parametrize("key", ["a\0b", "\0", "\ud800", "a\udcffb"])
def test_a_key_that_postgres_cannot_store_is_written_out(key: str) -> None:
    """X6."""
    work = work_of(App("depot"), delivery(wire(), key=key))
    assert work.key is not None
    assert "\0" not in work.key
    work.key.encode()
    assert work.key != work_of(App("depot"), delivery(wire(), key="ab")).key


@pytest.mark.parametrize(
    ("headers", "reason"),
    [
        ((), "missing_header"),
        ((("ce_id", b"\xff"),), "malformed_header"),
        (wire() + (("ce_id", b"again"),), "malformed_header"),
        (tuple(h for h in wire() if h[0] != "ce_type"), "missing_header"),
        (tuple((n, b"x\0y" if n == "ce_type" else v) for n, v in wire()), "malformed_header"),
    ],
)
def test_a_message_without_a_usable_envelope_keeps_its_bytes_for_the_catalog(
    headers: Headers, reason: str
) -> None:
    """C11."""
    asked = undecodable(App("depot"), delivery(headers, b"\0\xff"))
    assert (asked.error.reason, asked.work.type, asked.work.lane) == (reason, "undecodable", None)
    assert (asked.work.payload, asked.work.headers, asked.work.key) == (b"\0\xff", headers, "a")


def test_an_undecodable_messages_id_is_that_of_its_record() -> None:
    """C11, C24: a repeat is the same dead letter, a record of a topic made again is not."""
    app = App("depot")
    here = delivery((), coordinates="parcels:3:42:1000")
    again = delivery((), value=b"other", coordinates="parcels:3:42:1000", epoch=2)
    later = delivery((), coordinates="parcels:3:42:2000")
    assert undecodable(app, here).work.id == undecodable(app, again).work.id
    assert undecodable(app, here).work.id != undecodable(app, later).work.id


def test_without_coordinates_it_is_that_of_its_bytes() -> None:
    """C11: as on RabbitMQ, where a redelivery has another tag."""
    app = App("depot")
    ids = [
        undecodable(app, delivery(headers, value, offset=offset)).work.id
        for headers, value, offset in [
            ((), b"x", 1),
            ((), b"x", 2),
            ((("a", b"x"),), b"", 3),
            ((), b"y", 4),
            ((), None, 5),
        ]
    ]
    assert ids[0] == ids[1]
    assert len(set(ids)) == 4


def test_a_foreign_message_is_named_by_its_record() -> None:
    """C24."""
    app = App("depot")
    app.foreign("parcels", type="parcel.scanned", content_type="text/csv")
    one = work_of(app, delivery((("x", b"1"),), coordinates="parcels:3:42:1000"))
    same = work_of(app, delivery((("x", b"1"),), coordinates="parcels:3:42:1000"))
    other = work_of(app, delivery((("x", b"1"),), coordinates="parcels:3:42:2000"))
    assert (one.type, one.kind, one.content_type, one.position) == ("parcel.scanned", "event", "text/csv", 42)
    assert one.id == same.id != other.id
    assert one.envelope is not None
    assert (one.envelope.source, one.envelope.occurred_at) == ("/foreign/parcels", NOW)


def test_a_foreign_message_may_derive_type_and_id_from_what_it_holds() -> None:
    app, own = App("depot"), uuid4()
    app.foreign(
        "parcels",
        type=lambda each: json.loads(each.value or b"")["type"],
        id=lambda each: own if each.key == "u" else json.loads(each.value or b"")["id"],
    )
    value = b'{"type": "t1", "id": "4711"}'
    one, two = (work_of(app, delivery((), value, key=key)) for key in ("a", "b"))
    assert one.type == "t1"
    assert one.id == two.id, "the same id of the same source is the same message"
    assert work_of(app, delivery((), value, key="u")).id == own
    app.foreign("letters", type="t1", id=lambda _: "4711")
    assert work_of(app, delivery((), value, source="letters")).id != one.id


def test_our_own_messages_on_a_foreign_destination_stay_ours() -> None:
    app = App("depot")
    app.foreign("parcels", type="parcel.scanned")
    assert work_of(app, delivery(wire())).id == ID


@pytest.mark.parametrize("type_", [None, "", 7, "x" * 201, "a\0b", "a b", "\ud800"])
def test_a_foreign_type_outside_the_limits_reaches_the_catalog(type_: Any) -> None:
    """X6, P11: it would kill the worker when it is claimed."""
    app = App("depot")
    app.foreign("parcels", type=lambda _: type_)
    assert undecodable(app, delivery(coordinates="c")).error.reason == "foreign_rule"


@pytest.mark.parametrize("id_", ["\ud800", "a\udcffb"])
def test_a_foreign_id_that_is_no_text_reaches_the_catalog(id_: str) -> None:
    """X6."""
    app = App("depot")
    app.foreign("parcels", type="t", id=lambda _: id_)
    assert undecodable(app, delivery()).error.reason == "foreign_rule"


def test_a_rule_that_raises_is_the_messages_fault() -> None:
    app = App("depot")
    app.foreign("parcels", type=lambda each: json.loads(each.value or b"")["type"])
    asked = undecodable(app, delivery((), b"not json"))
    assert asked.error.reason == "foreign_rule"
    assert "JSONDecodeError" in str(asked.error)


def test_where_the_broker_has_no_name_for_a_record_the_group_must_say_one() -> None:
    app = App("depot")
    app.foreign("parcels", type="t")
    assert undecodable(app, delivery()).error.reason == "no_message_id"


def test_the_trace_is_stored_as_text_whatever_the_header_says() -> None:
    """X6."""
    work = work_of(App("depot"), delivery(wire(headers=(("traceparent", b"\0\xff" + b"x" * 500),))))
    assert work.trace is not None
    assert len(work.trace) <= 100
    assert "\0" not in work.trace


def test_the_origin_is_json_for_the_catalog() -> None:
    assert json.loads(origin_of(delivery()) or "") == {"partition": "parcels:3", "offset": 42}
    assert origin_of(None) is None


NAMES = st.one_of(
    st.sampled_from(["ce_id", "ce_type", "ce_time", "ce_source", "towpath-sequence", "towpath-body"]),
    st.text(max_size=8),
)


@given(
    headers=st.lists(st.tuples(NAMES, st.binary(max_size=40)), max_size=6),
    keep=st.sets(st.integers(0, 9)),
    value=st.none() | st.binary(max_size=20),
    key=st.none() | st.text(max_size=600),
    foreign=st.sampled_from(["none", "plain", "type", "id"]),
    found=st.one_of(st.none(), st.text(), st.binary(), st.integers()),
)
def test_no_delivery_whatever_raises(
    headers: list[tuple[str, bytes]],
    keep: set[int],
    value: bytes | None,
    key: str | None,
    foreign: str,
    found: Any,
) -> None:
    """X6: neither a work without id, nor text that Postgres refuses."""
    app = App("depot")
    if foreign != "none":
        app.foreign(
            "parcels",
            type=(lambda _: found) if foreign == "type" else "t",
            id=(lambda _: found) if foreign == "id" else None,
        )
    own = [pair for index, pair in enumerate(wire()) if index in keep]
    asked = read(app, delivery(tuple(own + headers), value, key=key), NOW)
    work = asked.work if isinstance(asked, Undecodable) else asked
    assert isinstance(work.id, UUID)
    for text in (work.type, work.key, work.lane, work.content_type, work.trace):
        assert text is None or b"\0" not in text.encode()
    assert work.key is None or len(work.key.encode()) <= 512
    assert 1 <= len(work.type) <= 200
    assert work.position is None or -(2**63) <= work.position < 2**63
