"""What a command line says is what was meant, or a usage error: never something near it."""

from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from towpath.cli.option_groups import DeadLetters
from towpath.cli.options import instant, message_id, reference, text
from towpath.errors import UsageError

NOW = datetime(2026, 1, 31, 9, tzinfo=UTC)
FIRST, LAST = datetime(1, 1, 2), datetime(9999, 12, 30)  # noqa: DTZ001 - hypothesis adds the zone
ANY_TEXT = st.text(st.characters(categories=None), max_size=60)
DIGITS = st.text("0123456789", min_size=1, max_size=40)
"""Thirty-two of them are a message id too."""


@given(number=st.integers(1, 2**63 - 1))
def test_a_catalog_id_is_itself(number: int) -> None:
    assert reference(str(number)) == number


@given(id_=st.uuids(version=None) | st.integers(0, 10**19).map(lambda low: UUID(f"{low:032d}")))
def test_a_message_id_is_itself_however_it_is_written(id_: UUID) -> None:
    """Also one of digits alone, which without hyphens looks like a number."""
    for written in (str(id_), id_.hex, str(id_).upper(), f"urn:uuid:{id_}"):
        assert reference(written) == message_id(written) == id_


@given(value=DIGITS)
@example("0" * 12 + "1" * 20)
@example("0" * 20 + "1234")
@example(str(2**63))
def test_digits_are_the_number_they_say_or_a_message_id_or_refused(value: str) -> None:
    """A catalog id is never cut short: it would be another dead letter's."""
    try:
        found = reference(value)
    except UsageError:
        assert len(value) != 32
        return
    assert found == (UUID(value) if len(value) == 32 else int(value))


@given(value=ANY_TEXT)
@example("²")
@example("٣")
@example("\ud800")
@example("{00000000-0000-0000-0000-00000000000}")
def test_any_text_is_an_id_or_a_usage_error_of_one_line(value: str) -> None:
    """X2"""
    try:
        found = reference(value)
    except UsageError as error:
        complaint = str(error)
    else:
        assert isinstance(found, UUID) or 0 < found < 2**63
        return
    assert len(complaint.splitlines()) == 1


@given(value=st.datetimes(min_value=FIRST, max_value=LAST, timezones=st.timezones()))
def test_an_instant_is_itself(value: datetime) -> None:
    written = value.isoformat()
    assert instant(written, "--since", NOW) == datetime.fromisoformat(written)


@given(seconds=st.integers(1, 10**8), unit=st.sampled_from(["s", "m", "h"]))
def test_a_duration_is_so_long_ago(seconds: int, unit: str) -> None:
    size = {"s": 1, "m": 60, "h": 3600}[unit]
    count = seconds // size
    assert instant(f"{count}{unit}", "--since", NOW) == NOW - timedelta(seconds=count * size)


@given(value=ANY_TEXT | st.builds(str.__add__, DIGITS, st.sampled_from(["s", "d", "h", "Z", "W", "T"])))
@example("99999999999999d")
@example("0001-01-01T00:00+23:59")
@example("٣h")
@example("2026-01-31")
@example("\ud800h")
def test_any_text_is_an_aware_instant_or_a_usage_error(value: str) -> None:
    """X2"""
    try:
        found = instant(value, "--since", NOW)
    except UsageError as error:
        complaint = str(error)
    else:
        assert found is not None
        assert found.tzinfo is UTC
        return
    assert "--since" in complaint


@given(value=ANY_TEXT, limit=st.integers(0, 100))
def test_text_is_passed_on_unchanged_or_refused(value: str, limit: int) -> None:
    """X2: what Postgres takes as text, and no more of it than is said."""
    try:
        assert text(value, "--key", limit) == value
    except UsageError:
        is_utf8 = not any(0xD800 <= ord(character) < 0xE000 for character in value)
        assert not is_utf8 or "\0" in value or len(value.encode()) > limit
        return
    assert len(value.encode()) <= limit


@given(ids=st.lists(DIGITS | st.uuids().map(str), max_size=5), keys=st.lists(ANY_TEXT, max_size=3))
def test_a_filter_loses_nothing_of_what_was_asked(ids: list[str], keys: list[str]) -> None:
    """Fewer conditions would select more dead letters than were meant."""
    try:
        found = DeadLetters(id=ids, key=keys).at(NOW)
    except UsageError:
        return
    assert len(found.ids) + len(found.message_ids) == len(ids)
    assert found.keys == tuple(keys)


@pytest.mark.parametrize("value", ["0", "-1", "1_000", "+5", " 7", "7 ", "1e3", "0x10"])
def test_a_number_is_written_plainly(value: str) -> None:
    with pytest.raises(UsageError):
        reference(value)
