"""Which functions the decorators of `App` take: coroutine functions, and plain ones where those can be."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, Protocol, TypeAlias, TypeVar, overload

from towpath.context import Batch, Call, OnceCall, SyncCall, SyncTx, Tx
from towpath.outcomes import Reject

Result: TypeAlias = Reject | bool | int | float | str | Sequence[Any] | Mapping[str, Any] | None
"""What an idempotent handler may return: JSON values are kept as the task's result."""

M = TypeVar("M")
P = ParamSpec("P")
R = TypeVar("R", bound=Result)
Returned = TypeVar("Returned", bound=Result)


class TransactionalDecorator(Protocol):
    """Takes an effect in the same database."""

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


class IdempotentDecorator(Protocol):
    """Takes an outside call that may be repeated under its key."""

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


class AtMostOnceDecorator(Protocol[Returned]):
    """Takes an outside call that may not be repeated."""

    @overload
    def __call__(
        self, function: Callable[Concatenate[M, OnceCall, P], Awaitable[Returned]], /
    ) -> Callable[Concatenate[M, OnceCall, P], Awaitable[Returned]]: ...
    @overload
    def __call__(
        self, function: Callable[[M], Awaitable[Returned]], /
    ) -> Callable[[M], Awaitable[Returned]]: ...


class BatchDecorator(Protocol):
    """Takes many messages in one transaction."""

    @overload
    def __call__(
        self, function: Callable[Concatenate[Batch[M], Tx, P], Awaitable[None]], /
    ) -> Callable[Concatenate[Batch[M], Tx, P], Awaitable[None]]: ...
    @overload
    def __call__(
        self, function: Callable[[Batch[M]], Awaitable[None]], /
    ) -> Callable[[Batch[M]], Awaitable[None]]: ...
