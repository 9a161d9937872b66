"""What goes in comes out; whatever else comes in ends in a DecodeError."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import msgspec
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from towpath.brokers.ports import headers_size_bytes
from towpath.errors import DecodeError, InvalidMessage
from towpath.messages import (
    Envelope,
    Headers,
    check_headers,
    decode,
    dump_headers,
    encode,
    load_headers,
    read_envelope,
    source_of,
    wire_headers,
)
from towpath.messages.codecs import canonical_fields, is_json


@dataclass
class Plain:
    id: UUID
    text: str
    count: int
    ratio: float
    at: datetime
    tags: list[str] = field(default_factory=list)
    more: dict[str, Any] = field(default_factory=dict)
    none: str | None = None


class Struct(msgspec.Struct):
    id: UUID
    text: str
    count: int
    ratio: float
    at: datetime
    tags: list[str] = []
    more: dict[str, Any] = {}
    none: str | None = None


class Model(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(populate_by_name=True)

    id: UUID
    text: str = pydantic.Field(alias="theText")
    count: int
    ratio: float
    at: datetime
    tags: list[str] = []
    more: dict[str, Any] = {}
    none: str | None = None


class Blob(bytes):
    pass


SHAPES = [Plain, Struct, Model]

texts = st.text(st.characters(exclude_categories=["Cs"]))
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=10,
)
aware = st.datetimes(min_value=datetime(1900, 1, 1), max_value=datetime(2200, 1, 1), timezones=st.just(UTC))  # noqa: DTZ001
fields = st.fixed_dictionaries(
    {
        "id": st.uuids(),
        "text": texts,
        "count": st.integers(-(2**63), 2**63 - 1),
        "ratio": st.floats(allow_nan=False, allow_infinity=False),
        "at": aware,
        "tags": st.lists(texts, max_size=3),
        "more": st.dictionaries(texts, json_values, max_size=3),
        "none": st.none() | texts,
    }
)


def reason_of(reading: Callable[[], object]) -> str | None:
    """Why it is a DecodeError; None when it is not. Other errors pass."""
    try:
        reading()
    except DecodeError as error:
        return error.reason
    return None


@pytest.mark.parametrize("cls", SHAPES)
@given(values=fields)
def test_a_payload_comes_back_as_it_was(cls: Any, values: dict[str, Any]) -> None:
    payload = cls(**values)

    data, content_type = encode(payload)

    assert json.loads(data)["count"] == values["count"]
    assert decode(cls, data, content_type) == payload


@given(data=st.binary())
def test_bytes_pass_as_they_are(data: bytes) -> None:
    """R17"""
    assert encode(data) == (data, "application/octet-stream")
    assert decode(bytes, data, "application/octet-stream") == data
    assert decode(Blob, data, None) == Blob(data)


@pytest.mark.parametrize("cls", SHAPES)
@given(data=st.binary() | json_values.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_are_a_payload_or_a_decode_error(cls: Any, data: bytes) -> None:
    """X6"""
    assert reason_of(lambda: decode(cls, data, "application/json")) in {None, "not_json", "wrong_shape"}


def nested(levels: int) -> bytes:
    return b'{"more":' + b'{"a":' * levels + b"1" + b"}" * levels + b"}"


HOSTILE: dict[str, bytes] = {
    "nothing": b"",
    "null": b"null",
    "no UTF-8": b'{"text":"\xff"}',
    "a byte order mark": b"\xef\xbb\xbf{}",
    "half a surrogate": b'{"text":"\\ud800"}',
    "NUL bytes": b"\0" * 100,
    "NaN": b'{"ratio":NaN}',
    "infinity": b'{"ratio":1e999}',
    "a huge number": b'{"count":' + b"9" * 100_000 + b"}",
    "a huge exponent": b'{"count":1e1000000000}',
    "deep arrays": b"[" * 100_000,
    "closed deep arrays": b"[" * 100_000 + b"]" * 100_000,
    "deep objects": nested(10_000),
    "deep in an unknown field": b'{"unknown":' + b"[" * 10_000 + b"]" * 10_000 + b"}",
    "ten megabytes": b'{"text":"' + b"x" * 10_000_000 + b'"}',
    "a million fields": b"{" + b",".join(b'"a%d":1' % number for number in range(200_000)) + b"}",
    "a repeated field": b'{"count":1,"count":"two"}',
}


@pytest.mark.parametrize("cls", SHAPES)
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_bytes_end_in_a_decode_error(cls: Any, name: str) -> None:
    """X6"""
    with pytest.raises(DecodeError) as caught:
        decode(cls, HOSTILE[name], "application/json")

    assert caught.value.reason in {"not_json", "wrong_shape"}
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("cls", SHAPES)
def test_the_reason_never_shows_the_payload(cls: Any) -> None:
    """X3"""
    secret = "hunter2-canary"
    for body in (f'{{"count":"{secret}"}}', f'{{"id":"{secret}"}}', f'{{"at":"{secret}"}}', f'"{secret}'):
        with pytest.raises(DecodeError) as caught:
            decode(cls, body.encode(), None)
        assert secret not in str(caught.value)


def test_a_validator_that_breaks_is_a_decode_error() -> None:
    """X6"""

    class Picky(pydantic.BaseModel):
        count: int

        @pydantic.field_validator("count")
        @classmethod
        def check(cls, value: int) -> int:
            return {}[value]  # type: ignore[no-any-return, index]

    with pytest.raises(DecodeError, match="wrong_shape: KeyError"):
        decode(Picky, b'{"count":1}', None)


@pytest.mark.parametrize(
    ("content_type", "expected"),
    [
        (None, True),
        ("application/json", True),
        ("Application/JSON; charset=UTF-8", True),
        ('application/json; charset="utf-8"', True),
        ("application/cloudevents+json", True),
        ("text/json", True),
        ("application/json; charset=utf-16", False),
        ("application/octet-stream", False),
        ("text/plain", False),
        ("", False),
        ("application/avro", False),
    ],
)
def test_json_is_known_by_its_content_type(content_type: str | None, expected: bool) -> None:
    assert is_json(content_type) == expected
    if not expected:
        with pytest.raises(DecodeError, match="unsupported_content_type"):
            decode(Plain, b"{}", content_type)


def test_a_missing_body_is_a_decode_error() -> None:
    with pytest.raises(DecodeError, match="no body"):
        decode(Plain, None, None)


naive = datetime(2026, 1, 1, 12)  # noqa: DTZ001 - the point of it
good: dict[str, Any] = {"id": UUID(int=1), "text": "x", "count": 1, "ratio": 0.5, "at": datetime.now(UTC)}


@pytest.mark.parametrize("cls", SHAPES)
@pytest.mark.parametrize(
    "bad",
    [
        {"at": naive},
        {"at": naive.replace(microsecond=5)},
        {"more": {"deep": [{"at": naive}]}},
        {"more": {"at": (1, naive)}},
        {"ratio": math.nan},
        {"ratio": math.inf},
        {"more": {"a": [-math.inf]}},
    ],
)
def test_what_would_not_come_back_is_refused_with_its_place(cls: Any, bad: dict[str, Any]) -> None:
    payload = cls(**(good | bad))

    with pytest.raises(InvalidMessage, match=rf"\$\.{next(iter(bad))}"):
        encode(payload)


@pytest.mark.parametrize("cls", SHAPES)
def test_text_that_looks_like_a_naive_datetime_is_just_text(cls: Any) -> None:
    payload = cls(**(good | {"text": "2026-01-01T12:00:00", "more": {"a": None, "b": "NaN"}}))

    assert decode(cls, encode(payload)[0], None) == payload


def test_a_payload_that_contains_itself_is_refused() -> None:
    """X6"""
    loop: dict[str, Any] = {}
    loop["self"] = loop
    for cls in SHAPES:
        with pytest.raises(InvalidMessage, match="cannot be encoded"):
            encode(cls(**(good | {"more": loop})))


@given(values=fields, order=st.permutations(["id", "text", "at", "more", "count"]))
def test_equal_fields_have_equal_canonical_bytes(values: dict[str, Any], order: list[str]) -> None:
    """P5"""
    twin = values | {"more": dict(reversed(values["more"].items()))}
    for cls in SHAPES:
        assert canonical_fields(cls(**values), order) == canonical_fields(cls(**twin), sorted(order))
        changed = cls(**(values | {"count": values["count"] ^ 1}))
        assert canonical_fields(cls(**values), ["count"]) != canonical_fields(changed, ["count"])


header_names = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), min_size=1, max_size=40)
foreign_names = st.text(max_size=20)
any_headers = st.lists(st.tuples(foreign_names, st.binary(max_size=40)), max_size=6).map(tuple)


@given(headers=any_headers)
def test_headers_come_back_from_a_row_with_repeats_order_and_bytes(headers: Headers) -> None:
    """R17"""
    text = dump_headers(headers)

    assert "\\u0000" not in json.dumps([value for _, value in json.loads(text)])
    assert load_headers(text) == headers


@given(names=st.lists(st.text(st.characters(min_codepoint=0xD7F0, max_codepoint=0xE010, categories=None))))
def test_any_names_of_headers_can_be_written_to_a_wire(names: list[str]) -> None:
    """X6: Postgres keeps half a surrogate in JSON; a publisher must not end of it."""
    headers = load_headers(json.dumps([[name, "v"] for name in names]))

    assert headers_size_bytes(headers) >= len(names)


@given(text=st.text() | json_values.map(json.dumps))
def test_any_text_is_headers_or_a_decode_error(text: str) -> None:
    """X6"""
    assert reason_of(lambda: load_headers(text)) in {None, "malformed_header"}


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '[["a",{"b64":"?"}]]', '[["a",{"b64":"YQ=="}],["b"]]', "{}", "7"]
)
def test_hostile_rows_are_a_decode_error(text: str) -> None:
    """X6"""
    with pytest.raises(DecodeError, match="malformed_header"):
        load_headers(text)


@given(pairs=st.lists(st.tuples(header_names, st.text() | st.binary()), max_size=5))
def test_callers_headers_are_kept_or_refused(pairs: list[tuple[str, str | bytes]]) -> None:
    try:
        checked = check_headers(pairs)
    except InvalidMessage:
        return
    assert [name for name, _ in checked] == [name for name, _ in pairs]
    assert load_headers(dump_headers(checked)) == checked


envelopes = st.builds(
    Envelope,
    message_id=st.uuids(),
    type=st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=1, max_size=200),
    source=st.builds(source_of, st.uuids().map(str), st.just("orders")),
    occurred_at=aware,
    content_type=st.just("application/json"),
    kind=st.sampled_from(["event", "task", "copy"]),
    body=st.sampled_from(["inline", "row"]),
    sequence=st.none() | st.integers(0, 2**63 - 1),
    installation=st.none() | st.uuids().map(str),
    headers=st.lists(st.tuples(header_names, st.binary(max_size=20)), max_size=4).map(tuple),
)


def is_ours(name: str) -> bool:
    return name.lower().startswith(("ce_", "towpath-")) or name.lower() == "content-type"


@given(envelope=envelopes, shuffled=st.randoms())
def test_an_envelope_comes_back_from_the_wire_in_any_order(envelope: Envelope, shuffled: Any) -> None:
    """R17"""
    headers = list(wire_headers(envelope))
    own = [pair for pair in headers if is_ours(pair[0])]
    rest = [pair for pair in headers if not is_ours(pair[0])]
    shuffled.shuffle(own)

    found = read_envelope((*own, *rest))

    users = tuple(pair for pair in envelope.headers if not is_ours(pair[0]))
    assert found == msgspec.structs.replace(envelope, headers=users)


@given(headers=any_headers)
def test_any_headers_are_an_envelope_or_a_decode_error(headers: Headers) -> None:
    """X6"""
    with pytest.raises(DecodeError):
        read_envelope(headers)


OURS = wire_headers(
    Envelope(
        UUID(int=7), "order.placed", "/towpath/i/orders", datetime.now(UTC), "application/json", sequence=9
    )
)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ce_id", b"7"),
        ("ce_id", b"{00000000-0000-0000-0000-00000000000}"),
        ("ce_id", b"\xff"),
        ("ce_type", b""),
        ("ce_type", b"t" * 201),
        ("ce_type", b"a\nb"),
        ("ce_source", b""),
        ("ce_source", b"s" * 501),
        ("ce_time", b"yesterday"),
        ("ce_time", b"2026-01-01T00:00:00"),
        ("ce_time", b"0001-01-01T00:00:00+23:00"),
        ("content-type", b"\0"),
        ("towpath-kind", b"spam"),
        ("towpath-body", b"elsewhere"),
        ("towpath-sequence", b"-1"),
        ("towpath-sequence", b"9" * 19),
        ("towpath-sequence", b"9" * 5000),
        ("towpath-sequence", "٣".encode()),
    ],
)
def test_a_malformed_header_is_named(name: str, value: bytes) -> None:
    """X6"""
    headers = tuple((known, value if known == name else kept) for known, kept in OURS)

    with pytest.raises(DecodeError, match=f"malformed_header: .*{name}") as caught:
        read_envelope(headers)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("name", ["ce_id", "ce_type", "ce_source", "ce_time", "content-type"])
def test_a_missing_or_repeated_header_is_named(name: str) -> None:
    """X6"""
    with pytest.raises(DecodeError, match=f"missing_header: {name}"):
        read_envelope(tuple(pair for pair in OURS if pair[0] != name))
    with pytest.raises(DecodeError, match=f"malformed_header: '{name}' is repeated"):
        read_envelope((*OURS, (name.upper(), b"x")))


def test_a_cloudevent_of_another_producer_is_an_inline_event() -> None:
    headers: Headers = (
        ("ce_specversion", b"1.0"),
        ("ce_id", b"00000000-0000-0000-0000-000000000001"),
        ("ce_source", b"https://example.org/shop"),
        ("ce_type", b"org.example.order"),
        ("ce_time", b"2026-01-01T12:00:00.123456789+02:00"),
        ("ce_subject", b"order 7"),
        ("content-type", b"application/json"),
        ("x-own", b"\xff"),
    )

    found = read_envelope(headers)

    assert (found.kind, found.body, found.sequence, found.installation) == ("event", "inline", None, None)
    assert found.occurred_at == datetime(2026, 1, 1, 10, 0, 0, 123456, UTC)
    assert found.headers == (("x-own", b"\xff"),)


def test_ten_thousand_headers_are_read_quickly() -> None:
    """X6"""
    bomb = (*OURS, *((f"h{number}", b"x") for number in range(10_000)))

    assert len(read_envelope(bomb).headers) == 10_000


def test_the_time_on_the_wire_is_utc() -> None:
    from datetime import timezone

    east = datetime(2026, 1, 1, 2, tzinfo=timezone(timedelta(hours=2)))
    headers = dict(wire_headers(Envelope(UUID(int=1), "t", "/s", east, "c")))

    assert headers["ce_time"] == b"2026-01-01T00:00:00Z"
