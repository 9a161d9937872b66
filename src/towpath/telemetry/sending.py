"""Spans of the relay: one per window, and a share of it below each sampled message's creation."""

import time
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, Protocol
from uuid import UUID

from opentelemetry import trace
from opentelemetry.trace import Link, Span, SpanKind, StatusCode

from towpath.failures import redact
from towpath.messages.headers import TRACEPARENT, Headers
from towpath.telemetry.context import extract, has_sdk, span_context
from towpath.telemetry.names import SCOPE, SEND_WINDOW, attributes

MAX_LINKS: Final = 128
"""As many as the SDK keeps by default."""
_SAMPLED_FLAG: Final = 1
_CODE_LIMIT: Final = 100


class SentMessage(Protocol):
    """The part of an outbound message that a span tells."""

    @property
    def message_id(self) -> UUID: ...

    @property
    def address(self) -> str: ...

    @property
    def type(self) -> str: ...

    @property
    def headers(self) -> Headers: ...


@dataclass(slots=True)
class SentWindow:
    """What became of a window; fill it in before the block ends."""

    acknowledged: AbstractSet[int] = frozenset()
    """Indexes into the window."""
    refused: Mapping[int, str] = field(default_factory=dict)
    """Reason codes by index."""
    error: str | None = None
    """A short code, set when the broker went away or the deadline passed."""


class SendTracer:
    """Traces the windows of one publisher; not shared between threads.

    A span per sampled message would cost more than publishing it, so they are limited to
    `spans_per_second` with bursts of `burst`; above that a message shows in its trace by its
    `create` and `process` spans only. Without an SDK a window costs nothing per message.
    """

    def __init__(self, system: str, *, spans_per_second: float = 500, burst: float = 2000) -> None:
        self._system = system
        self._rate = spans_per_second
        self._burst = burst
        self._budget = burst
        self._refilled_at = time.monotonic()
        self._tracer = trace.get_tracer(SCOPE)

    @contextmanager
    def window(self, messages: Sequence[SentMessage]) -> Iterator[SentWindow]:
        """The span around publishing `messages`, current inside the block."""
        outcome = SentWindow()
        if not has_sdk():
            yield outcome
            return
        traced = self._within_budget(
            [index for index, message in enumerate(messages) if _is_sampled(message)]
        )
        started_at = time.time_ns()
        with self._tracer.start_as_current_span(
            SEND_WINDOW.name,
            kind=SpanKind.CLIENT,
            links=self._links(messages, traced),
            attributes=attributes(
                system=self._system, operation="send", operation_type="send", batch_count=len(messages)
            ),
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            try:
                yield outcome
            except BaseException as error:
                outcome.error = outcome.error or type(error).__qualname__
                raise
            finally:
                self._finish(span, messages, traced, outcome, started_at)

    def _finish(
        self,
        window: Span,
        messages: Sequence[SentMessage],
        traced: Sequence[int],
        outcome: SentWindow,
        started_at: int,
    ) -> None:
        if outcome.error is not None:
            outcome.error = redact(outcome.error, limit=_CODE_LIMIT)
            window.set_attributes(attributes(error_type=outcome.error))
            window.set_status(StatusCode.ERROR, outcome.error)
        link = [Link(window.get_span_context())] if window.get_span_context().is_valid else []
        for index in traced:
            self._finish_message(messages[index], index, outcome, link, started_at)

    def _finish_message(
        self, message: SentMessage, index: int, outcome: SentWindow, link: list[Link], started_at: int
    ) -> None:
        failure = outcome.refused.get(index)
        if failure is None and index not in outcome.acknowledged:
            failure = outcome.error or "unknown_outcome"
        if failure is not None:
            failure = redact(failure, limit=_CODE_LIMIT)
        span = self._tracer.start_span(
            f"send {message.address}",
            context=extract(message.headers),
            kind=SpanKind.CLIENT,
            links=link,
            attributes=attributes(
                system=self._system,
                operation="send",
                operation_type="send",
                destination=message.address,
                message_id=str(message.message_id),
                type=message.type,
                error_type=failure,
            ),
            start_time=started_at,
        )
        if failure is not None:
            span.set_status(StatusCode.ERROR, failure)
        span.end()

    def _links(self, messages: Sequence[SentMessage], traced: Sequence[int]) -> list[Link]:
        contexts = (span_context(messages[index].headers) for index in traced[:MAX_LINKS])
        return [Link(context) for context in contexts if context is not None]

    def _within_budget(self, indexes: list[int]) -> list[int]:
        now = time.monotonic()
        self._budget = min(self._burst, self._budget + (now - self._refilled_at) * self._rate)
        self._refilled_at = now
        allowed = indexes[: int(self._budget)]
        self._budget -= len(allowed)
        return allowed


def _is_sampled(message: SentMessage) -> bool:
    for name, value in reversed(message.headers):
        if name == TRACEPARENT:
            try:
                return bool(int(value[53:55], 16) & _SAMPLED_FLAG)
            except ValueError:
                return False
    return False
