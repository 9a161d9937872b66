"""What engines report, and to whom."""

import re
from typing import Any

import pytest
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from towpath.telemetry.metrics import NO_TELEMETRY, OpenTelemetry
from towpath.telemetry.names import (
    ATTRIBUTES,
    METRICS,
    PROCESS_DURATION,
    RELAY_SHARDS_OWNED,
    SCOPE,
    TASKS_SETTLED,
    attributes,
)


@pytest.fixture
def reader() -> InMemoryMetricReader:
    return InMemoryMetricReader()


def read(reader: InMemoryMetricReader) -> dict[str, Any]:
    data = reader.get_metrics_data()
    assert data is not None
    (resource,) = data.resource_metrics
    return {metric.name: metric for scope in resource.scope_metrics for metric in scope.metrics}


def test_counters_histograms_and_gauges_reach_the_sdk(reader: InMemoryMetricReader) -> None:
    provider = MeterProvider([reader], shutdown_on_exit=False)
    telemetry = OpenTelemetry(meter=provider.get_meter(SCOPE))
    telemetry.add(TASKS_SETTLED, 2, group="billing", type="order.placed", outcome="succeeded")
    telemetry.add(TASKS_SETTLED, group="billing", type="order.placed", outcome="succeeded")
    telemetry.record(PROCESS_DURATION, 0.02, group="billing", type="order.placed", error_type=None)
    telemetry.record_all(PROCESS_DURATION, [0.02, 0.03], group="billing", type="order.placed")
    telemetry.set(RELAY_SHARDS_OWNED, 7)
    found = read(reader)
    (settled,) = found["towpath.tasks.settled"].data.data_points
    assert settled.value == 3
    assert dict(settled.attributes) == attributes(group="billing", type="order.placed", outcome="succeeded")
    (duration,) = found["messaging.process.duration"].data.data_points
    assert duration.count == 3
    assert tuple(duration.explicit_bounds) == PROCESS_DURATION.buckets
    assert "error.type" not in duration.attributes
    (owned,) = found["towpath.relay.shards.owned"].data.data_points
    assert owned.value == 7
    provider.shutdown()


def test_every_metric_has_an_instrument(reader: InMemoryMetricReader) -> None:
    """O5"""
    provider = MeterProvider([reader], shutdown_on_exit=False)
    telemetry = OpenTelemetry(meter=provider.get_meter(SCOPE))
    for metric in METRICS:
        report = {"counter": telemetry.add, "histogram": telemetry.record, "gauge": telemetry.set}[
            metric.kind
        ]
        report(metric, 1, **dict.fromkeys(metric.attributes, "x"))
    found = read(reader)
    assert {(name, metric.unit, metric.description) for name, metric in found.items()} == {
        (metric.name, metric.unit, metric.description) for metric in METRICS
    }
    provider.shutdown()


def test_what_is_said_of_the_broker_is_on_every_metric_that_lists_it(reader: InMemoryMetricReader) -> None:
    provider = MeterProvider([reader], shutdown_on_exit=False)
    broker = {"system": "kafka", "server_address": "kafka-1", "server_port": 9092}
    telemetry = OpenTelemetry(broker, meter=provider.get_meter(SCOPE))
    telemetry.record(PROCESS_DURATION, 0.02, group="billing")
    telemetry.add(TASKS_SETTLED, group="billing")
    found = read(reader)
    (duration,) = found["messaging.process.duration"].data.data_points
    assert dict(duration.attributes) == attributes(group="billing", **broker)
    (settled,) = found["towpath.tasks.settled"].data.data_points
    assert dict(settled.attributes) == attributes(group="billing")
    provider.shutdown()


def test_without_telemetry_nothing_happens() -> None:
    NO_TELEMETRY.add(TASKS_SETTLED, group="billing")
    NO_TELEMETRY.record(PROCESS_DURATION, 1)
    NO_TELEMETRY.set(RELAY_SHARDS_OWNED, 1)


def test_without_an_sdk_the_api_swallows_it() -> None:
    OpenTelemetry().add(TASKS_SETTLED, group="billing")


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_each_metric_is_named_and_described_by_the_rules(metric: Any) -> None:
    assert re.fullmatch(r"(messaging|towpath)(\.[a-z_]+)+", metric.name)
    assert metric.unit in {"s", "By"} or re.fullmatch(r"\{[a-z]+\}", metric.unit)
    assert metric.description.endswith(".")
    assert set(metric.attributes) <= set(ATTRIBUTES)
    assert (metric.buckets is not None) == (metric.kind == "histogram")
    assert not {"message_id", "attempt", "run_no"} & set(metric.attributes)


def test_metric_names_are_unique() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)


def test_whatever_is_reported_can_be_sent(reader: InMemoryMetricReader) -> None:
    """O5: one value that OTLP has no type for would take every other metric of its batch with it."""
    provider = MeterProvider([reader], shutdown_on_exit=False)
    telemetry = OpenTelemetry(meter=provider.get_meter(SCOPE))
    for metric in METRICS:
        report = {"counter": telemetry.add, "histogram": telemetry.record, "gauge": telemetry.set}
        report[metric.kind](metric, True)
    data = reader.get_metrics_data()
    assert data is not None
    (sent,) = encode_metrics(data).resource_metrics
    assert len(sent.scope_metrics[0].metrics) == len(METRICS)
    provider.shutdown()
