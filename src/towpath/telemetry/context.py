"""Trace context in message headers and rows: W3C `traceparent` and `tracestate`, nothing else.

Baggage is not carried: it may hold anything. Source: https://www.w3.org/TR/trace-context/
"""

import re
from typing import Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanContext, TraceFlags, Tracer, TraceState
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from towpath.messages.headers import TRACEPARENT, TRACESTATE, Headers
from towpath.telemetry.names import SCHEMA_URL, SCOPE

ROOT: Final = Context()
_PROPAGATOR: Final = TraceContextTextMapPropagator()
_VERSION_0: Final = re.compile(rb"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")


def tracer() -> Tracer:
    """The tracer of this library, under the conventions that its spans follow."""
    return trace.get_tracer(SCOPE, schema_url=SCHEMA_URL)


def headers_of(span: Span) -> Headers:
    """The span's context as headers; empty if it is not valid."""
    context = span.get_span_context()
    if not context.is_valid:
        return ()
    parent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
    headers = ((TRACEPARENT, parent.encode()),)
    state = context.trace_state.to_header() if context.trace_state else ""
    return (*headers, (TRACESTATE, state.encode())) if state else headers


def inject() -> Headers:
    """The current trace context as `traceparent` and `tracestate` headers; empty outside a trace."""
    return headers_of(trace.get_current_span())


def has_sdk() -> bool:
    """Whether spans go anywhere; without an SDK the work of describing them is left out."""
    provider = trace.get_tracer_provider()  # looks at the environment each time: ask once for many
    return not isinstance(provider, (trace.ProxyTracerProvider, trace.NoOpTracerProvider))


def extract(headers: Headers) -> Context:
    """The context a message carries, as a remote parent; an empty one if absent or malformed."""
    context = span_context(headers)
    return ROOT if context is None else parent_of(context)


def parent_of(context: SpanContext) -> Context:
    """A context in which new spans become children of `context`."""
    return trace.set_span_in_context(trace.NonRecordingSpan(context), ROOT)


def span_context(headers: Headers) -> SpanContext | None:
    """The span that created the message, or None if the headers carry no valid context."""
    parent = state = None
    for name, value in headers:
        if name == TRACEPARENT and parent is None:
            parent = value
        elif name == TRACESTATE and state is None:
            state = value
    if parent is None:
        return None
    match = _VERSION_0.fullmatch(parent)
    if match is None:
        return _of_another_version(parent, state)
    context = SpanContext(
        int(match[1], 16),
        int(match[2], 16),
        is_remote=True,
        trace_flags=TraceFlags(int(match[3], 16)),
        trace_state=None if state is None else TraceState.from_header([state.decode("ascii", "replace")]),
    )
    return context if context.is_valid else None


def _of_another_version(parent: bytes, state: bytes | None) -> SpanContext | None:
    """What OpenTelemetry makes of it: later versions may be longer, everything else is malformed."""
    carrier = {TRACEPARENT: parent.decode("ascii", "replace")}
    if state is not None:
        carrier[TRACESTATE] = state.decode("ascii", "replace")
    found = trace.get_current_span(_PROPAGATOR.extract(carrier, context=ROOT)).get_span_context()
    return found if found.is_valid else None


def trace_id_of(source: Headers | str | None) -> str | None:
    """The trace id, 32 hex digits, of headers or of a `traceparent`; None if there is no valid one."""
    if source is None:
        return None
    if isinstance(source, str):
        parent = source.encode("utf-8", "replace")
        match = _VERSION_0.fullmatch(parent)
        if match is not None and match[1].strip(b"0") and match[2].strip(b"0"):
            found: bytes = match[1]
            return found.decode()  # as below, at a tenth of the cost
        source = ((TRACEPARENT, parent),)
    context = span_context(source)
    return None if context is None else trace.format_trace_id(context.trace_id)


def traceparent_of(headers: Headers) -> str | None:
    """The `traceparent` value of headers, for the `trace` columns; None if absent or malformed."""
    context = span_context(headers)
    if context is None:
        return None
    return headers_of(trace.NonRecordingSpan(context))[0][1].decode()


def current_traceparent() -> str | None:
    """The current context as a `traceparent` value, for the `trace` columns."""
    headers = inject()
    return headers[0][1].decode() if headers else None


def current_trace_id() -> str | None:
    """The trace id of the current span, 32 hex digits."""
    context = trace.get_current_span().get_span_context()
    return trace.format_trace_id(context.trace_id) if context.is_valid else None
