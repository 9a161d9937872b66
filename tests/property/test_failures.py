"""Whatever is raised, the verdict can be stored and acted upon."""

import re
from datetime import UTC, datetime, timedelta
from uuid import UUID

from hypothesis import given
from hypothesis import strategies as st

from towpath.failures import Classifier, describe, fingerprint, redact
from towpath.failures.http import RETRY_AFTER_CAP, retry_after
from towpath.failures.model import reason_from
from towpath.outcomes import Dead, Reject, Retry, Snooze

ANY_TEXT = st.text(st.characters(codec=None, exclude_categories=()), max_size=3000)
NOW = datetime(2026, 1, 1, tzinfo=UTC)


class Sql(Exception):
    def __init__(self, text: str, sqlstate: object) -> None:
        super().__init__(text)
        self.sqlstate = sqlstate


class Http(Exception):
    def __init__(self, text: str, status: object, headers: object) -> None:
        super().__init__(text)
        self.status = status
        self.headers = headers


LEAVES = st.one_of(
    st.builds(
        lambda cls, text: cls(text),
        st.sampled_from([ValueError, TypeError, OSError, TimeoutError, KeyError, RuntimeError]),
        ANY_TEXT,
    ),
    st.builds(Sql, ANY_TEXT, st.one_of(st.none(), st.from_regex(r"[0-9A-Z]{5}", fullmatch=True), ANY_TEXT)),
    st.builds(
        Http,
        ANY_TEXT,
        st.one_of(st.integers(), st.none(), ANY_TEXT),
        st.one_of(st.none(), st.dictionaries(st.just("Retry-After"), ANY_TEXT), ANY_TEXT),
    ),
    st.builds(lambda: Snooze("5m")),
    st.builds(Dead, st.just("hopeless"), ANY_TEXT),
)


def _grouped(errors: list[BaseException]) -> BaseException:
    return BaseExceptionGroup("group", errors)


def _chained(error: BaseException, cause: BaseException) -> BaseException:
    if error is not cause:
        error.__cause__ = cause
    return error


ERRORS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.builds(_grouped, st.lists(inner, min_size=1, max_size=4)), st.builds(_chained, inner, inner)
    ),
    max_leaves=8,
)
RULES = st.dictionaries(
    st.sampled_from([ValueError, Exception, OSError, Sql, KeyError]),
    st.sampled_from([Retry, Dead, Reject("no"), Snooze("1m"), Retry("again", after="3s")]),
)


@given(error=ERRORS, rules=RULES)
def test_every_exception_gets_a_storable_verdict(error: BaseException, rules: dict[type, object]) -> None:
    """C17, X6"""
    failure = Classifier(rules, now=lambda: NOW).classify(error)  # type: ignore[arg-type]
    assert failure.kind in {"retry", "reject", "dead", "snooze"}
    assert re.fullmatch(r"[\x21-\x7e]{1,64}", failure.reason_code)
    assert re.fullmatch(r"[0-9a-f]{16}", failure.fingerprint)
    assert len(failure.error_message) <= 1000
    assert 1 <= len(failure.error_class) <= 200
    for text in (failure.error_message, failure.error_class):
        assert "\0" not in text
        text.encode()
    if failure.retry_after is not None:
        assert timedelta(0) <= failure.retry_after <= RETRY_AFTER_CAP
    assert not (failure.kind in {"dead", "reject"} and (failure.is_free or failure.in_place))


@given(error=ERRORS)
def test_the_same_exception_gets_the_same_verdict_again(error: BaseException) -> None:
    classifier = Classifier(now=lambda: NOW)
    assert classifier.classify(error) == classifier.classify(error)


@given(value=ANY_TEXT, sent_at=st.one_of(st.none(), ANY_TEXT))
def test_any_retry_after_is_ignored_or_within_bounds(value: str, sent_at: str | None) -> None:
    wait = retry_after(value, sent_at=sent_at, now=lambda: NOW)
    assert wait is None or timedelta(0) <= wait <= RETRY_AFTER_CAP


@given(seconds=st.integers(min_value=1, max_value=10**6))
def test_both_forms_of_retry_after_mean_the_same(seconds: int) -> None:
    date = (NOW + timedelta(seconds=seconds)).strftime("%a, %d %b %Y %H:%M:%S GMT")
    expected = min(timedelta(seconds=seconds), RETRY_AFTER_CAP)
    assert retry_after(str(seconds), sent_at=None, now=lambda: NOW) == expected
    assert retry_after(date, sent_at=None, now=lambda: NOW) == expected
    sent_at = NOW.strftime("%a, %d %b %Y %H:%M:%S GMT")
    assert retry_after(date, sent_at=sent_at, now=lambda: NOW + timedelta(days=99)) == expected


@given(text=ANY_TEXT)
def test_redacting_twice_changes_nothing_more_and_the_text_stays_storable(text: str) -> None:
    once = redact(text)
    assert "\0" not in once
    once.encode()
    assert len(once) <= 1000
    assert len(once) == 1000 or redact(once) == once


@given(
    user=st.from_regex(r"[a-z]{1,8}", fullmatch=True),
    password=st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=8, max_size=40),
)
def test_a_password_in_a_url_never_survives(user: str, password: str) -> None:
    """X3"""
    shown = redact(f"cannot reach postgresql://{user}:{password}@db.example:5432/app?sslmode=require")
    assert shown == "cannot reach postgresql://[redacted]@db.example:5432/app?sslmode=require"


@given(
    first=st.tuples(st.integers(0, 10**18), st.uuids(), st.binary(min_size=8, max_size=20)),
    second=st.tuples(st.integers(0, 10**18), st.uuids(), st.binary(min_size=8, max_size=20)),
)
def test_ids_numbers_and_digests_do_not_change_the_fingerprint(
    first: tuple[int, UUID, bytes], second: tuple[int, UUID, bytes]
) -> None:
    def fault(values: tuple[int, UUID, bytes]) -> str:
        number, identifier, digest = values
        return fingerprint(
            ValueError(f"row {number} of order-{number} ({identifier}, {digest.hex()}) is gone")
        )

    assert fault(first) == fault(second)


@given(name=ANY_TEXT)
def test_a_reason_code_from_any_class_name_is_short_ascii(name: str) -> None:
    assert re.fullmatch(r"[a-z0-9._-]{1,64}", reason_from(name))


@given(text=ANY_TEXT)
def test_describing_is_pure(text: str) -> None:
    error = RuntimeError(text)
    assert describe(error) == describe(error)
