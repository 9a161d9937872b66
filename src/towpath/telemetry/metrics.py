"""The hook object the engines report to; instruments come from OpenTelemetry's metrics API."""

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Final

from opentelemetry import metrics
from opentelemetry.metrics import Meter

from towpath.telemetry.names import METRICS, SCHEMA_URL, SCOPE, Metric, attributes


class Telemetry:
    """What engines call. This base does nothing; it never raises and never blocks.

    Attributes are short names of `names.ATTRIBUTES`, e.g. `telemetry.add(TASKS_SETTLED, 1,
    group="billing", type="order.placed", outcome="succeeded")`.
    """

    def add(self, metric: Metric, amount: float = 1, /, **labels: str | None) -> None:
        """Count."""

    def record(self, metric: Metric, value: float, /, **labels: str | None) -> None:
        """One observation of a histogram, e.g. seconds."""

    def record_all(self, metric: Metric, values: Iterable[float], /, **labels: str | None) -> None:
        """Several observations that have all attributes in common."""

    def set(self, metric: Metric, value: float, /, **labels: str | None) -> None:
        """The present value of a gauge."""


NO_TELEMETRY: Final = Telemetry()


class OpenTelemetry(Telemetry):
    """Reports to OpenTelemetry: to nothing until an SDK is set up, to its exporters afterwards.

    A bool becomes a number: OTLP has no type for it, and drops everything that goes with one.

    `labels` are carried by every metric that lists them; a broker tells its own.
    """

    def __init__(
        self, labels: Mapping[str, str | int] = MappingProxyType({}), *, meter: Meter | None = None
    ) -> None:
        meter = meter or metrics.get_meter(SCOPE, schema_url=SCHEMA_URL)
        self._shared: dict[Metric, dict[str, str | int | float | bool]] = {}
        self._add: dict[Metric, Callable[..., None]] = {}
        self._record: dict[Metric, Callable[..., None]] = {}
        self._set: dict[Metric, Callable[..., None]] = {}
        for metric in METRICS:
            self._shared[metric] = attributes(
                **{name: value for name, value in labels.items() if name in metric.attributes}
            )
            if metric.kind == "counter":
                self._add[metric] = meter.create_counter(metric.name, metric.unit, metric.description).add
            elif metric.kind == "histogram":
                self._record[metric] = meter.create_histogram(
                    metric.name,
                    metric.unit,
                    metric.description,
                    explicit_bucket_boundaries_advisory=metric.buckets,
                ).record
            else:
                self._set[metric] = meter.create_gauge(metric.name, metric.unit, metric.description).set

    def add(self, metric: Metric, amount: float = 1, /, **labels: str | None) -> None:
        self._add[metric](+amount, self._shared[metric] | attributes(**labels))

    def record(self, metric: Metric, value: float, /, **labels: str | None) -> None:
        self._record[metric](+value, self._shared[metric] | attributes(**labels))

    def record_all(self, metric: Metric, values: Iterable[float], /, **labels: str | None) -> None:
        record, shared = self._record[metric], self._shared[metric] | attributes(**labels)
        for value in values:
            record(value, shared)

    def set(self, metric: Metric, value: float, /, **labels: str | None) -> None:
        self._set[metric](+value, self._shared[metric] | attributes(**labels))
