"""What others say about a failure: headers, states, texts. It is understood as written, or left out."""

import re
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

from hypothesis import example, given
from hypothesis import strategies as st

from towpath.failures.http import RETRY_AFTER_CAP, retry_after
from towpath.failures.sqlstate import by_sqlstate, sqlstate_of
from towpath.failures.text import MASK, redact

NOW = datetime(2026, 1, 31, 9, tzinfo=UTC)
MOMENTS = st.datetimes(min_value=datetime(1990, 1, 1), max_value=datetime(2060, 1, 1)).map(  # noqa: DTZ001
    lambda moment: moment.replace(microsecond=0, tzinfo=UTC)
)
ANY_TEXT = st.text(st.characters(categories=None), max_size=80)
SPACES = st.sampled_from(["", " ", "  ", "\t"])


def _never() -> datetime:
    raise AssertionError("the response's own clock counts")


@given(sent=MOMENTS, seconds=st.integers(1, 2 * 86_400), before=SPACES, after=SPACES)
def test_a_date_is_measured_from_the_responses_own_in_each_form_of_the_standard(
    sent: datetime, seconds: int, before: str, after: str
) -> None:
    """C12; RFC 9110, section 5.6.7: an HTTP date, as RFC 850 had it, and as asctime writes it."""
    until = sent + timedelta(seconds=seconds)
    expected = min(timedelta(seconds=seconds), RETRY_AFTER_CAP)
    forms = [format_datetime(until, usegmt=True), until.strftime("%a %b %d %H:%M:%S %Y")]
    if 1970 <= until.year < 2060:
        forms.append(until.strftime("%A, %d-%b-%y %H:%M:%S GMT"))
    for form in forms:
        found = retry_after(before + form + after, sent_at=format_datetime(sent, usegmt=True), now=_never)
        assert found == expected, form


@given(value=ANY_TEXT | st.from_regex(r"[0-9]{1,40}", fullmatch=True), sent_at=st.none() | ANY_TEXT)
@example("9" * 5000, None)
@example("Fri, 31 Feb 2026 09:00:00 GMT", None)
@example("Fri, 31 Dec 9999 23:59:59 -9999", None)
@example("٣", None)
def test_a_wait_is_asked_for_in_digits_or_by_a_date(value: str, sent_at: str | None) -> None:
    """C12"""
    found = retry_after(value, sent_at=sent_at, now=lambda: NOW)
    if found is not None:
        assert timedelta(0) <= found <= RETRY_AFTER_CAP
        assert re.search("[0-9]", value)
    if re.fullmatch("[0-9]+", value):
        assert (
            found == min(timedelta(seconds=min(int(value[-4000:]), 10**6)), RETRY_AFTER_CAP)
            or len(value) > 4000
        )


class _Error(Exception):
    def __init__(self, state: object) -> None:
        self.sqlstate = state


@given(state=st.from_regex(r"[0-9A-Z]{5}", fullmatch=True))
@example("40001")
@example("57014")
@example("25006")
@example("28P01")
@example("P0001")
def test_every_state_has_a_verdict_of_its_class(state: str) -> None:
    """C14, C22: what is nobody's fault spends nothing, and only a hopeless class kills."""
    verdict = by_sqlstate(_Error(state))
    assert verdict is not None
    assert verdict.reason_code == f"sqlstate_{state.lower()}"
    assert (verdict.kind == "dead") <= state.startswith(("22", "23", "42"))
    if state.startswith(("08", "53", "58")):
        assert (verdict.kind, verdict.scope) == ("retry", "infrastructure")
    assert not (verdict.is_free and verdict.max_attempts)


@given(state=st.none() | st.integers() | ANY_TEXT | st.binary(max_size=5))
def test_what_is_no_state_is_none(state: object) -> None:
    found = sqlstate_of(_Error(state))
    is_state = isinstance(state, str) and re.fullmatch("[0-9A-Z]{5}", state) is not None
    assert found == (state if is_state else None)


SECRETS = st.sampled_from(
    [
        "postgresql://u:hunter2@h/d",
        "amqp://u:hunter2/x@h",
        "password=hunter2",
        "Authorization: Bearer hunter2.abc",
        '"api_key": "hunter2 with spaces"',
        "token => hunter2",
        "sk-live-hunter2hunter2hunter2",
    ]
)
PIECES = st.one_of(
    SECRETS, ANY_TEXT, st.sampled_from(["://", "@", '"', "password", "=", "\n", "…", MASK, MASK[:5]])
)


@given(
    pieces=st.lists(PIECES, max_size=8), repeat=st.sampled_from([1, 1, 1, 300]), limit=st.integers(1, 1000)
)
def test_a_text_of_any_length_is_cut_clean(pieces: list[str], repeat: int, limit: int) -> None:
    """X3: never longer than its limit, also when it is cleaned again, and storable."""
    text = " ".join(pieces) * repeat
    found = redact(text, limit=limit)
    assert len(found) <= limit
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]", found)
    assert len(redact(found, limit=limit)) <= limit


@given(before=st.lists(ANY_TEXT, max_size=2), secret=SECRETS, after=st.lists(ANY_TEXT, max_size=2))
def test_no_neighbour_brings_a_secret_to_light(before: list[str], secret: str, after: list[str]) -> None:
    """X3"""
    assert "hunter2" not in redact("\n".join([*before, secret, *after]))
