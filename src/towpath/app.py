"""`App`: the handlers, resources and policies one consumer group declares."""

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from datetime import timedelta
from types import MappingProxyType
from typing import Any, Concatenate, Final, Literal, ParamSpec, Protocol, TypeAlias, TypeVar, overload
from uuid import UUID

from towpath.backoff import RetryPolicy, parse_duration
from towpath.brokers.ports import Delivery, dead_letter_address
from towpath.context import Attempt, Batch, Call, OnceCall, SyncCall, SyncTx, Tx
from towpath.failures import Classifier, Rule
from towpath.handlers import (
    BatchLimits,
    Effect,
    Handler,
    InvalidHandler,
    Reconcile,
    message_of,
    read_reconcile,
    read_signature,
)
from towpath.outcomes import Reject, Verdict

Ordering: TypeAlias = Literal["key", "partition", "none"]
Result: TypeAlias = Reject | bool | int | float | str | Sequence[Any] | Mapping[str, Any] | None
"""What an idempotent handler may return: JSON values are kept as the task's result."""

M = TypeVar("M")
P = ParamSpec("P")
R = TypeVar("R", bound=Result)
S = TypeVar("S")
Returned = TypeVar("Returned", bound=Result)

ADDRESS_LIMIT: Final = 200
_GROUP_NAME: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,99}")

Provider: TypeAlias = Callable[[], AbstractAsyncContextManager[S]]
Next: TypeAlias = Callable[[], Awaitable[object]]
Middleware: TypeAlias = Callable[[Attempt, Next], Awaitable[object]]


class _Transactional(Protocol):
    @overload
    def __call__(
        self, function: Callable[Concatenate[M, Tx, P], Awaitable[Reject | None]], /
    ) -> Callable[Concatenate[M, Tx, P], Awaitable[Reject | None]]: ...
    @overload
    def __call__(
        self, function: Callable[Concatenate[M, SyncTx, P], Reject | None], /
    ) -> Callable[Concatenate[M, SyncTx, P], Reject | None]: ...
    @overload
    def __call__(
        self, function: Callable[[M], Awaitable[Reject | None]], /
    ) -> Callable[[M], Awaitable[Reject | None]]: ...


class _Idempotent(Protocol):
    @overload
    def __call__(
        self, function: Callable[Concatenate[M, Call, P], Awaitable[R]], /
    ) -> Callable[Concatenate[M, Call, P], Awaitable[R]]: ...
    @overload
    def __call__(
        self, function: Callable[Concatenate[M, SyncCall, P], R], /
    ) -> Callable[Concatenate[M, SyncCall, P], R]: ...
    @overload
    def __call__(self, function: Callable[[M], Awaitable[R]], /) -> Callable[[M], Awaitable[R]]: ...


class _AtMostOnce(Protocol[Returned]):
    @overload
    def __call__(
        self, function: Callable[Concatenate[M, OnceCall, P], Awaitable[Returned]], /
    ) -> Callable[Concatenate[M, OnceCall, P], Awaitable[Returned]]: ...
    @overload
    def __call__(
        self, function: Callable[[M], Awaitable[Returned]], /
    ) -> Callable[[M], Awaitable[Returned]]: ...


class _Batch(Protocol):
    @overload
    def __call__(
        self, function: Callable[Concatenate[Batch[M], Tx, P], Awaitable[None]], /
    ) -> Callable[Concatenate[Batch[M], Tx, P], Awaitable[None]]: ...
    @overload
    def __call__(
        self, function: Callable[[Batch[M]], Awaitable[None]], /
    ) -> Callable[[Batch[M]], Awaitable[None]]: ...


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
    ) -> _Transactional:
        """The effect is in this Postgres: SQL, task state and emitted events commit together. Once.

        `concurrency` bounds how many run at once in a worker, `retry` replaces the group's policy,
        `timeout` ends one attempt. `type` and `destination` are needed where the payload is `bytes`.
        Raises InvalidHandler where the function's signature does not fit.
        """

        def declare(function: Callable[..., Any]) -> Callable[..., Any]:
            self._add(function, Effect.TRANSACTIONAL, concurrency, retry, timeout, None, type, destination)
            return function

        return declare

    def idempotent(
        self,
        *,
        timeout: str | timedelta = "5m",
        dependency: str | None = None,
        concurrency: int | None = None,
        retry: RetryPolicy | None = None,
        type: str | None = None,  # noqa: A002 - the field's name
        destination: str | None = None,
    ) -> _Idempotent:
        """An outside call with a stable key; no transaction is open while it runs. At least once.

        Handlers that name the same `dependency` share a breaker; otherwise each has its own. What it
        returns is the task's result. The rest is as for `transactional`.
        """

        def declare(function: Callable[..., Any]) -> Callable[..., Any]:
            self._add(function, Effect.IDEMPOTENT, concurrency, retry, timeout, dependency, type, destination)
            return function

        return declare

    def at_most_once(
        self,
        *,
        reconcile: Callable[Concatenate[OnceCall, P], Awaitable[Verdict[R]]],
        timeout: str | timedelta = "5m",
        dependency: str | None = None,
        concurrency: int | None = None,
        retry: RetryPolicy | None = None,
    ) -> _AtMostOnce[R]:
        """An effect that may not be repeated: `async with call.once():` marks it before it begins.

        A worker lost inside leaves the task UNKNOWN; `reconcile` is asked on a schedule whether it
        happened, and its result is the task's result. The rest is as for `idempotent`.
        """

        def declare(function: Callable[..., Any]) -> Callable[..., Any]:
            self._add(
                function,
                Effect.AT_MOST_ONCE,
                concurrency,
                retry,
                timeout,
                dependency,
                None,
                None,
                read_reconcile(reconcile),
            )
            return function

        return declare

    def batch(
        self,
        *,
        max_size: int = 500,
        max_wait: str | timedelta = "50ms",
        timeout: str | timedelta = "5m",
        retry: RetryPolicy | None = None,
    ) -> _Batch:
        """Many messages in one transaction, for set-based SQL; if it fails it runs one by one.

        A batch starts when `max_size` messages wait, or `max_wait` after its first. Middleware wraps
        the batch once, with its first message's attempt.
        """
        if max_size < 1:
            raise InvalidHandler(f"max_size must be at least 1, got {max_size}")
        limits = BatchLimits(max_size, parse_duration(max_wait))

        def declare(function: Callable[..., Any]) -> Callable[..., Any]:
            self._add(function, Effect.BATCH, None, retry, timeout, None, None, None, batch=limits)
            return function

        return declare

    def _add(
        self,
        function: Callable[..., Any],
        effect: Effect,
        concurrency: int | None,
        retry: RetryPolicy | None,
        timeout: str | timedelta,
        dependency: str | None,
        type_: str | None,
        destination: str | None,
        reconcile: Reconcile | None = None,
        batch: BatchLimits | None = None,
    ) -> None:
        signature = read_signature(function, effect)
        wire_type, address, spec = message_of(function, signature.payload, type_, destination)
        if spec is not None and spec.group not in (None, self.name):
            raise InvalidHandler(
                f"{function.__qualname__}: {wire_type} is addressed to {spec.group!r}, not {self.name!r}"
            )
        if wire_type in self._handlers:
            raise InvalidHandler(
                f"{function.__qualname__}: {wire_type} is handled by {self._handlers[wire_type].name} already"
            )
        if concurrency is not None and concurrency < 1:
            raise InvalidHandler(
                f"{function.__qualname__}: concurrency must be at least 1, got {concurrency}"
            )
        limit = parse_duration(timeout)
        if not limit:
            raise InvalidHandler(f"{function.__qualname__}: timeout must be longer than zero")
        self._handlers[wire_type] = Handler(
            name=function.__name__,
            function=function,
            effect=effect,
            type=wire_type,
            destination=address,
            payload_class=None if signature.payload is bytes else signature.payload,
            wants_message=signature.wants_message,
            wants_context=signature.wants_context,
            is_sync=signature.is_sync,
            resources=signature.resources,
            retry=retry or self.retry,
            timeout=limit,
            concurrency=concurrency,
            dependency=dependency,
            reconcile=reconcile,
            batch=batch,
            takes_null=signature.takes_null,
            spec=spec,
        )

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
