"""Spans of a message's life: OpenTelemetry's API only, which does nothing until an SDK is set up.

The context of the span that created a message (`create`) is stored with its row, copied to the
broker's headers unchanged, and stored again while the message waits. Every later span of the
message (each `process`, `replay`) is a child of that context and the relay's `send` links to it, so
one trace id leads from the producer through retries to the last replay.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from types import MappingProxyType
from typing import Final, Self
from uuid import UUID

from opentelemetry import trace
from opentelemetry.context import attach, detach
from opentelemetry.trace import Span, SpanContext, SpanKind, StatusCode

from towpath.failures import Failure, describe
from towpath.messages.headers import Headers
from towpath.telemetry.context import (
    ROOT,
    current_trace_id,
    current_traceparent,
    extract,
    has_sdk,
    headers_of,
    inject,
    parent_of,
    span_context,
    trace_id_of,
    traceparent_of,
    tracer,
)
from towpath.telemetry.names import OUTBOX_SYSTEM, attributes

__all__ = [
    "ProcessSpan",
    "creation_headers",
    "current_trace_id",
    "current_traceparent",
    "extract",
    "inject",
    "mark_failed",
    "process_span",
    "replay_span",
    "span_context",
    "trace_id_of",
    "traceparent_of",
]

_TRACER: Final = tracer()


def creation_headers(*, destination: str, type_: str, message_id: UUID) -> Headers:
    """Record the `create` span of a message, below the current span, and return its context.

    Without an SDK it is the current context, if any: a producer that is not traced itself passes
    on what it was given. Around 50 µs when sampled, 2 µs without an SDK.
    """
    if not has_sdk():
        return inject()
    span = _TRACER.start_span(
        f"create {destination}",
        kind=SpanKind.PRODUCER,
        attributes=attributes(
            system=OUTBOX_SYSTEM,
            operation="create",
            operation_type="create",
            destination=destination,
            message_id=str(message_id),
            type=type_,
        ),
    )
    span.end()
    return headers_of(span)


class ProcessSpan:
    """The span of one attempt, to be told what became of it.

    As a context manager it is current inside the block and ends behind it; an exception marks it as
    failed and goes on. Elsewhere `current` is a block in which it is current, and `end` or `abort` end it.
    """

    __slots__ = ("_headers", "current", "span")

    def __init__(self, span: Span, headers: Headers) -> None:
        self.span = span
        self._headers = headers
        self.current = _Current(span)
        """A block in which it is the current span of the task."""

    @property
    def trace_id(self) -> str | None:
        """32 hex digits, also when the span is not recorded."""
        context = self.span.get_span_context()
        return trace.format_trace_id(context.trace_id) if context.is_valid else None

    @property
    def traceparent(self) -> str | None:
        """What later attempts of the message hang on: its creation context, else this span."""
        own = headers_of(self.span)
        return traceparent_of(self._headers) or (own[0][1].decode() if own else None)

    def settled(self, outcome: str, reason: str | None = None) -> None:
        """What the attempt ended in: `succeeded`, `failed`, `retry`, `snooze`, `dead`, …"""
        if self.span.is_recording():
            self.span.set_attributes(attributes(outcome=outcome, reason=reason))

    def failed(self, failure: Failure) -> None:
        """Why the attempt failed: class, code and redacted message; never a traceback."""
        if self.span.is_recording():
            self.span.set_attributes(attributes(reason=failure.reason_code, error_type=failure.error_class))
            self.span.set_status(StatusCode.ERROR, failure.error_message)

    def retry_scheduled(self, delay: timedelta) -> None:
        """When it comes again."""
        if self.span.is_recording():
            self.span.add_event("task.retry_scheduled", {"delay_seconds": delay.total_seconds()})

    def end(self) -> None:
        """It is over."""
        self.span.end()

    def abort(self, error: BaseException) -> None:
        """It is over, by an exception."""
        mark_failed(self.span, error)
        self.span.end()

    def __enter__(self) -> Self:
        self.current.__enter__()
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self.current.__exit__()
        if error is None:
            self.end()
        else:
            self.abort(error)


class _Current:
    """Like `trace.use_span`, at a third of its cost."""

    __slots__ = ("_span", "_token")

    def __init__(self, span: Span) -> None:
        self._span = span

    def __enter__(self) -> None:
        self._token = attach(trace.set_span_in_context(self._span))

    def __exit__(self, *_: object) -> None:
        detach(self._token)


class _RemoteSpan(trace.NonRecordingSpan):
    """The creation context of a message as a span, read from its headers when somebody asks."""

    def __init__(self, headers: Headers) -> None:
        super().__init__(trace.INVALID_SPAN_CONTEXT)
        self._headers = headers
        self._is_read = False

    def get_span_context(self) -> SpanContext:
        if not self._is_read:
            self._context = span_context(self._headers) or self._context
            self._is_read = True
        return self._context


def process_span(
    headers: Headers,
    *,
    destination: str,
    group: str,
    message_id: UUID,
    type_: str,
    attempt: int = 1,
    run_no: int = 0,
    trigger: str = "broker",
    labels: Mapping[str, str | int] = MappingProxyType({}),
    is_traced: bool | None = None,
) -> ProcessSpan:
    """Start the span of one attempt, below the message's creation context; `labels` tell the broker.

    Without an SDK nothing is read or described until a log line or a message that the handler emits asks
    for the context. Who starts many says whether there is one: to ask costs as much as all the rest.
    """
    if not (has_sdk() if is_traced is None else is_traced):
        return ProcessSpan(_RemoteSpan(headers), headers)
    remote = span_context(headers)
    span = _TRACER.start_span(
        f"process {destination}",
        context=ROOT if remote is None else parent_of(remote),
        kind=SpanKind.CONSUMER,
        attributes=attributes(
            **labels,
            operation="process",
            operation_type="process",
            destination=destination,
            group=group,
            message_id=str(message_id),
            type=type_,
            trigger=trigger,
            attempt=attempt,
            run_no=run_no,
        ),
    )
    return ProcessSpan(span, headers)


@contextmanager
def replay_span(
    headers: Headers, *, destination: str, group: str, message_id: UUID, type_: str | None, actor: str
) -> Iterator[Span]:
    """An operator's replay of one dead letter, below the message's creation context."""
    span = _TRACER.start_span(
        f"replay {destination}",
        context=extract(headers),
        kind=SpanKind.INTERNAL,
        attributes=attributes(
            destination=destination, group=group, message_id=str(message_id), type=type_, actor=actor
        ),
    )
    with _current(span):
        yield span


def mark_failed(span: Span, error: BaseException) -> None:
    """Set the span's status from an exception: class and redacted message, no traceback."""
    if span.is_recording():
        span.set_attributes(attributes(error_type=type(error).__qualname__))
        span.set_status(StatusCode.ERROR, describe(error))


@contextmanager
def _current(span: Span) -> Iterator[None]:
    """Make the span current, end it, and mark it failed by whatever leaves the block."""
    with trace.use_span(span, end_on_exit=True, record_exception=False, set_status_on_exception=False):
        try:
            yield
        except BaseException as error:
            mark_failed(span, error)
            raise
