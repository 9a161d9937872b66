"""Logs are JSON facts; payloads and secrets are not among them."""

import io
import json
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from pydantic import SecretStr

from towpath.telemetry import logging as telemetry_logging
from towpath.telemetry.logging import JsonFormatter, TextFormatter, event_logger, setup_logging

CANARY = "c4n4ry-s3cr3t"
Lines = Callable[[], list[dict[str, Any]]]


@pytest.fixture
def lines() -> Iterator[Lines]:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    logger = logging.getLogger("towpath.test_logging")
    logger.propagate = False
    logger.setLevel(logging.DEBUG)
    logger.addHandler(handler)
    yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    logger.removeHandler(handler)


log = event_logger("towpath.test_logging")


def test_a_fact_is_one_json_object_with_its_fields(lines: Lines) -> None:
    log.info("task.retry_scheduled", group="billing", attempt=2, delay_seconds=1.5, reason=None)
    (fact,) = lines()
    assert fact.pop("at").endswith("+00:00")
    assert fact == {
        "level": "info",
        "logger": "towpath.test_logging",
        "event": "task.retry_scheduled",
        "group": "billing",
        "attempt": 2,
        "delay_seconds": 1.5,
        "reason": None,
    }


def test_it_carries_the_ids_of_the_current_span(lines: Lines, spans: InMemorySpanExporter) -> None:
    """O4"""
    with trace.get_tracer("test").start_as_current_span("work") as span:
        log.info("task.snoozed")
    (fact,) = lines()
    assert fact["trace_id"] == trace.format_trace_id(span.get_span_context().trace_id)
    assert fact["span_id"] == trace.format_span_id(span.get_span_context().span_id)


def test_an_error_shows_class_message_and_frames_but_no_values(lines: Lines) -> None:
    """X3"""

    def connect(dsn: str) -> None:
        raise ConnectionError(f"cannot reach {dsn}")

    try:
        connect(f"postgresql://app:{CANARY}@db/app")
    except ConnectionError as error:
        log.error("task.settle_failed", exc=error, group="billing")  # noqa: TRY400 - an event, not a logger's
    (fact,) = lines()
    assert fact["error"]["class"] == "ConnectionError"
    assert fact["error"]["message"] == "cannot reach postgresql://[redacted]@db/app"
    assert any(frame.endswith(" connect") for frame in fact["error"]["stack"])
    assert CANARY not in json.dumps(fact)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("payload", CANARY),
        ("request_body", CANARY),
        ("password", CANARY),
        ("dsn", CANARY),
        ("data", CANARY.encode()),
        ("headers", [("authorization", CANARY.encode())]),
        ("error", ValueError(f"token={CANARY}")),
        ("url", f"amqp://app:{CANARY}@rabbit"),
        ("setting", SecretStr(CANARY)),
        ("values", {"nested": f"password={CANARY}"}),
    ],
)
def test_a_secret_or_payload_given_by_mistake_is_withheld(lines: Lines, field: str, value: object) -> None:
    """X3"""
    log.warning("task.died", **{field: value})
    assert CANARY not in json.dumps(lines())


def test_a_field_cannot_replace_what_the_formatter_writes(lines: Lines) -> None:
    log.info("task.died", level="fake", at="never", message_id="1")
    (fact,) = lines()
    assert (fact["level"], fact["event"], fact["message_id"]) == ("info", "task.died", "1")


def test_what_other_libraries_log_is_redacted_and_kept_to_one_line(lines: Lines) -> None:
    """X3"""
    foreign = logging.getLogger("towpath.test_logging.foreign")
    foreign.warning("connecting to %s\nand more", f"kafka://u:{CANARY}@broker")
    try:
        raise ValueError(f"secret={CANARY}")
    except ValueError:
        foreign.exception("it failed")
    first, second = lines()
    assert first["message"] == "connecting to kafka://[redacted]@broker\nand more"
    assert second["error"]["message"] == "secret=[redacted]"


def test_hostile_text_stays_one_valid_line(lines: Lines) -> None:
    """X6"""
    log.info("task.died", reason="a\nb\x00c\x1b[2J\ud800", type="x" * 100_000)
    (fact,) = lines()
    assert "\x1b" not in fact["reason"]
    assert len(fact["type"]) == 500


def test_text_for_people_has_the_same_facts() -> None:
    record = logging.makeLogRecord(
        {"name": "x", "levelname": "INFO", "msg": "task.died", "towpath_fields": {"group": "billing"}}
    )
    assert TextFormatter().format(record).endswith("info task.died group=billing")


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    """The root logger and Python's last hooks, put back afterwards."""
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    hooks = sys.excepthook, threading.excepthook
    yield root
    sys.excepthook, threading.excepthook = hooks
    logging.captureWarnings(capture=False)
    root.handlers[:] = before
    root.setLevel(level)
    for name in ("aiokafka", "aio_pika", "aiormq", "asyncio", "uvicorn.access", "opentelemetry"):
        logging.getLogger(name).setLevel(logging.NOTSET)


def test_setting_up_replaces_handlers_and_quiets_chatty_libraries(root: logging.Logger) -> None:
    stream = io.StringIO()
    setup_logging(level="DEBUG", stream=stream)
    logging.getLogger("aiokafka.consumer").info("chatter")
    log_elsewhere = event_logger("towpath.elsewhere")
    log_elsewhere.debug("task.parked", group="billing")
    assert len(root.handlers) == 1
    assert [json.loads(line)["event"] for line in stream.getvalue().splitlines()] == ["task.parked"]


@pytest.mark.usefixtures("root")
def test_the_level_holds_for_chatty_libraries_too() -> None:
    stream = io.StringIO()
    setup_logging(level="ERROR", stream=stream)
    logging.getLogger("aiokafka.consumer").warning("chatter")
    logging.getLogger("aiokafka.consumer").error("failed")
    assert [json.loads(line)["level"] for line in stream.getvalue().splitlines()] == ["error"]


@pytest.mark.usefixtures("root")
def test_opentelemetry_gets_one_line_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    """O5: whatever it has to say about a backend that is away."""
    now = 1000.0
    monkeypatch.setattr(telemetry_logging, "time", SimpleNamespace(monotonic=lambda: now))
    stream = io.StringIO()
    setup_logging(stream=stream)
    for _ in range(3):
        logging.getLogger("opentelemetry.exporter.otlp").warning("Transient error")
        logging.getLogger("opentelemetry.sdk.metrics").error("Exception while exporting")
        log_elsewhere = event_logger("towpath.elsewhere")
        log_elsewhere.info("task.parked", group="billing")
        now += 59.0
    loggers = [json.loads(line)["logger"] for line in stream.getvalue().splitlines()]
    assert loggers.count("towpath.elsewhere") == 3
    assert [each for each in loggers if each != "towpath.elsewhere"] == ["opentelemetry.exporter.otlp"] * 2


@pytest.mark.usefixtures("root")
def test_what_nobody_handles_is_logged_as_any_other_error() -> None:
    """X3: of the main program and of threads, without what Python would print."""
    stream = io.StringIO()
    setup_logging(stream=stream)

    def fail() -> None:
        raise ValueError(f"password={CANARY}")

    thread = threading.Thread(target=fail, name="exporter")
    thread.start()
    thread.join()
    with pytest.raises(ValueError, match="password") as caught:
        fail()
    sys.excepthook(caught.type, caught.value, caught.tb)
    facts = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [(fact["event"], fact["thread"]) for fact in facts] == [
        ("service.crashed", "exporter"),
        ("service.crashed", "main"),
    ]
    assert {fact["error"]["message"] for fact in facts} == {"password=[redacted]"}
