"""Logs are JSON facts; payloads and secrets are not among them."""

import io
import json
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from pydantic import SecretStr

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
    """The root logger, put back afterwards."""
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    yield root
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
