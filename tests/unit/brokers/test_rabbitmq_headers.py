"""Headers survive the AMQP table, through the encoder and decoder that go on the wire."""

import itertools

from hypothesis import given
from hypothesis import strategies as st
from pamqp import decode, encode

from towpath.brokers.ports import BrokerDeath, Headers
from towpath.brokers.rabbitmq.headers import (
    LIST,
    TableEncoder,
    decode_death,
    decode_headers,
    without_death,
)

NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=60) | st.sampled_from(
    ["ce_id", "towpath-key", "towpath-headers", "towpath-null", "x" * 200, "a", "a"]
)
PAIRS = st.tuples(NAMES, st.binary(max_size=40))
HEADERS: st.SearchStrategy[Headers] = st.lists(PAIRS, max_size=8).map(tuple)


def _decoded(table: bytes) -> dict[str, object]:
    length, received = decode.field_table(table)
    assert length == len(table)
    return dict(received)


@given(
    st.lists(st.tuples(HEADERS, st.none() | st.text(st.characters(codec="utf-8")), st.booleans()), max_size=6)
)
def test_headers_key_and_null_survive_unchanged(messages: list[tuple[Headers, str | None, bool]]) -> None:
    """R17: repeats in order, whatever the messages before had under the same names."""
    encoder = TableEncoder()
    for headers, key, is_null in messages:
        table = _decoded(encoder.encode(headers, key=key, is_null=is_null))
        assert decode_headers(table) == (headers, key, is_null)


def test_a_name_that_a_table_cannot_hold_is_in_the_list_alone() -> None:
    """R17: other clients find the rest under its own name."""
    headers = (("towpath-key", b"mine"), ("x" * 129, b"long"), ("a", b"1"), ("a", b"2"))
    table = _decoded(TableEncoder().encode(headers, key="k", is_null=False))
    assert set(table) == {"a", LIST, "towpath-key"}
    assert (table["a"], table["towpath-key"]) == ("1", "k")


def test_names_from_unbounded_input_do_not_fill_the_memory() -> None:
    """R11."""
    encoder = TableEncoder()
    for number in range(2500):
        encoder.encode(((f"name-{number}", b"x"),), key=None, is_null=False)
    assert len(encoder._fields) <= 1000


def test_headers_of_other_clients_become_bytes() -> None:
    """Whatever a table can hold."""
    table = _decoded(
        encode.field_table(
            {
                "flag": True,
                "nothing": None,
                "x-death": [{"count": 1, "reason": "rejected"}],
                "ratio": 0.5,
            }
        )
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
    table = _decoded(TableEncoder().encode((("b", b"1"), ("a", b"2"), ("b", b"3")), key=None, is_null=False))
    headers, _, _ = decode_headers({**table, "shovelled": "yes"})
    assert headers == (("b", b"1"), ("a", b"2"), ("b", b"3"), ("shovelled", b"yes"))


def test_a_redelivery_has_the_headers_of_the_message() -> None:
    """C11, D6: the broker's counters would give bytes without an id another name each time."""
    table = _decoded(TableEncoder().encode((("a", b"1"),), key=None, is_null=False))
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
