"""Logs as JSON facts with trace ids, one object a line.

Ours are events of `events.EVENTS` with fields; other libraries' messages are passed through
redacted. Payloads, secrets and values inside tracebacks never appear: of an exception the class,
the redacted message, the fingerprint and the frames are written, not the source lines.
"""

import json
import logging
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final, Literal, TextIO

from opentelemetry import trace

from towpath.failures import describe, fingerprint, redact
from towpath.failures.text import class_name

FIELDS_ATTRIBUTE: Final = "towpath_fields"
_TEXT_LIMIT: Final = 500
_STACK_LIMIT: Final = 30
_QUIET_SECONDS: Final = 60.0
_NEVER_SHOWN: Final = ("payload", "body", "password", "secret", "credential", "authorization", "dsn")


class EventLogger:
    """Logs events by name: `log.info("task.retry_scheduled", group="billing", attempt=2)`."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger

    def debug(self, event: str, **fields: object) -> None:
        """For whoever debugs this library."""
        self._log(logging.DEBUG, event, fields)

    def info(self, event: str, **fields: object) -> None:
        """Normal life."""
        self._log(logging.INFO, event, fields)

    def warning(self, event: str, **fields: object) -> None:
        """Something failed and is being dealt with."""
        self._log(logging.WARNING, event, fields)

    def error(self, event: str, *, exc: BaseException | None = None, **fields: object) -> None:
        """A person should look."""
        self._log(logging.ERROR, event, fields, exc)

    def _log(
        self, level: int, event: str, fields: Mapping[str, object], exc: BaseException | None = None
    ) -> None:
        if self._logger.isEnabledFor(level):
            self._logger.log(level, event, exc_info=exc, extra={FIELDS_ATTRIBUTE: fields}, stacklevel=3)


def event_logger(name: str) -> EventLogger:
    """A logger for one module: `log = event_logger(__name__)`."""
    return EventLogger(logging.getLogger(name))


log = event_logger(__name__)


def facts(record: logging.LogRecord) -> dict[str, object]:
    """A log record as the object that is written: time, level, event, fields, trace."""
    fields: Mapping[str, object] | None = getattr(record, FIELDS_ATTRIBUTE, None)
    fact: dict[str, object] = {
        "at": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
        "level": record.levelname.lower(),
        "logger": record.name,
    }
    if fields is None:
        fact["event"] = "log"
        fact["message"] = redact(record.getMessage(), limit=_TEXT_LIMIT)
    else:
        fact["event"] = record.msg
        fact.update({name: _shown(name, value) for name, value in fields.items() if name not in fact})
    context = trace.get_current_span().get_span_context()
    if context.is_valid:
        fact["trace_id"] = trace.format_trace_id(context.trace_id)
        fact["span_id"] = trace.format_span_id(context.span_id)
    if record.exc_info and record.exc_info[1] is not None:
        fact["error"] = _error(record.exc_info[1])
    return fact


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        return json.dumps(facts(record), ensure_ascii=False, default=str)


class _OncePerMinute(logging.Filter):
    """Lets one line a minute of OpenTelemetry through: a backend that is away is told of at every export."""

    def __init__(self) -> None:
        super().__init__()
        self._next_at = float("-inf")

    def filter(self, record: logging.LogRecord) -> bool:
        if not record.name.startswith("opentelemetry"):
            return True
        now = time.monotonic()
        is_due = now >= self._next_at
        if is_due:
            self._next_at = now + _QUIET_SECONDS
        return is_due


class TextFormatter(logging.Formatter):
    """The same facts for people: `12:00:01 info task.died group=billing reason=http_400`."""

    def format(self, record: logging.LogRecord) -> str:
        fact = facts(record)
        time, level, event = str(fact.pop("at"))[11:19], fact.pop("level"), fact.pop("event")
        fact.pop("logger")
        fact.pop("span_id", None)
        message = fact.pop("message", None)
        pairs = [f"{name}={value}" for name, value in fact.items()]
        return " ".join(str(part) for part in (time, level, event, message, *pairs) if part is not None)


def setup_logging(
    *, level: str = "INFO", format_: Literal["json", "text"] = "json", stream: TextIO | None = None
) -> None:
    """Send the root logger to `stream` (standard error) in one of the formats; replaces handlers.

    Warnings and errors that nobody handles go there too: Python would print them as they are.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if format_ == "json" else TextFormatter())
    handler.addFilter(_OncePerMinute())
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level)
    logging.captureWarnings(capture=True)
    sys.excepthook = lambda _, error, __: _log_crash(error, "main")
    threading.excepthook = lambda crash: _log_crash(
        crash.exc_value, "" if crash.thread is None else crash.thread.name
    )
    for chatty in ("aiokafka", "aio_pika", "aiormq", "asyncio", "uvicorn.access", "opentelemetry"):
        logging.getLogger(chatty).setLevel(max(logging.WARNING, root.level))


def _log_crash(error: BaseException | None, thread: str) -> None:
    if not isinstance(error, SystemExit | KeyboardInterrupt):
        log.error("service.crashed", exc=error, thread=thread)


def _shown(name: str, value: object) -> object:
    """A field's value as JSON may hold it, redacted; what looks like a payload is withheld."""
    lower = name.lower()
    if isinstance(value, bytes | bytearray | memoryview):
        return f"<{len(value)} bytes>"
    if any(part in lower for part in _NEVER_SHOWN):
        return "[redacted]"
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, BaseException):
        return f"{class_name(value)}: {describe(value)}"
    if isinstance(value, list | tuple | set | frozenset):
        return [_shown(name, item) for item in list(value)[:50]]
    return redact(str(value), limit=_TEXT_LIMIT)


def _error(error: BaseException) -> dict[str, Any]:
    frames = traceback.extract_tb(error.__traceback__)[-_STACK_LIMIT:]
    return {
        "class": class_name(error),
        "message": describe(error),
        "fingerprint": fingerprint(error),
        "stack": [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames],
    }
