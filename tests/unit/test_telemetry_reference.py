"""The list of names is true: documentation is made from it, code uses nothing else."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry.semconv._incubating.attributes import (
    error_attributes,
    messaging_attributes,
    server_attributes,
)
from opentelemetry.semconv._incubating.metrics import messaging_metrics
from opentelemetry.semconv.schemas import Schemas

from towpath.telemetry import names
from towpath.telemetry.events import EVENTS
from towpath.telemetry.names import METRICS, Metric
from towpath.telemetry.reference import TABLES, with_tables

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "telemetry.md"
SOURCES = [
    path for package in ("src", "consumers", "outbox_relay") for path in (ROOT / package).rglob("*.py")
]
LEVELS = {"debug", "info", "warning", "error"}
REPORTS = {"add": "counter", "record": "histogram", "record_all": "histogram", "set": "gauge"}
METRICS_BY_CONSTANT = {
    constant: value for constant, value in vars(names).items() if isinstance(value, Metric)
}


def calls() -> Iterator[tuple[str, ast.Call]]:
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                yield f"{path.relative_to(ROOT)}:{node.lineno}", node


def logged() -> Iterator[tuple[str, str, set[str]]]:
    """Place, event and fields of every `log.info("…", …)`; `**` where it is given a mapping of them, too."""
    for place, call in calls():
        function = call.func
        assert isinstance(function, ast.Attribute)
        owner = function.value
        if (
            isinstance(owner, ast.Name)
            and owner.id in {"log", "_log"}
            and function.attr in LEVELS
            and call.args
            and isinstance(event := call.args[0], ast.Constant)
            and "%" not in str(event.value)
        ):
            yield place, str(event.value), {word.arg or "**" for word in call.keywords} - {"exc"}


def reported() -> Iterator[tuple[str, str, Metric, set[str]]]:
    """Place, method, metric and labels of every `telemetry.add(METRIC, …)`."""
    for place, call in calls():
        function = call.func
        assert isinstance(function, ast.Attribute)
        first = call.args[0] if call.args else None
        constant = first.attr if isinstance(first, ast.Attribute) else getattr(first, "id", "")
        if function.attr in REPORTS and constant in METRICS_BY_CONSTANT:
            labels = {word.arg for word in call.keywords if word.arg}
            yield place, function.attr, METRICS_BY_CONSTANT[constant], labels


def test_the_document_holds_every_table_as_it_is_now() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert all(f"<!-- table: {table} -->" in text for table in TABLES)
    assert text == with_tables(text), "run: python -m towpath.telemetry.reference docs/telemetry.md"


def test_every_event_that_is_logged_is_listed_with_its_fields() -> None:
    found = list(logged())
    assert found
    listed = {event.name: set(event.fields) for event in EVENTS.values()}
    assert [(place, event) for place, event, _ in found if event not in listed] == []
    extra = [(place, event, fields - listed[event] - {"**"}) for place, event, fields in found]
    assert [each for each in extra if each[2]] == []


def test_every_listed_field_of_an_event_is_logged_somewhere() -> None:
    told: dict[str, set[str]] = {}
    for _, event, fields in logged():
        told.setdefault(event, set()).update(fields)
    never = {event.name: set(event.fields) - told[event.name] for event in EVENTS.values()}
    assert {name: fields for name, fields in never.items() if fields and "**" not in told[name]} == {}


def test_every_listed_event_is_logged_somewhere() -> None:
    assert sorted(set(EVENTS) - {event for _, event, _ in logged()}) == []


def test_every_report_uses_a_listed_metric_by_its_kind_and_with_its_labels() -> None:
    wrong = [
        f"{place} {metric.name} {sorted(labels - set(metric.attributes))}"
        for place, method, metric, labels in reported()
        if REPORTS[method] != metric.kind or labels - set(metric.attributes)
    ]
    assert wrong == []


def test_every_listed_metric_is_reported_somewhere_with_all_its_labels() -> None:
    """O5"""
    told: dict[str, set[str]] = {}
    for _, _, metric, labels in reported():
        told.setdefault(metric.name, {"system", "server_address", "server_port"}).update(labels)
    assert sorted({metric.name for metric in METRICS} - told.keys()) == []
    assert [each.name for each in METRICS if set(each.attributes) - told[each.name]] == []


def test_what_is_not_ours_is_spelled_as_in_the_newest_conventions() -> None:
    """After an upgrade of OpenTelemetry: look what its conventions changed, then raise `SCHEMA_URL`."""
    known = {
        value
        for module in (messaging_attributes, messaging_metrics, server_attributes, error_attributes)
        for value in vars(module).values()
        if isinstance(value, str)
    }
    used = {*names.ATTRIBUTES.values(), *(metric.name for metric in METRICS)}
    assert {name for name in used if not name.startswith("towpath.")} <= known
    assert list(Schemas)[-1].value == names.SCHEMA_URL


@pytest.mark.parametrize("event", EVENTS.values(), ids=lambda event: event.name)
def test_each_event_is_a_dotted_past_tense_fact(event: object) -> None:
    name, description = event.name, event.description  # type: ignore[attr-defined]
    noun, _, verb = name.partition(".")
    assert noun.islower()
    assert verb.replace("_", "").isalpha()
    assert description.endswith(".")
