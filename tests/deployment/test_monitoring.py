"""Dashboards and alerts: what they ask for exists, and every alert says what to do."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from runpy import run_path
from typing import Any
from uuid import uuid4

import jsonschema
import promql_parser
import pytest
import yaml
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from prometheus_client import REGISTRY

from tests.deployment.kinds import RULES
from tests.fixtures.images import read
from towpath.consumer.reporting import Report
from towpath.relay.hooks import RelayHooks
from towpath.telemetry.metrics import OpenTelemetry, Telemetry
from towpath.telemetry.names import METRICS, Metric

ROOT = Path(__file__).parents[2]
FROM_PROMETHEUS = {"up"}
OF_EVERY_TARGET = {"job", "instance", "le"}

RULE_FILE = yaml.safe_load((ROOT / "compose/prometheus/alerts.yaml").read_text())
ALERTS = [rule for group in RULE_FILE["groups"] for rule in group["rules"]]
DASHBOARDS = {
    path.stem: json.loads(path.read_text())
    for path in sorted((ROOT / "compose/grafana/dashboards").glob("*.json"))
}
PANELS = [
    pytest.param(target["expr"], target["legendFormat"], id=f"{name}: {panel['title']} {target['refId']}")
    for name, dashboard in DASHBOARDS.items()
    for panel in dashboard["panels"]
    for target in panel["targets"]
]
PROMETHEUS = yaml.safe_load((ROOT / "compose/prometheus/prometheus.yaml").read_text())
JOBS = {each["job_name"] for each in PROMETHEUS["scrape_configs"]}


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


def kept(expression: Any, exported: dict[str, set[str]]) -> set[str]:
    """The labels that what an expression answers can have."""
    match expression:
        case promql_parser.VectorSelector():
            return exported[expression.name] | OF_EVERY_TARGET
        case promql_parser.AggregateExpr():
            return set(expression.modifier.labels) if expression.modifier else set()
        case promql_parser.Call():
            return kept(expression.args[-1], exported) - {"le"}
        case promql_parser.BinaryExpr():
            return kept(expression.lhs, exported)
    return kept(expression.vector_selector, exported)


def check(query: str, exported: dict[str, set[str]]) -> set[str]:
    """Every series that the query names is exported, with the labels it selects or groups by.

    Returns the labels that its answer can have.
    """
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
            assert matcher.name != "job" or any(re.fullmatch(matcher.value, job) for job in JOBS)
    for node in found:
        if isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
            assert set(node.modifier.labels) <= offered
    return kept(found[0], exported)


@pytest.mark.parametrize(("query", "legend"), PANELS)
def test_a_panel_asks_for_metrics_that_exist(query: str, legend: str, exported: dict[str, set[str]]) -> None:
    """O5: and names its lines by labels that they have."""
    assert set(re.findall(r"{{(\w+)}}", legend)) <= check(query, exported)


@pytest.mark.parametrize("name", DASHBOARDS)
def test_a_dashboard_lets_choose_by_a_label_that_exists(name: str, exported: dict[str, set[str]]) -> None:
    """O5"""
    text, chosen = json.dumps(DASHBOARDS[name]["panels"]), DASHBOARDS[name]["templating"]["list"]
    assert set(re.findall(r"\$(?!__)(\w+)", text)) == {each["name"] for each in chosen}
    for each in chosen:
        (asked,) = re.findall(r"^label_values\((\w+), (\w+)\)$", each["query"])
        assert asked[1] in exported[asked[0]]


def test_the_file_of_alerts_has_the_form_that_prometheus_reads() -> None:
    jsonschema.validate(RULE_FILE, RULES)
    names = [group["name"] for group in RULE_FILE["groups"]], [rule["alert"] for rule in ALERTS]
    assert all(len(set(each)) == len(each) for each in names)


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_an_alert_asks_for_metrics_that_exist(rule: dict[str, Any], exported: dict[str, set[str]]) -> None:
    """O5: and says nothing of labels that its answer has not."""
    said = rule["annotations"]["summary"]
    assert set(re.findall(r"\$labels\.(\w+)", said)) <= check(rule["expr"], exported)
    words = [" ".join(each.split()) for each in re.findall(r"{{(.*?)}}", said)]
    known = r"\$value( \| humanizeDuration)?|(with )?\$labels\.\w+|\.|else|end"
    assert [word for word in words if not re.fullmatch(known, word)] == []
    assert said.count("{{") == said.count("}}") == len(words)


class Zeros(Telemetry):
    """Counters that are there before anything is counted."""

    def __init__(self) -> None:
        self.names = set[str]()

    def add(self, metric: Metric, amount: float = 1, /, **labels: str | None) -> None:
        if amount == 0:
            self.names.add(f"{metric.name.replace('.', '_')}_total")


AGAIN_AND_AGAIN = {"towpath_relay_backoffs_total"}
"""Grows as long as what the alert is about lasts."""


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_an_alert_sees_also_the_first_of_what_it_counts(rule: dict[str, Any]) -> None:
    """O5: a counter that begins with a number shows no increase."""
    zeros = Zeros()
    RelayHooks(uuid4(), {}, zeros)
    Report("billing", zeros)
    for node in nodes(promql_parser.parse(rule["expr"])):
        if isinstance(node, promql_parser.Call) and node.func.name == "increase":
            counter = node.args[0].vector_selector.name
            begun = f"{counter} unless {counter} offset"
            assert counter in zeros.names | AGAIN_AND_AGAIN or begun in rule["expr"], counter


def test_prometheus_scrapes_every_process_of_the_compose_file_at_its_port() -> None:
    """O5"""
    services = yaml.safe_load((ROOT / "compose/compose.yaml").read_text())["services"]
    scraped = {
        (name, str(found["port"]))
        for job in PROMETHEUS["scrape_configs"]
        for found in job["dns_sd_configs"]
        for name in found["names"]
    }
    listening = {
        (name, port)
        for name, service in services.items()
        for image in (read("outbox_relay"), read("consumers"))
        for variable, port in image.environment.items()
        if "deploy" in service and service["image"] == image.tag and variable.endswith("__HEALTH_PORT")
    }
    assert scraped == listening
    assert PROMETHEUS["rule_files"] == ["alerts.yaml"]
    monitor = (ROOT / "compose/k8s/monitoring.yaml").read_text()
    assert set(re.findall(r"replacement: (\S+)", monitor)) == JOBS


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
    with pytest.raises(AssertionError):
        check('up{job="nonsense"}', exported)
    assert check("sum(rate(towpath_tasks_claimed_total[5m])) > 1", exported) == set()
    by_group = "max by (messaging_consumer_group_name) (towpath_tasks_due) > 1"
    assert check(by_group, exported) == {"messaging_consumer_group_name"}


def test_the_dashboards_are_as_their_builder_makes_them() -> None:
    made = run_path(str(ROOT / "compose/grafana/build.py"))["files"]()
    kept = {path.name: path.read_text() for path in (ROOT / "compose/grafana/dashboards").glob("*.json")}
    assert kept == made
