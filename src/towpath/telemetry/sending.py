"""The relay's span: one for each window, linked to the creation of its sampled messages."""

import os
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, Protocol
from uuid import UUID

from opentelemetry.trace import Span, SpanKind, StatusCode

from towpath.failures import redact
from towpath.messages.headers import TRACEPARENT, Headers
from towpath.telemetry.context import has_sdk, parent_of, span_context, tracer
from towpath.telemetry.names import attributes

LINK_LIMIT_VARIABLE: Final = "OTEL_SPAN_LINK_COUNT_LIMIT"
_LINK_LIMIT: Final = "128"
"""Of an SDK to which the variable says nothing."""
_SAMPLED_FLAG: Final = 1
_CODE_LIMIT: Final = 100


class SentMessage(Protocol):
    """The part of an outbound message that a span tells."""

    @property
    def message_id(self) -> UUID: ...

    @property
    def address(self) -> str: ...

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
    """Traces the windows of one publisher; `labels` tell the broker.

    A span per sampled message would cost more than publishing it. So a window is one span: the child of
    its first sampled message's creation, hence sampled as that is, and linked to as many of them as the SDK
    keeps links, those that were refused before others. Without an SDK it costs nothing per message.
    """

    def __init__(self, labels: Mapping[str, str | int]) -> None:
        self._labels = labels
        self._tracer = tracer()
        self._link_limit = link_limit()

    @contextmanager
    def window(self, messages: Sequence[SentMessage]) -> Iterator[SentWindow]:
        """The span around publishing `messages`, current inside the block."""
        outcome = SentWindow()
        if not has_sdk():
            yield outcome
            return
        indexes = (index for index, message in enumerate(messages) if _is_sampled(message))
        sampled = list(islice(indexes, self._link_limit))
        first = span_context(messages[sampled[0]].headers) if sampled else None
        destinations = {message.address for message in messages}
        destination = destinations.pop() if len(destinations) == 1 else None
        with self._tracer.start_as_current_span(
            "send" if destination is None else f"send {destination}",
            context=None if first is None else parent_of(first),
            kind=SpanKind.CLIENT,
            attributes=attributes(
                **self._labels,
                operation="send",
                operation_type="send",
                destination=destination,
                batch_count=len(messages),
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
                if span.is_recording():
                    refused = [index for index in outcome.refused if _is_sampled(messages[index])]
                    others = (index for index in sampled if index not in outcome.refused)
                    linked = [*refused, *others][: self._link_limit]
                    _finish(span, messages, linked, outcome, is_mixed=destination is None)


def link_limit() -> int | None:
    """As many links as the SDK keeps by its variable; None: all. What is no number it refuses itself."""
    value = os.environ.get(LINK_LIMIT_VARIABLE, _LINK_LIMIT).strip()
    return int(value) if value.isdecimal() else None


def _finish(
    span: Span,
    messages: Sequence[SentMessage],
    linked: Sequence[int],
    outcome: SentWindow,
    *,
    is_mixed: bool,
) -> None:
    """Link to the messages, each with its own fate, and tell what became of all of them."""
    refused = outcome.refused
    for index in linked:
        message = messages[index]
        if (context := span_context(message.headers)) is not None:
            link = attributes(
                message_id=str(message.message_id),
                destination=message.address if is_mixed else None,
                error_type=_code(refused.get(index)),
            )
            span.add_link(context, link)
    error = outcome.error
    if error is None and refused and not outcome.acknowledged:
        error = next(iter(refused.values()))
    if error is not None:
        outcome.error = _code(error)
        span.set_attributes(attributes(error_type=outcome.error))
        span.set_status(StatusCode.ERROR, outcome.error)


def _code(text: str | None) -> str | None:
    return None if text is None else redact(text, limit=_CODE_LIMIT)


def _is_sampled(message: SentMessage) -> bool:
    for name, value in reversed(message.headers):
        if name == TRACEPARENT:
            try:
                return bool(int(value[53:55], 16) & _SAMPLED_FLAG)
            except ValueError:
                return False
    return False
