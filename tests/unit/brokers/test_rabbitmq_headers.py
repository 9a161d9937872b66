"""Headers survive the AMQP table, through the encoder and decoder that go on the wire."""

import itertools

from hypothesis import given
from hypothesis import strategies as st
from pamqp import decode, encode

from towpath.brokers.ports import BrokerDeath, Headers
from towpath.brokers.rabbitmq.headers import (
    LIST,
    decode_death,
    decode_headers,
    encode_headers,
    encoded_size_bytes,
    without_death,
)

NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=60) | st.sampled_from(
    ["ce_id", "towpath-key", "towpath-headers", "towpath-null", "x" * 200, "a", "a"]
)
PAIRS = st.tuples(NAMES, st.binary(max_size=40))
HEADERS: st.SearchStrategy[Headers] = st.lists(PAIRS, max_size=8).map(tuple)


def _over_the_wire(table: dict[str, object]) -> dict[str, object]:
    _, received = decode.field_table(encode.field_table(table))  # type: ignore[arg-type]
    return dict(received)


@given(HEADERS, st.none() | st.text(), st.booleans())
def test_headers_key_and_null_survive_unchanged(headers: Headers, key: str | None, is_null: bool) -> None:
    """R17: repeats in order; without repeats the order is the table's."""
    encodable_key = key if key is None else key.encode("utf-8", "replace").decode()
    table = _over_the_wire(encode_headers(headers, key=encodable_key, is_null=is_null))
    received, received_key, received_null = decode_headers(table)
    assert (received_key, received_null) == (encodable_key, is_null)
    if LIST in table:
        assert received == headers
    else:
        assert sorted(received) == sorted(headers)


@given(HEADERS, st.none() | st.text(st.characters(codec="utf-8")))
def test_the_size_estimate_is_never_too_small(headers: Headers, key: str | None) -> None:
    """R25: what passes the check fits into the frame."""
    encoded = encode.field_table(encode_headers(headers, key=key, is_null=True))
    assert len(encoded) <= encoded_size_bytes(headers, key)


def test_headers_of_other_clients_become_bytes() -> None:
    """Whatever a table can hold."""
    table = _over_the_wire(
        {
            "flag": True,
            "nothing": None,
            "x-death": [{"count": 1, "reason": "rejected"}],
            "ratio": 0.5,
        }
    )
    headers, key, is_null = decode_headers(table)
    values = dict(headers)
    assert values["flag"] == b"true"
    assert values["nothing"] == b""
    assert values["x-death"] == b'[{"count": 1, "reason": "rejected"}]'
    assert values["ratio"] == b"0.5"
    assert (key, is_null) == (None, False)
    assert decode_headers(None) == ((), None, False)


def test_what_others_add_is_kept_beside_a_list() -> None:
    table = encode_headers((("b", b"1"), ("a", b"2"), ("b", b"3")), key=None, is_null=False)
    headers, _, _ = decode_headers({**table, "shovelled": "yes"})
    assert headers == (("b", b"1"), ("a", b"2"), ("b", b"3"), ("shovelled", b"yes"))


def test_a_redelivery_has_the_headers_of_the_message() -> None:
    """C11, D6: the broker's counters would give bytes without an id another name each time."""
    table = encode_headers((("a", b"1"),), key=None, is_null=False)
    assert decode_headers({**table, "x-delivery-count": 1}) == decode_headers(table)


def test_a_death_is_read_whatever_a_stranger_wrote() -> None:
    """D6, X6."""
    told = [{"reason": "expired", "queue": "q.0", "count": 2}, {"reason": "rejected", "queue": "q.1"}]
    assert decode_death({"x-death": told}) == BrokerDeath("expired", "q.0", 2)
    unknown = BrokerDeath("unknown", None, 1)
    for junk in (None, 1, "x", [], [1], [{}], [{"reason": ["expired"], "queue": 3, "count": "many"}]):
        assert decode_death({"x-death": junk}) == unknown
    assert decode_death(None) == unknown


def test_a_dead_message_keeps_its_own_headers() -> None:
    headers = (("a", b"1"), ("x-death", b"[]"), ("x-first-death-queue", b"q"), ("x-deathly", b"2"))
    assert without_death(headers) == (("a", b"1"), ("x-deathly", b"2"))


def test_malformed_lists_never_fail() -> None:
    """X6: a stranger may write anything under our names."""
    for junk in itertools.chain([1, "x", None, {}], ([1], ["a"], ["a", {}], [b"\xff", 1])):
        decode_headers({LIST: junk, "towpath-key": junk, "towpath-null": junk})
