"""Calling a handler: decode, inject, wrap in middleware, bound in time."""

import asyncio
import time
import types
from collections.abc import Awaitable, Callable, Generator, Mapping
from functools import partial
from typing import Any

from towpath.app import App
from towpath.consumer.effects.threads import in_thread
from towpath.consumer.effects.timeouts import Timeouts
from towpath.context import Attempt
from towpath.errors import DeadlinePassed, HandlerCancelled, HandlerTimeout
from towpath.handlers import Handler
from towpath.messages import Message, decode
from towpath.outbox.rows import CausedBy
from towpath.store.work import Work, envelope_of


class Caller:
    """Calls handlers of one group with the resources of one process."""

    def __init__(self, app: App, resources: Mapping[type, object]) -> None:
        self.group = app.name
        self._app = app
        self._resources = resources
        self._timeouts = Timeouts()

    async def call(
        self, handler: Handler, work: Work, attempt: Attempt, argument: object, *context: object
    ) -> object:
        """The handler inside its middleware, stopped by its timeout or the task's deadline.

        Raises what the handler raises, HandlerTimeout, DeadlinePassed or HandlerCancelled.
        """
        injected = self.resources_of(handler.resources)
        innermost: Callable[[], Awaitable[object]] = partial(handler.function, argument, *context, **injected)
        if handler.is_sync:
            innermost = partial(in_thread, innermost, handler.name)
        with CausedBy(work.id):
            return await self.wrapped(handler, work, attempt, innermost)

    async def wrapped(
        self, handler: Handler, work: Work, attempt: Attempt, innermost: Callable[[], Awaitable[object]]
    ) -> object:
        """A call of one's own inside the group's middleware, bounded like any."""
        run = innermost
        for middleware in reversed(self._app.middlewares):
            run = _wrapped(middleware, attempt, run)
        try:
            return await self.bounded(handler, run, seconds_left(work))
        except asyncio.CancelledError as error:
            if is_being_cancelled():
                raise
            raise HandlerCancelled(f"{handler.name}: what it waited for was cancelled") from error

    async def bounded(
        self, handler: Handler, run: Callable[[], Awaitable[object]], left_seconds: float | None
    ) -> object:
        """Stop it after the handler's timeout, or at the task's deadline where that is sooner."""
        steps = run().__await__()
        try:
            first = next(steps)  # most handlers that compute end here: for them there is nothing to stop
        except StopIteration as end:
            return end.value
        seconds = handler.timeout.total_seconds()
        is_deadline = left_seconds is not None and left_seconds < seconds
        bound = self._timeouts.after(seconds if left_seconds is None else min(seconds, left_seconds))
        try:
            with bound:
                return await _rest(steps, first)
        except TimeoutError as error:
            if not bound.is_expired:
                raise
            if is_deadline:
                raise DeadlinePassed(f"{handler.name} was stopped at the task's deadline") from error
            raise HandlerTimeout(f"{handler.name} was stopped after {seconds:g} s") from error

    def resources_of(self, wanted: Mapping[str, type]) -> dict[str, object]:
        """Keyword arguments for the parameters that ask for a resource."""
        return {name: self._resources[cls] for name, cls in wanted.items()}


def is_being_cancelled() -> bool:
    """Whether somebody wants the current task to end."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


@types.coroutine
def _rest(steps: Generator[Any, Any, object], yielded: Any) -> Generator[Any, Any, object]:
    """What `yield from` does, for what has made its first step already."""
    try:
        while True:
            try:
                sent = yield yielded
            except BaseException as error:  # noqa: BLE001 - a cancellation is the handler's to see
                yielded = steps.throw(error)
            else:
                yielded = steps.send(sent)
    except StopIteration as end:
        return end.value


def attempt_of(work: Work) -> Attempt:
    """What a handler may know of the attempt."""
    envelope = work.envelope or envelope_of(work)
    return Attempt(work.id, work.key, work.attempt + 1, work.run_no, envelope, work.owner)


def argument_of(handler: Handler, payload: object, attempt: Attempt) -> object:
    """The handler's first argument: the payload, with metadata where it asks for `Message[…]`."""
    return Message(payload, attempt.key, attempt.envelope) if handler.wants_message else payload


def payload_of(handler: Handler, work: Work) -> object:
    """The decoded payload. Raises DecodeError."""
    if handler.payload_class is None or (handler.takes_null and work.payload is None):
        return work.payload
    return decode(handler.payload_class, work.payload, work.content_type or "")


def seconds_left(work: Work) -> float | None:
    """Until its deadline; the clock of the database told it at the claim."""
    if work.deadline_seconds is None:
        return None
    return work.deadline_seconds - (time.monotonic() - work.claimed_at)


def _wrapped(
    middleware: Callable[[Attempt, Callable[[], Awaitable[object]]], Awaitable[object]],
    attempt: Attempt,
    run: Callable[[], Awaitable[object]],
) -> Callable[[], Awaitable[object]]:
    return lambda: middleware(attempt, run)
