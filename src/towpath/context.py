"""What a handler is given besides its payload. The type carries the powers.

A `Tx` has a session and no clock of its own; a `Call` has an idempotency key and no session, so a
long handler cannot sit in a transaction by mistake.
"""

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Generic, NoReturn, Protocol, TypeVar
from uuid import UUID

import msgspec
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from towpath.errors import UsageError
from towpath.messages import Envelope, HeadersInput, Message
from towpath.outbox import DECLARED, Outbox
from towpath.outbox.rows import Declared, Key

STEP_LIMIT = 100

T = TypeVar("T")

_NO_COMMIT = (
    "tx.session.commit() is refused: the transaction commits together with the task's state when the "
    "handler returns; return to commit, raise to roll back, or use session.begin_nested()"
)
_NO_ROLLBACK = "tx.session.rollback() is refused: raise to roll back, or use session.begin_nested()"
_NOT_YOURS = (
    "the handler closed or ended tx.session: its transaction is the engine's, "
    "return to commit, raise to roll back, or use session.begin_nested()"
)


class Attempt(msgspec.Struct, frozen=True):
    """Which message this is and how often it was tried."""

    message_id: UUID
    """Stable over redelivery, retry and replay."""
    key: str | None
    """What orders it."""
    attempt: int
    """Counts from 1."""
    run_no: int
    """0, and one more for each rerun on purpose."""
    envelope: Envelope
    """Type, time, sequence and headers of the message."""
    owner: str = ""
    """Whom the task was submitted for."""


class HandlerSession(AsyncSession):
    """The session of one handler call. The engine ends its transaction, together with the task's state."""

    async def commit(self) -> NoReturn:
        """Refused: the engine commits."""
        raise UsageError(_NO_COMMIT)

    async def rollback(self) -> NoReturn:
        """Refused: raising rolls back."""
        raise UsageError(_NO_ROLLBACK)

    def begin_for_handler(self) -> None:
        """For the engine. The database hears of it with the first statement."""
        self._begun = self.sync_session.begin()

    def check_transaction(self) -> None:
        """For the engine: raise UsageError when the handler ended its transaction in some other way."""
        if self.sync_session.get_transaction() is not self._begun:
            raise UsageError(_NOT_YOURS)

    async def end_with_commit(self) -> None:
        """For the engine."""
        await AsyncSession.commit(self)

    async def end_with_rollback(self) -> None:
        """For the engine."""
        await AsyncSession.rollback(self)

    async def leave(self) -> None:
        """For the engine: close it, also while cancelled; what was not committed is rolled back."""
        if self.in_transaction():
            await AsyncSession.__aexit__(self, None, None, None)
        else:
            self.sync_session.close()  # the connection went back when the transaction ended


class Tx:
    """The open transaction of a handler: its SQL, the task's state and emitted events commit together.

    `session` runs your SQL; its `commit` and `rollback` raise UsageError, `begin_nested` is yours.
    """

    __slots__ = ("_attempt", "_outbox", "session")

    def __init__(self, session: AsyncSession, attempt: Attempt | None, outbox: Outbox) -> None:
        self.session = session
        self._attempt = attempt
        self._outbox = outbox

    @property
    def attempt(self) -> Attempt:
        """Which message this is. Raises UsageError in a batch, which has many: see `Batch.messages`."""
        if self._attempt is None:
            raise UsageError("the transaction of a batch is of many messages: look at batch.messages")
        return self._attempt

    @property
    def message_id(self) -> UUID:
        """Stable over redelivery, retry and replay."""
        return self.attempt.message_id

    def emit(
        self,
        payload: object,
        *,
        key: Key | Declared = DECLARED,
        headers: HeadersInput | None = None,
        destination: str | None = None,
        at: datetime | None = None,
        delay: str | timedelta | None = None,
    ) -> UUID:
        """Write an event that exists if and only if this transaction commits. Returns its message id.

        It is published at once, or when `at` or `delay` say: see `towpath.emit`.
        """
        return self._outbox.emit(
            self.session, payload, key=key, headers=headers, destination=destination, at=at, delay=delay
        )


class SyncHandlerSession(Session):
    """The session of one call of a plain function, in its thread. The engine ends its transaction."""

    def commit(self) -> NoReturn:
        """Refused: the engine commits."""
        raise UsageError(_NO_COMMIT)

    def rollback(self) -> NoReturn:
        """Refused: raising rolls back."""
        raise UsageError(_NO_ROLLBACK)

    def begin_for_handler(self) -> None:
        """For the engine."""
        self._begun = self.begin()

    def check_transaction(self) -> None:
        """For the engine: raise UsageError when the handler ended its transaction in some other way."""
        if self.get_transaction() is not self._begun:
            raise UsageError(_NOT_YOURS)

    def end_with_commit(self) -> None:
        """For the engine."""
        Session.commit(self)

    def end_with_rollback(self) -> None:
        """For the engine."""
        Session.rollback(self)


class SyncTx:
    """`Tx` for handlers that are plain functions: they run in a thread, with a sync `session`.

    `attempt` says which message this is and how often it was tried.
    """

    __slots__ = ("_outbox", "attempt", "session")

    def __init__(self, session: Session, attempt: Attempt, outbox: Outbox) -> None:
        self.session = session
        self.attempt = attempt
        self._outbox = outbox

    @property
    def message_id(self) -> UUID:
        """Stable over redelivery, retry and replay."""
        return self.attempt.message_id

    def emit(
        self,
        payload: object,
        *,
        key: Key | Declared = DECLARED,
        headers: HeadersInput | None = None,
        destination: str | None = None,
        at: datetime | None = None,
        delay: str | timedelta | None = None,
    ) -> UUID:
        """Write an event that exists if and only if this transaction commits. Returns its message id.

        It is published at once, or when `at` or `delay` say: see `towpath.emit`.
        """
        return self._outbox.emit(
            self.session, payload, key=key, headers=headers, destination=destination, at=at, delay=delay
        )


@dataclass(frozen=True, slots=True)
class Batch(Generic[T]):
    """Several messages of one type, each of another key, handled in one transaction."""

    messages: Sequence[Message[T]]

    @property
    def payloads(self) -> list[T]:
        """In the order of `messages`."""
        return [message.payload for message in self.messages]

    def __len__(self) -> int:
        return len(self.messages)

    def __iter__(self) -> Iterator[Message[T]]:
        return iter(self.messages)


class Beginning(Protocol):
    """How an `OnceCall` commits its marker; the engine provides it."""

    def __call__(self, step: str, /) -> AbstractAsyncContextManager[None]: ...


class Settling(Protocol):
    """How a `Call` settles inside its own transaction; the engine provides it."""

    def __call__(self) -> AbstractAsyncContextManager[AsyncSession]: ...


class _OutsideCall:
    """What every handler of an outside call is given: the message and a stable key."""

    __slots__ = ("_report", "attempt")

    def __init__(self, attempt: Attempt, report: Callable[[Mapping[str, object]], None]) -> None:
        self.attempt = attempt
        self._report = report

    @property
    def message_id(self) -> UUID:
        """Stable over redelivery, retry and replay."""
        return self.attempt.message_id

    def idempotency_key(self, step: str | None = None) -> str:
        """`message_id[:run_no][:step]`: the same on redelivery, retry and replay, new on a rerun.

        Give each outside call of one handler a `step` of its own: 1 to 100 characters without ":".
        """
        run = f":{self.attempt.run_no}" if self.attempt.run_no else ""
        return f"{self.message_id}{run}" + ("" if step is None else f":{_checked_step(step)}")


class _AsyncCall(_OutsideCall):
    __slots__ = ()

    async def progress(self, fraction: float, *, step: str | None = None) -> None:
        """Say how far the work is, 0 to 1; written with the next heartbeat, the latest wins.

        Raises UsageError for other numbers.
        """
        self._report(_progress(fraction, step))


class Call(_AsyncCall):
    """An outside call with a stable key; no transaction is open while it runs.

    `attempt` says which message this is and how often it was tried.
    """

    __slots__ = ("_outbox", "_settling")

    def __init__(
        self,
        attempt: Attempt,
        *,
        outbox: Outbox,
        settling: Settling,
        report: Callable[[Mapping[str, object]], None],
    ) -> None:
        super().__init__(attempt, report)
        self._outbox = outbox
        self._settling = settling

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Tx]:
        """A transaction that ends the task: what it writes commits together with SUCCEEDED.

        At most once per call, as its last act. If the task was taken over meanwhile, everything is
        rolled back and the handler's result is dropped.
        """
        async with self._settling() as session:
            yield Tx(session, self.attempt, self._outbox)


class SyncCall(_OutsideCall):
    """`Call` for handlers that are plain functions: they run in a thread, without a transaction."""

    __slots__ = ()

    def progress(self, fraction: float, *, step: str | None = None) -> None:
        """Say how far the work is, 0 to 1; written with the next heartbeat, the latest wins."""
        self._report(_progress(fraction, step))


class OnceCall(_AsyncCall):
    """An outside call that may not be repeated blindly."""

    __slots__ = ("_once",)

    def __init__(
        self,
        attempt: Attempt,
        *,
        once: Beginning,
        report: Callable[[Mapping[str, object]], None],
    ) -> None:
        super().__init__(attempt, report)
        self._once = once

    def once(self, step: str = "effect") -> AbstractAsyncContextManager[None]:
        """Commit the marker, then run the block: a crash inside leaves the task UNKNOWN.

        Nothing but the effect belongs into the block. Raise `Retry`, `Snooze` or `Dead` inside it
        only where the provider said that nothing happened. Raises UsageError when a step is used
        twice, LeaseLost when the task was taken over: then the effect must not begin.
        """
        return self._once(_checked_step(step))


def _progress(fraction: float, step: str | None) -> dict[str, object]:
    if not 0.0 <= fraction <= 1.0:
        raise UsageError(f"progress is a fraction from 0 to 1, got {fraction!r}")
    return {"fraction": fraction, **({"step": step} if step else {})}


def _checked_step(step: str) -> str:
    if not step or len(step) > STEP_LIMIT or ":" in step:
        raise UsageError(f"a step is 1 to {STEP_LIMIT} characters without ':', got {step!r}")
    return step
