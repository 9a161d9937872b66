"""What a failed HTTP call means for the message: status and Retry-After, by duck typing.

Source: RFC 9110, sections 10.2.3 (Retry-After) and 15 (status codes).
"""

import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Final

from towpath.failures.model import Verdict

RETRY_AFTER_CAP: Final = timedelta(hours=24)
_RETRIED: Final = frozenset({408, 425, 429})
_CONFIGURATION: Final = frozenset({401, 403})
_SECONDS: Final = re.compile(r"[0-9]+")
_MAX_DIGITS: Final = 9


def status_of(error: BaseException) -> int | None:
    """The 4xx or 5xx status an exception carries, as httpx, requests, aiohttp, botocore, urllib do."""
    response = getattr(error, "response", None)
    candidates: list[object] = [
        getattr(response, "status_code", None),
        getattr(response, "status", None),
        getattr(error, "status_code", None),
        getattr(error, "status", None),
    ]
    if isinstance(response, Mapping):
        metadata = response.get("ResponseMetadata")
        candidates.append(metadata.get("HTTPStatusCode") if isinstance(metadata, Mapping) else None)
    if hasattr(error, "headers") or hasattr(error, "hdrs"):
        candidates.append(getattr(error, "code", None))
    for value in candidates:
        if isinstance(value, int) and not isinstance(value, bool) and 400 <= value <= 599:
            return int(value)
    return None


def by_status(error: BaseException, now: Callable[[], datetime]) -> Verdict | None:
    """The verdict for one exception, or None when it carries no status of a failed call."""
    status = status_of(error)
    if status is None:
        return None
    reason = f"http_{status}"
    if status in _RETRIED or status >= 500:
        return Verdict("retry", reason, retry_after=_retry_after_of(error, now))
    if status in _CONFIGURATION:
        return Verdict("retry", reason, "configuration")
    return Verdict("dead", reason)


def retry_after(value: str | None, *, sent_at: str | None, now: Callable[[], datetime]) -> timedelta | None:
    """The wait a `Retry-After` header asks for, at most `RETRY_AFTER_CAP`; None for garbage.

    A date is measured from the response's own `Date` header where there is one, so that a wrong
    clock on either side does not stretch or swallow the wait.
    """
    text = (value or "").strip()
    if _SECONDS.fullmatch(text):
        digits = text.lstrip("0")
        seconds = int(digits or "0") if len(digits) <= _MAX_DIGITS else 10**_MAX_DIGITS
        return min(timedelta(seconds=seconds), RETRY_AFTER_CAP)
    until = _date(text)
    if until is None:
        return None
    wait = until - (_date((sent_at or "").strip()) or now())
    return min(wait, RETRY_AFTER_CAP) if wait > timedelta(0) else None


def _retry_after_of(error: BaseException, now: Callable[[], datetime]) -> timedelta | None:
    for carrier in (getattr(error, "response", None), error):
        headers = getattr(carrier, "headers", None)
        wait = retry_after(_header(headers, "retry-after"), sent_at=_header(headers, "date"), now=now)
        if wait is not None:
            return wait
    return None


def _header(headers: object, name: str) -> str | None:
    """One header of anything that lists pairs by `items()`, whatever its case rules."""
    if not callable(items := getattr(headers, "items", None)):
        return None
    for key, value in items():
        if isinstance(key, str) and key.lower() == name and isinstance(value, str):
            return value
    return None


def _date(text: str) -> datetime | None:
    if not text or len(text) > 64:
        return None
    try:
        parsed = parsedate_to_datetime(text)
        return (parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)).astimezone(UTC)
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
