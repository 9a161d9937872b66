"""Run one handler: decode, inject, bound in time, and say what came of it. Settles only transactions."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final, TypeAlias

import msgspec
from tenacity import AsyncRetrying, retry_if_result, stop_after_attempt, wait_random_exponential

from towpath.app import App
from towpath.backoff import parse_duration
from towpath.consumer.policy import UNKNOWN_TYPE
from towpath.context import Attempt, Call, HandlerSession, Tx
from towpath.crashpoints import CrashPoint, crash_point
from towpath.errors import DeadlinePassed, DecodeError, HandlerTimeout, UsageError
from towpath.failures import Failure, redact
from towpath.handlers import Effect, Handler
from towpath.messages import Message, decode
from towpath.outbox import Outbox
from towpath.outcomes import Reject
from towpath.states import TaskState
from towpath.store.database import Database
from towpath.store.settles import SettleStore
from towpath.store.work import Work, envelope_of

_FREE_IN_PLACE_TRIES: Final = 3
"""Serialization failures and lock timeouts come again at once, whatever the policy says."""
_result_encoder: Final = msgspec.json.Encoder()


@dataclass(frozen=True, slots=True)
class Done:
    """The handler returned; the row is still RUNNING."""

    state: TaskState
    result: bytes | None = None
    reason_code: str | None = None
    detail: str | None = None


@dataclass(frozen=True, slots=True)
class Committed:
    """The handler's own transaction settled the row."""

    state: TaskState
    promoted_count: int
    reason_code: str | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """The handler raised, after this many tries."""

    failure: Failure
    tries: int = 1


@dataclass(frozen=True, slots=True)
class Dropped:
    """The token was gone when the transaction wanted to settle: everything was rolled back."""


Execution: TypeAlias = Done | Committed | Failed | Dropped


class _TokenGone(Exception):
    """Unwinds `call.transaction()`; never leaves this module."""


class Executor:
    """Runs handlers of one group for one worker."""

    def __init__(
        self,
        app: App,
        database: Database,
        settles: SettleStore,
        outbox: Outbox,
        resources: Mapping[type, object],
        report_progress: Callable[[Work, Mapping[str, object]], None],
    ) -> None:
        self._app = app
        self._database = database
        self._settles = settles
        self._outbox = outbox
        self._resources = resources
        self._report_progress = report_progress
        self._classifier = app.classifier
        self._unknown_max_age = parse_duration(app.unknown_max_age)

    async def execute(self, work: Work) -> Execution:
        """What came of one attempt. Only cancellation is raised."""
        left = _seconds_left(work)
        if left is not None and left <= 0:
            return Failed(
                self._classifier.classify(DeadlinePassed("the deadline passed before it could start")), 0
            )
        handler = self._app.handlers.get(work.type)
        if handler is None:
            return Failed(self._unknown_type(work), 0)
        try:
            payload = _decode(handler, work)
        except DecodeError as error:
            return Failed(self._classifier.classify(error))
        execution = await self._try(handler, work, payload)
        if isinstance(execution, Failed) and execution.failure.in_place:
            return await self._again_in_place(handler, work, payload, execution)
        return execution

    async def _again_in_place(
        self, handler: Handler, work: Work, payload: object, first: Failed
    ) -> Execution:
        """Clearly transient: a few tries at once, which count as attempts unless they are free."""
        spent = 0

        def note(failed: Execution) -> Execution:
            nonlocal spent
            spent += isinstance(failed, Failed) and not failed.failure.is_free
            return Failed(failed.failure, spent) if isinstance(failed, Failed) else failed

        async def one_try() -> Execution:
            return note(await self._try(handler, work, payload))

        last = note(first)
        left = handler.retry.attempts - work.attempt - 1
        limit = _FREE_IN_PLACE_TRIES if first.failure.is_free else min(handler.retry.in_place, left)
        if limit <= 0:
            return last
        retrying = AsyncRetrying(
            stop=stop_after_attempt(limit),
            wait=wait_random_exponential(multiplier=0.05, max=1),
            retry=retry_if_result(_is_transient),
            retry_error_callback=lambda state: None if state.outcome is None else state.outcome.result(),
        )
        execution: Execution = await retrying(one_try)
        return execution

    async def _try(self, handler: Handler, work: Work, payload: object) -> Execution:
        envelope = work.envelope or envelope_of(work)
        attempt = Attempt(work.id, work.key, work.attempt + 1, work.run_no, envelope, work.owner)
        argument = Message(payload, work.key, envelope) if handler.wants_message else payload
        try:
            if handler.effect is Effect.TRANSACTIONAL:
                return await self._transactional(handler, work, attempt, argument)
            return await self._idempotent(handler, work, attempt, argument)
        except Exception as error:  # noqa: BLE001 - the edge: whatever a handler raises is classified
            return Failed(self._classifier.classify(error))

    async def _transactional(
        self, handler: Handler, work: Work, attempt: Attempt, argument: object
    ) -> Execution:
        async with self._session() as session:
            context = [Tx(session, attempt, self._outbox)] if handler.wants_context else []
            returned = await self._bounded(handler, work, attempt, argument, *context)
            session.check_transaction()
            await session.flush()
            done = _done(handler, returned)
            promoted = await self._settles.settle_in(
                session,
                work,
                done.state,
                result=done.result,
                reason_code=done.reason_code,
                detail=done.detail,
            )
            if promoted is None:
                await session.end_with_rollback()
                return Dropped()
            crash_point(CrashPoint.SETTLED_BEFORE_COMMIT)
            await session.end_with_commit()
        return Committed(done.state, promoted, done.reason_code)

    async def _idempotent(
        self, handler: Handler, work: Work, attempt: Attempt, argument: object
    ) -> Execution:
        committed: Committed | None = None
        is_dropped = False

        @asynccontextmanager
        async def settling() -> AsyncIterator[HandlerSession]:
            nonlocal committed, is_dropped
            if committed is not None or is_dropped:
                raise UsageError("call.transaction() ends the task: it can be used once, as the last act")
            async with self._session() as session:
                yield session
                session.check_transaction()
                await session.flush()
                promoted = await self._settles.settle_in(session, work, TaskState.SUCCEEDED)
                if promoted is None:
                    is_dropped = True
                    await session.end_with_rollback()
                    raise _TokenGone
                crash_point(CrashPoint.SETTLED_BEFORE_COMMIT)
                await session.end_with_commit()
                committed = Committed(TaskState.SUCCEEDED, promoted)

        def report(progress: Mapping[str, object]) -> None:
            self._report_progress(work, progress)

        call = Call(attempt, outbox=self._outbox, settling=settling, report=report)
        context = [call] if handler.wants_context else []
        try:
            returned = await self._bounded(handler, work, attempt, argument, *context)
        except Exception:
            if committed is None and not is_dropped:
                raise
            returned = None  # the task has ended: what the handler does afterwards cannot undo it
        if is_dropped:
            return Dropped()
        return committed if committed is not None else _done(handler, returned)

    @asynccontextmanager
    async def _session(self) -> AsyncIterator[HandlerSession]:
        """A fresh session in a transaction; closing it rolls back what was not committed."""
        async with HandlerSession(self._database.engine, expire_on_commit=False) as session:
            await session.begin_for_handler()
            yield session

    async def _bounded(
        self, handler: Handler, work: Work, attempt: Attempt, argument: object, *context: object
    ) -> object:
        """The handler inside its middleware, stopped by its timeout or the task's deadline."""
        injected = {name: self._resources[cls] for name, cls in handler.resources.items()}

        async def innermost() -> object:
            return await handler.function(argument, *context, **injected)

        run: Callable[[], Awaitable[object]] = innermost
        for middleware in reversed(self._app.middlewares):
            run = _wrapped(middleware, attempt, run)
        seconds = handler.timeout.total_seconds()
        left = _seconds_left(work)
        is_deadline = left is not None and left < seconds
        bound = asyncio.timeout(seconds if left is None else min(seconds, left))
        try:
            async with bound:
                return await run()
        except TimeoutError as error:
            if not bound.expired():
                raise
            if is_deadline:
                raise DeadlinePassed(f"{handler.name} was stopped at the task's deadline") from error
            raise HandlerTimeout(f"{handler.name} was stopped after {seconds:g} s") from error

    def _unknown_type(self, work: Work) -> Failure:
        """Held for a rolling deploy, dead after a set age."""
        is_too_old = work.age_seconds >= self._unknown_max_age.total_seconds()
        return Failure(
            kind="dead" if is_too_old else "retry",
            scope="message" if is_too_old else "configuration",
            reason_code=UNKNOWN_TYPE,
            error_class="UnknownType",
            error_message=f"{self._app.name} has no handler for {work.type!r}: deploy one, or app.ignore it",
            fingerprint=f"{UNKNOWN_TYPE}:{work.type}"[:64],
        )


def _seconds_left(work: Work) -> float | None:
    """Until its deadline; the clock of the database told it at the claim."""
    if work.deadline_seconds is None:
        return None
    return work.deadline_seconds - (time.monotonic() - work.claimed_at)


def _is_transient(execution: Execution) -> bool:
    return isinstance(execution, Failed) and execution.failure.in_place


def _wrapped(
    middleware: Callable[[Attempt, Callable[[], Awaitable[object]]], Awaitable[object]],
    attempt: Attempt,
    run: Callable[[], Awaitable[object]],
) -> Callable[[], Awaitable[object]]:
    return lambda: middleware(attempt, run)


def _decode(handler: Handler, work: Work) -> object:
    if handler.payload_class is None:
        return work.payload
    return decode(handler.payload_class, work.payload, work.content_type or "")


def _done(handler: Handler, returned: object) -> Done:
    if isinstance(returned, Reject):
        return Done(TaskState.FAILED, None, returned.reason, redact(returned.detail) or None)
    if returned is None:
        return Done(TaskState.SUCCEEDED)
    try:
        return Done(TaskState.SUCCEEDED, _result_encoder.encode(returned))
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"{handler.name} returned {type(returned).__name__}: return JSON values or None"
        ) from error
