"""What a handler returns or raises to say more than "done" or "failed".

Returning `Reject` commits what the handler wrote and ends the task FAILED. Everything raised rolls
back: `Retry` and `Snooze` come again, `Dead` goes to the dead-letter catalog at once.
"""

import copyreg
import re
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, Generic, TypeAlias, TypeVar

from towpath.backoff import parse_duration

REASON_LIMIT: Final = 64
_CODE: Final = re.compile(r"[A-Za-z0-9._:-]+")


def _checked_reason(reason: str) -> str:
    if len(reason) > REASON_LIMIT or not _CODE.fullmatch(reason):  # not shown: it may be what it must not be
        raise ValueError(
            f"a reason is a code such as card_declined, at most {REASON_LIMIT} letters, digits and ._:- "
            "(it is a metric's label and a filter); text goes into detail"
        )
    return reason


@dataclass(frozen=True, slots=True)
class Reject:
    """Return it: a business decision. What the handler wrote is committed; the task ends FAILED.

    A `reason` is 1 to 64 printable ASCII characters, for tables and metrics; `detail` is for people.
    """

    reason: str
    detail: str = ""

    def __post_init__(self) -> None:
        _checked_reason(self.reason)


class Outcome(Exception):
    """Base of what a handler raises on purpose. The transaction is rolled back."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(detail or reason)
        self.reason = _checked_reason(reason)
        self.detail = detail

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles as it stands, past `__init__`: it may come out of a worker process."""
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class Retry(Outcome):
    """Raise it: try again by the retry policy, not before `after`. Spends an attempt."""

    def __init__(
        self, reason: str = "retry", *, after: str | timedelta | None = None, detail: str = ""
    ) -> None:
        super().__init__(reason, detail)
        self.after = None if after is None else parse_duration(after)


class Snooze(Outcome):
    """Raise it: come again after `delay`; nothing failed, no attempt is spent."""

    def __init__(self, delay: str | timedelta, *, reason: str = "snooze", detail: str = "") -> None:
        super().__init__(reason, detail)
        self.delay = parse_duration(delay)


class Dead(Outcome):
    """Raise it: hopeless. The message goes to the dead-letter catalog without further attempts."""


T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Happened(Generic[T_co]):
    """What `reconcile` found: the at-most-once effect took place, with this result."""

    result: T_co


@dataclass(frozen=True, slots=True)
class DidNotHappen:
    """What `reconcile` found: the effect did not take place; the task may be tried again."""


@dataclass(frozen=True, slots=True)
class StillUnknown:
    """What `reconcile` found: nothing yet; ask again later."""


Verdict: TypeAlias = Happened[T] | DidNotHappen | StillUnknown
