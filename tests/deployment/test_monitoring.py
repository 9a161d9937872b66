"""Dashboards and alerts: what they ask for exists, and every alert says what to do."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from runpy import run_path
from typing import Any

import promql_parser
import pytest
import yaml
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from prometheus_client import REGISTRY

from towpath.telemetry.metrics import OpenTelemetry
from towpath.telemetry.names import METRICS

ROOT = Path(__file__).parents[2]
FROM_PROMETHEUS = {"up"}
OF_EVERY_TARGET = {"job", "instance", "le"}

ALERTS = [
    rule
    for group in yaml.safe_load((ROOT / "compose/prometheus/alerts.yaml").read_text())["groups"]
    for rule in group["rules"]
]
PANELS = [
    pytest.param(target["expr"], id=f"{path.stem}: {panel['title']} {target['refId']}")
    for path in sorted((ROOT / "compose/grafana/dashboards").glob("*.json"))
    for panel in json.loads(path.read_text())["panels"]
    for target in panel["targets"]
]


@pytest.fixture(scope="module")
def exported() -> dict[str, set[str]]:
    """The labels of every series that the processes can export, by its name in Prometheus."""
    provider = MeterProvider([PrometheusMetricReader()], shutdown_on_exit=False)
    telemetry = OpenTelemetry(meter=provider.get_meter("test"))
    for metric in METRICS:
        labels = dict.fromkeys(metric.attributes, "x")
        report = {"counter": telemetry.add, "histogram": telemetry.record, "gauge": telemetry.set}
        report[metric.kind](metric, 1, **labels)
    series = dict[str, set[str]]()
    for family in REGISTRY.collect():
        for sample in family.samples:
            series.setdefault(sample.name, set()).update(sample.labels)
    provider.shutdown()
    return series | {name: set[str]() for name in FROM_PROMETHEUS}


def nodes(expression: Any) -> Iterator[Any]:
    """An expression and everything in it."""
    yield expression
    for name in ("lhs", "rhs", "expr", "vector_selector"):
        if (inner := getattr(expression, name, None)) is not None:
            yield from nodes(inner)
    for inner in getattr(expression, "args", None) or ():
        yield from nodes(inner)


def check(query: str, exported: dict[str, set[str]]) -> None:
    """Every series that the query names is exported, with the labels it selects or groups by."""
    found = list(nodes(promql_parser.parse(query.replace("$__rate_interval", "5m"))))
    selectors = [node for node in found if isinstance(node, promql_parser.VectorSelector)]
    assert selectors
    offered = set(OF_EVERY_TARGET)
    for selector in selectors:
        assert selector.name in exported, f"nobody exports {selector.name}"
        labels = exported[selector.name] | OF_EVERY_TARGET
        offered |= labels
        for matcher in selector.matchers.matchers:
            assert matcher.name in labels, f"{selector.name} has no label {matcher.name}"
    for node in found:
        if isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
            assert set(node.modifier.labels) <= offered


@pytest.mark.parametrize("query", PANELS)
def test_a_panel_asks_for_metrics_that_exist(query: str, exported: dict[str, set[str]]) -> None:
    """O5"""
    check(query, exported)


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_an_alert_asks_for_metrics_that_exist(rule: dict[str, Any], exported: dict[str, set[str]]) -> None:
    """O5"""
    check(rule["expr"], exported)
    assert rule["labels"]["severity"] in ("warning", "critical")


def test_every_alert_has_its_section_and_every_section_its_alert() -> None:
    """O5"""
    sections = re.findall(r"^## (.+)$", (ROOT / "docs/runbooks.md").read_text(), re.MULTILINE)
    assert sorted(sections) == sorted(rule["alert"] for rule in ALERTS)
    links = {rule["annotations"]["runbook"] for rule in ALERTS}
    assert links == {f"docs/runbooks.md#{section.lower()}" for section in sections}


def test_a_metric_that_does_not_exist_would_be_found(exported: dict[str, set[str]]) -> None:
    with pytest.raises(AssertionError, match="nobody exports towpath_nonsense"):
        check("sum(rate(towpath_nonsense[5m]))", exported)
    with pytest.raises(AssertionError, match="has no label nonsense"):
        check('towpath_tasks_due{nonsense="x"}', exported)
    with pytest.raises(AssertionError):
        check("sum by (nonsense) (towpath_tasks_due)", exported)


def test_the_dashboards_are_as_their_builder_makes_them() -> None:
    made = run_path(str(ROOT / "compose/grafana/build.py"))["files"]()
    kept = {path.name: path.read_text() for path in (ROOT / "compose/grafana/dashboards").glob("*.json")}
    assert kept == made
