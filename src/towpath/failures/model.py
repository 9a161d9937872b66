"""What the classifier says about one exception."""

import re
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, Literal, TypeAlias

from towpath.outcomes import REASON_LIMIT

FailureKind: TypeAlias = Literal["retry", "reject", "dead", "snooze", "unknown"]
FailureScope: TypeAlias = Literal["message", "infrastructure", "configuration"]

_WORD_START: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_NOT_IN_CODE: Final = re.compile(r"[^a-z0-9._-]+")


@dataclass(frozen=True, slots=True)
class Verdict:
    """What to do, without the story of the exception."""

    kind: FailureKind
    reason_code: str
    scope: FailureScope = "message"
    retry_after: timedelta | None = None
    """A floor under the next delay. For a snooze: the delay itself."""
    max_attempts: int | None = None
    """A bound below the policy's own, for failures that hardly ever get better."""
    in_place: bool = False
    """Trying again at once in the same process makes sense."""
    is_free: bool = False
    """Never spends an attempt; the age of the message still bounds it."""


@dataclass(frozen=True, slots=True)
class Failure(Verdict):
    """A verdict with what is stored about the error: small, redacted, valid UTF-8 without NUL."""

    error_class: str = ""
    error_message: str = ""
    fingerprint: str = ""
    """Equal for errors that differ only in ids and numbers."""


def reason_from(name: str, fallback: str = "error") -> str:
    """A stable reason code from a class name: `CardDeclined` becomes `card_declined`."""
    words = _WORD_START.sub("_", name).lower()
    code = _NOT_IN_CODE.sub("_", words).strip("_")[:REASON_LIMIT].strip("_")
    return code or fallback
