"""The pipeline that decides what an exception means for its message."""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from datetime import UTC, datetime
from typing import Final, TypeAlias

from towpath.errors import (
    BrokerUnavailable,
    ConfigurationError,
    DeadlinePassed,
    DecodeError,
    HandlerCancelled,
    HandlerIdled,
    HandlerTimeout,
    PayloadTooLarge,
    StoreUnavailable,
    TowpathError,
    UsageError,
)
from towpath.failures.http import by_status
from towpath.failures.model import Failure, Verdict, reason_from
from towpath.failures.sqlstate import by_sqlstate
from towpath.failures.text import class_name, describe, fingerprint, is_validation_class
from towpath.failures.walk import chain, heart, members
from towpath.outcomes import Dead, Outcome, Reject, Retry, Snooze

Rule: TypeAlias = Reject | Retry | Snooze | Dead | type[Retry] | type[Dead]
"""What an application says a class of failures means."""

PROGRAMMING_ERROR_ATTEMPTS: Final = 2
_PROGRAMMING_ERRORS: Final = (
    TypeError,
    AttributeError,
    NameError,
    AssertionError,
    ImportError,
    NotImplementedError,
)
_LOCAL_FILE_ERRORS: Final = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
_CONNECTION_CLASS_NAMES: Final = frozenset(
    {
        "TransportError",
        "APIConnectionError",
        "ClientConnectionError",
        "ServerDisconnectedError",
        "HTTPClientError",
    }
)
"""Of httpx, model providers' clients, aiohttp and botocore, which do not derive from OSError."""


def _utc_now() -> datetime:
    return datetime.now(UTC)


class Classifier:
    """Turns exceptions into failures. Immutable and without I/O; safe to share.

    `rules` are the application's: the most specific class of the exception wins, then the same for
    its causes and the members of exception groups. `now` is asked only for a Retry-After date in a
    response without a date of its own. Raises TypeError for a rule that is none.
    """

    def __init__(
        self,
        rules: Mapping[type[BaseException], Rule] | None = None,
        *,
        now: Callable[[], datetime] = _utc_now,
    ) -> None:
        self._rules = dict(rules or {})
        for cls, rule in self._rules.items():
            _check_rule(cls, rule)
        self._now = now

    def classify(self, error: BaseException) -> Failure:
        """The failure behind an exception a handler raised. Never raises."""
        try:
            verdict = self._verdict(error)
        except Exception:  # noqa: BLE001 - attributes of foreign errors may raise; the message must still settle
            verdict = Verdict("retry", reason_from(type(heart(error)).__name__))
        decided = {field.name: getattr(verdict, field.name) for field in fields(Verdict)}
        return Failure(
            **decided,
            error_class=class_name(heart(error)),
            error_message=describe(error),
            fingerprint=fingerprint(error),
        )

    def _verdict(self, error: BaseException) -> Verdict:
        stages: tuple[Callable[[], Verdict | None], ...] = (
            lambda: _first(_explicit, members(error)),
            lambda: _first(_stopped, members(error)),
            lambda: _first(_idled, chain(error)),
            lambda: _first(self._undecodable, chain(error)),
            lambda: _first(self._by_rule, chain(error)),
            lambda: _first(by_sqlstate, chain(error)),
            lambda: _first(lambda each: by_status(each, self._now), chain(error)),
            lambda: _first(_towpath, chain(error)),
            lambda: _first(_connection, chain(error)),
            lambda: _first(_programming, members(error)),
        )
        for stage in stages:
            verdict = stage()
            if verdict is not None:
                return verdict
        return Verdict("retry", reason_from(type(heart(error)).__name__))

    def _by_rule(self, error: BaseException) -> Verdict | None:
        for cls in type(error).__mro__:
            rule = self._rules.get(cls)
            if rule is not None:
                return _from_rule(rule, error)
        return None

    def _undecodable(self, error: BaseException) -> Verdict | None:
        if isinstance(error, DecodeError):
            return Verdict("dead", reason_from(error.reason, "decode"))
        named = [cls for cls in type(error).__mro__ if is_validation_class(cls)]
        # A rule that names the validation class itself is more explicit than our guess that the
        # message is what failed to validate: it may have been a provider's answer.
        if named and not any(cls in self._rules for cls in named):
            return Verdict("dead", "validation")
        return None


def _first(
    stage: Callable[[BaseException], Verdict | None], errors: Iterable[BaseException]
) -> Verdict | None:
    return next((verdict for error in errors if (verdict := stage(error)) is not None), None)


def _check_rule(cls: object, rule: object) -> None:
    if not (isinstance(cls, type) and issubclass(cls, BaseException)):
        raise TypeError(f"a rule is for an exception class, got {cls!r}")
    if not (rule in (Retry, Dead) or isinstance(rule, Reject | Retry | Snooze | Dead)):
        raise TypeError(
            f"the rule for {cls.__qualname__} is {rule!r}: write Retry, Dead, Reject('reason'), Snooze('5m') "
            "or an instance of these"
        )


def _from_rule(rule: Rule, error: BaseException) -> Verdict:
    if isinstance(rule, Reject):
        return Verdict("reject", rule.reason)
    if isinstance(rule, Outcome):
        return _of_outcome(rule)
    reason = reason_from(type(error).__name__)
    return Verdict("dead" if issubclass(rule, Dead) else "retry", reason)


def _explicit(error: BaseException) -> Verdict | None:
    return _of_outcome(error) if isinstance(error, Outcome) else None


def _of_outcome(outcome: Outcome) -> Verdict:
    if isinstance(outcome, Snooze):
        return Verdict("snooze", outcome.reason, retry_after=outcome.delay, is_free=True)
    if isinstance(outcome, Dead):
        return Verdict("dead", outcome.reason)
    return Verdict("retry", outcome.reason, retry_after=getattr(outcome, "after", None))


def _stopped(error: BaseException) -> Verdict | None:
    if isinstance(error, DeadlinePassed):
        return Verdict("dead", "deadline_passed")
    if isinstance(error, HandlerTimeout):
        return Verdict("retry", "handler_timeout")
    if isinstance(error, HandlerCancelled):
        return Verdict("retry", "handler_cancelled")
    if isinstance(error, asyncio.CancelledError):
        return Verdict("retry", "cancelled", is_free=True)
    return None


def _idled(error: BaseException) -> Verdict | None:
    """Also behind an error of the handler's: the lost connection it came from is no outage."""
    return Verdict("retry", "handler_idled") if isinstance(error, HandlerIdled) else None


def _towpath(error: BaseException) -> Verdict | None:
    if not isinstance(error, TowpathError):
        return None
    reason = error.code.replace(".", "_")
    if isinstance(error, StoreUnavailable | BrokerUnavailable):
        return Verdict("retry", reason, "infrastructure")
    if isinstance(error, ConfigurationError):
        return Verdict("retry", reason, "configuration")
    if isinstance(error, PayloadTooLarge):
        return Verdict("dead", reason)
    if isinstance(error, UsageError):
        return Verdict("retry", reason, max_attempts=PROGRAMMING_ERROR_ATTEMPTS)
    return Verdict("retry", reason)


def _connection(error: BaseException) -> Verdict | None:
    if isinstance(error, _LOCAL_FILE_ERRORS):
        return Verdict("retry", reason_from(type(error).__name__))
    if isinstance(error, TimeoutError):
        return Verdict("retry", "timeout", in_place=True)
    if isinstance(error, ConnectionError):
        return Verdict("retry", "connection", in_place=True)
    if isinstance(error, OSError):
        return Verdict("retry", "os_error", in_place=True)
    if any(cls.__name__ in _CONNECTION_CLASS_NAMES for cls in type(error).__mro__):
        return Verdict("retry", "connection", in_place=True)
    return None


def _programming(error: BaseException) -> Verdict | None:
    if isinstance(error, _PROGRAMMING_ERRORS):
        return Verdict("retry", reason_from(type(error).__name__), max_attempts=PROGRAMMING_ERROR_ATTEMPTS)
    return None
