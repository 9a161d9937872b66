"""Spans as JSON lines in a file: written by an exporter of the SDK, read back as `SpanRecord`.

Several processes may append to one file: a batch is one write to a file opened for appending. With
a directory instead of a file each process writes its own, `<service>-<pid>.jsonl`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from opentelemetry import trace

from towpath.failures import describe, redact
from towpath.telemetry.logging import event_logger

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

Value = str | int | float | bool
log = event_logger(__name__)


@dataclass(frozen=True, slots=True)
class SpanRecord:
    """A finished span as it stands in a file."""

    trace_id: str
    span_id: str
    parent_id: str | None
    name: str
    kind: str
    service: str
    start_ns: int
    end_ns: int
    status: str = "unset"
    status_message: str = ""
    attributes: Mapping[str, Value] = field(default_factory=dict)
    links: tuple[tuple[str, str], ...] = ()
    """Trace id and span id of each."""

    @property
    def duration_seconds(self) -> float:
        """From start to end."""
        return (self.end_ns - self.start_ns) / 1e9


def line_of(span: ReadableSpan) -> str:
    """A finished span as one line of JSON; texts are redacted once more."""
    context = span.get_span_context()
    trace_id, span_id = (context.trace_id, context.span_id) if context else (0, 0)
    return json.dumps(
        {
            "trace_id": trace.format_trace_id(trace_id),
            "span_id": trace.format_span_id(span_id),
            "parent_id": None if span.parent is None else trace.format_span_id(span.parent.span_id),
            "name": redact(span.name),
            "kind": span.kind.name.lower(),
            "service": str(span.resource.attributes.get("service.name", "")),
            "start_ns": span.start_time or 0,
            "end_ns": span.end_time or span.start_time or 0,
            "status": span.status.status_code.name.lower(),
            "status_message": redact(span.status.description or ""),
            "attributes": {key: _plain(value) for key, value in (span.attributes or {}).items()},
            "links": [
                [trace.format_trace_id(link.context.trace_id), trace.format_span_id(link.context.span_id)]
                for link in span.links
            ],
        },
        ensure_ascii=False,
    )


def path_for(target: Path, service: str) -> Path:
    """The file a process writes to: `target`, or a file of its own in it if it is a directory."""
    return target / f"{service}-{os.getpid()}.jsonl" if target.is_dir() else target


class LineWriter:
    """Appends batches of lines to a file; a disk that fails loses spans and is reported once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._has_failed = False

    def write(self, lines: Sequence[str]) -> bool:
        """Whether it was written. Never raises for the file system's state."""
        data = "".join(f"{line}\n" for line in lines).encode("utf-8", "replace")
        try:
            descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                os.write(descriptor, data)
            finally:
                os.close(descriptor)
        except OSError as error:
            if not self._has_failed:
                log.warning("telemetry.export_failed", error=describe(error), count=len(lines))
            self._has_failed = True
            return False
        self._has_failed = False
        return True


def read_spans(paths: Iterable[Path]) -> Iterator[SpanRecord]:
    """The spans in files and in the `.jsonl` files of directories; lines that are none are skipped.

    A process that was killed may leave half a line at the end of its file.
    """
    for path in paths:
        files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
        for file in files:
            with file.open(encoding="utf-8", errors="replace") as lines:
                for line in lines:
                    record = _record(line)
                    if record is not None:
                        yield record


def _record(line: str) -> SpanRecord | None:
    try:
        values = json.loads(line)
        links = tuple((str(trace_id), str(span_id)) for trace_id, span_id in values.pop("links", ()))
        return SpanRecord(**values, links=links)
    except (ValueError, TypeError, AttributeError):
        return None


def _plain(value: object) -> Value | list[str]:
    if isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, Sequence):
        return [redact(str(item)) for item in value]
    return redact(str(value))
