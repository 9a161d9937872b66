"""`App`: the handlers, resources and policies one consumer group declares."""

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from datetime import timedelta
from types import MappingProxyType
from typing import Any, Concatenate, Final, Literal, ParamSpec, TypeAlias, TypeVar, Unpack
from uuid import UUID

from towpath.backoff import RetryPolicy, parse_duration
from towpath.brokers.ports import Delivery, dead_letter_address
from towpath.context import Attempt, OnceCall
from towpath.decorators import (
    AtMostOnceDecorator,
    BatchDecorator,
    IdempotentDecorator,
    Result,
    TransactionalDecorator,
)
from towpath.failures import Classifier, Rule
from towpath.handlers import BatchLimits, Effect, Handler, InvalidHandler, Options, handler_of, read_reconcile
from towpath.outcomes import Verdict

Ordering: TypeAlias = Literal["key", "partition", "none"]
P = ParamSpec("P")
R = TypeVar("R", bound=Result)
S = TypeVar("S")

ADDRESS_LIMIT: Final = 200
_GROUP_NAME: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,99}")

Provider: TypeAlias = Callable[[], AbstractAsyncContextManager[S]]
Next: TypeAlias = Callable[[], Awaitable[object]]
Middleware: TypeAlias = Callable[[Attempt, Next], Awaitable[object]]


@dataclass(frozen=True, slots=True)
class Foreign:
    """How messages without CloudEvents headers on one destination are read."""

    destination: str
    type: str | Callable[[Delivery], str]
    id: Callable[[Delivery], UUID | str] | None
    content_type: str


@dataclass(slots=True)
class App:
    """One consumer group: what it handles, in which order, and what its failures mean.

    `ordering` is `key` (messages of a key run one after another, also over retries), `partition`
    or `none`; `retry` is for handlers without a policy of their own. Decorators return the plain
    function, so `await invoice(order, tx)` is a unit test. Raises ValueError where a name or a
    duration is not one.
    """

    name: str
    ordering: Ordering = "key"
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    unknown_max_age: str | timedelta = "24h"
    """How long a message of a type without handler is held before it is dead."""
    retention: str | timedelta = "7d"
    """How long finished rows are kept; longer than broker and outbox can repeat a message."""
    _handlers: dict[str, Handler] = field(default_factory=dict, init=False)
    _providers: dict[type, Provider[Any]] = field(default_factory=dict, init=False)
    _rules: dict[type[BaseException], Rule] = field(default_factory=dict, init=False)
    _middleware: list[Middleware] = field(default_factory=list, init=False)
    _foreign: dict[str, Foreign] = field(default_factory=dict, init=False)
    _ignored: set[str] = field(default_factory=set, init=False)
    _without_nulls: set[str] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        if not _GROUP_NAME.fullmatch(self.name):
            raise ValueError(f"a group name is 1 to 100 of a-z 0-9 . _ -, got {self.name!r}")
        if self.ordering not in ("key", "partition", "none"):
            raise ValueError(f"ordering is 'key', 'partition' or 'none', got {self.ordering!r}")
        parse_duration(self.unknown_max_age)
        parse_duration(self.retention)

    def transactional(
        self,
        *,
        concurrency: int | None = None,
        retry: RetryPolicy | None = None,
        timeout: str | timedelta = "5m",
        type: str | None = None,  # noqa: A002 - the field's name
        destination: str | None = None,
    ) -> TransactionalDecorator:
        """The effect is in this Postgres: SQL, task state and emitted events commit together. Once.

        `concurrency` bounds how many run at once in a worker, `retry` replaces the group's policy,
        `timeout` ends one attempt. `type` and `destination` are needed where the payload is `bytes`.
        Raises InvalidHandler where the function's signature does not fit.
        """
        return self._declaring(
            Effect.TRANSACTIONAL,
            retry,
            timeout=timeout,
            concurrency=concurrency,
            type_=type,
            destination=destination,
        )

    def idempotent(
        self,
        *,
        timeout: str | timedelta = "5m",
        dependency: str | None = None,
        concurrency: int | None = None,
        retry: RetryPolicy | None = None,
        type: str | None = None,  # noqa: A002 - the field's name
        destination: str | None = None,
    ) -> IdempotentDecorator:
        """An outside call with a stable key; no transaction is open while it runs. At least once.

        Handlers that name the same `dependency` share a breaker; otherwise each has its own. What it
        returns is the task's result. The rest is as for `transactional`.
        """
        return self._declaring(
            Effect.IDEMPOTENT,
            retry,
            timeout=timeout,
            concurrency=concurrency,
            dependency=dependency,
            type_=type,
            destination=destination,
        )

    def at_most_once(
        self,
        *,
        reconcile: Callable[Concatenate[OnceCall, P], Awaitable[Verdict[R]]],
        timeout: str | timedelta = "5m",
        dependency: str | None = None,
        concurrency: int | None = None,
        retry: RetryPolicy | None = None,
    ) -> AtMostOnceDecorator[R]:
        """An effect that may not be repeated: `async with call.once():` marks it before it begins.

        A worker lost inside leaves the task UNKNOWN; `reconcile` is asked on a schedule whether it
        happened, and its result is the task's result. The rest is as for `idempotent`.
        """
        return self._declaring(
            Effect.AT_MOST_ONCE,
            retry,
            timeout=timeout,
            concurrency=concurrency,
            dependency=dependency,
            reconcile=read_reconcile(reconcile),
        )

    def batch(
        self,
        *,
        max_size: int = 500,
        max_wait: str | timedelta = "50ms",
        timeout: str | timedelta = "5m",
        retry: RetryPolicy | None = None,
    ) -> BatchDecorator:
        """Many messages in one transaction, for set-based SQL; if it fails it runs one by one.

        A batch starts when `max_size` messages wait, `max_wait` after its first, or when nothing can join it
        and as many again wait behind it in its keys. Middleware wraps it once, with its first attempt.
        """
        if max_size < 1:
            raise InvalidHandler(f"max_size must be at least 1, got {max_size}")
        limits = BatchLimits(max_size, parse_duration(max_wait))
        return self._declaring(Effect.BATCH, retry, timeout=timeout, batch=limits)

    def _declaring(
        self, effect: Effect, retry: RetryPolicy | None, **options: Unpack[Options]
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def declare(function: Callable[..., Any]) -> Callable[..., Any]:
            handler = handler_of(function, effect, self.name, retry or self.retry, **options)
            if handler.type in self._handlers:
                known = self._handlers[handler.type].name
                raise InvalidHandler(f"{function.__qualname__}: {handler.type} is handled by {known} already")
            self._handlers[handler.type] = handler
            return function

        return declare

    def provide(self, type_: type[S], factory: Provider[S]) -> None:
        """Open `factory()` at start, inject it by annotation, close it after the drain.

        It is injected where a keyword-only parameter has this class.
        """
        if type_ in self._providers:
            raise ValueError(f"{type_.__qualname__} has a provider already")
        self._providers[type_] = factory

    def classify(self, error: type[BaseException], rule: Rule) -> None:
        """Say what a failure means where the defaults are not enough.

        `rule` is `Reject("…")`, `Retry`, `Dead` or `Snooze("5m")`. Raises TypeError for another.
        """
        Classifier({error: rule})
        self._rules[error] = rule

    def middleware(self, function: Middleware) -> Middleware:
        """Wrap every handler call: `async def mw(attempt, call_next): return await call_next()`.

        The first added is outermost.
        """
        self._middleware.append(function)
        return function

    def foreign(
        self,
        destination: str,
        *,
        type: str | Callable[[Delivery], str],  # noqa: A002 - the field's name
        id: Callable[[Delivery], UUID | str] | None = None,  # noqa: A002 - the field's name
        content_type: str = "application/json",
    ) -> None:
        """Read messages without CloudEvents headers, from other producers.

        Without `id` a Kafka record is named by topic, partition, offset and timestamp. RabbitMQ has
        no such name: there `id` is required, else the message is dead with reason `no_message_id`.
        """
        self._foreign[destination] = Foreign(destination, type, id, content_type)

    def ignore(self, *types: str) -> None:
        """Types on the group's destinations that it skips on purpose; others without handler are held."""
        self._ignored.update(types)

    def ignore_nulls(self, *destinations: str) -> None:
        """Skip messages without a value on these destinations: the tombstones of a compacted topic.

        Without this they reach the handler of their type: as None where its payload is `bytes` or
        annotated `… | None`, else they are dead with reason `wrong_shape`.
        """
        self._without_nulls.update(destinations)

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """By wire type."""
        return MappingProxyType(self._handlers)

    @property
    def providers(self) -> Mapping[type, Provider[Any]]:
        """By class."""
        return MappingProxyType(self._providers)

    @property
    def middlewares(self) -> Sequence[Middleware]:
        """Outermost first."""
        return tuple(self._middleware)

    @property
    def ignored_types(self) -> frozenset[str]:
        """Types skipped on purpose."""
        return frozenset(self._ignored)

    @property
    def destinations_without_nulls(self) -> frozenset[str]:
        """Where messages without a value are skipped on purpose."""
        return frozenset(self._without_nulls)

    @property
    def classifier(self) -> Classifier:
        """The group's rules before the defaults."""
        return Classifier(self._rules)

    def foreign_rule(self, destination: str) -> Foreign | None:
        """How foreign messages of a destination are read."""
        return self._foreign.get(destination)

    @property
    def destinations(self) -> tuple[str, ...]:
        """What the group subscribes to, sorted."""
        return tuple(sorted({handler.destination for handler in self._handlers.values()}))

    def problems(self) -> list[str]:
        """Everything wrong that can be known before the first message, one line each."""
        found: list[str] = []
        if not self._handlers:
            found.append(f"group {self.name!r} has no handlers")
        for handler in self._handlers.values():
            wanted = {**handler.resources, **(handler.reconcile.resources if handler.reconcile else {})}
            found += [
                f"{handler.name}: nothing provides {cls.__qualname__} for {parameter!r}: "
                f"call app.provide({cls.__name__}, …)"
                for parameter, cls in wanted.items()
                if cls not in self._providers
            ]
        found += [
            f"destination {destination!r} is too long: its dead-letter address exceeds {ADDRESS_LIMIT} "
            "characters"
            for destination in self.destinations
            if len(dead_letter_address(self.name, destination)) > ADDRESS_LIMIT
        ]
        found += [
            f"app.foreign({destination!r}, …): no handler reads that destination"
            for destination in sorted(self._foreign.keys() - set(self.destinations))
        ]
        found += [
            f"app.ignore_nulls({destination!r}): no handler reads that destination"
            for destination in sorted(self._without_nulls - set(self.destinations))
        ]
        found += [
            f"{type_!r} is both handled and ignored"
            for type_ in sorted(self._ignored & self._handlers.keys())
        ]
        return found
