"""OpenTelemetry's SDK for processes of ours, configured by its own `OTEL_*` variables.

| variable | meaning here |
|---|---|
| `OTEL_TRACES_EXPORTER` | `otlp`, `console`, `file`, `none`, or several with commas |
| `OTEL_METRICS_EXPORTER` | `otlp`, `prometheus` (`/metrics`, on the health port), `console`, `none` |
| `OTEL_EXPORTER_OTLP_ENDPOINT`, `…_TRACES_ENDPOINT`, `…_HEADERS`, … | as specified; HTTP with protobuf only |
| `OTEL_EXPORTER_OTLP_INSECURE` | `true`: headers may go to another machine without TLS |
| `OTEL_SERVICE_NAME`, `OTEL_RESOURCE_ATTRIBUTES`, `OTEL_TRACES_SAMPLER` | as specified |
| `OTEL_SDK_DISABLED` | `true`: nothing is set up |

Left unset, an exporter is `otlp` where an OTLP endpoint is given; else traces go to `file` where a
traces file is given, and metrics to `prometheus` where the process has a health port; else `none`: a
process without a collector does not complain about one. Telemetry never slows or stops work: queues
are bounded, export runs in threads, shutdown waits two seconds.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from opentelemetry import metrics, trace

from towpath.errors import MissingExtra, SettingsError
from towpath.telemetry import prometheus
from towpath.telemetry.files import LineWriter, line_of, path_for
from towpath.telemetry.logging import event_logger
from towpath.transport import refuse_plaintext

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import MetricReader
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
    from opentelemetry.sdk.trace.export import SpanExporter

log = event_logger(__name__)

TRACES_FILE_VARIABLE: Final = "TOWPATH_TELEMETRY__TRACES_FILE"
SHUTDOWN_SECONDS: Final = 2.0
FLUSH_MILLISECONDS: Final = 500
_SDK_METRICS_VARIABLE: Final = "OTEL_PYTHON_SDK_INTERNAL_METRICS_ENABLED"
_TRACES: Final = ("otlp", "console", "file", "none")
_METRICS: Final = ("otlp", "prometheus", "console", "none")


@dataclass(frozen=True, slots=True)
class TelemetryHandle:
    """What `setup` started; `shutdown` lets go of it."""

    traces: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()
    closers: tuple[Callable[[], object], ...] = ()

    def shutdown(self, timeout_seconds: float = SHUTDOWN_SECONDS) -> bool:
        """Flush and stop the exporters; whether that ended in time. Never raises, never hangs."""
        threads = [threading.Thread(target=close, daemon=True) for close in self.closers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout_seconds / len(threads))
        return not any(thread.is_alive() for thread in threads)


def setup(service: str, *, traces_file: Path | None = None, is_scraped: bool = False) -> TelemetryHandle:
    """Set up the SDK of this process as the environment says; once, before the first span.

    `traces_file` defaults to the variable `TOWPATH_TELEMETRY__TRACES_FILE`; `is_scraped`: the process
    serves `/metrics`. Raises SettingsError for an exporter that does not exist and MissingExtra when
    one is asked for that is not installed.
    """
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return TelemetryHandle()
    if traces_file is None and (named := os.environ.get(TRACES_FILE_VARIABLE)):
        traces_file = Path(named)
    trace_exporters = _chosen("TRACES", _TRACES, "file" if traces_file else "none")
    metric_exporters = _chosen(
        "METRICS", _METRICS, "prometheus" if is_scraped and prometheus.is_installed() else "none"
    )
    if not trace_exporters and not metric_exporters:
        return TelemetryHandle()
    resource = _resource(service)
    closers: list[Callable[[], object]] = []
    os.environ.setdefault(_SDK_METRICS_VARIABLE, "true")
    if metric_exporters:  # first: what becomes of spans is a metric of the SDK
        closers.append(_start_metrics(resource, [_metric_reader(name) for name in metric_exporters]))
    if trace_exporters:
        processors = [_span_processor(name, service, traces_file) for name in trace_exporters]
        closers.append(_start_traces(resource, processors))
    log.info(
        "telemetry.started",
        traces=",".join(trace_exporters),
        metrics=",".join(metric_exporters),
        traces_file=traces_file,
    )
    return TelemetryHandle(trace_exporters, metric_exporters, tuple(closers))


def _chosen(signal: str, known: Sequence[str], otherwise: str) -> tuple[str, ...]:
    variable = f"OTEL_{signal}_EXPORTER"
    text = os.environ.get(variable, "").strip()
    if not text:
        endpoints = ("OTEL_EXPORTER_OTLP_ENDPOINT", f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT")
        text = "otlp" if any(os.environ.get(name) for name in endpoints) else otherwise
    names = tuple(dict.fromkeys(name.strip().lower() for name in text.split(",") if name.strip()))
    for name in names:
        if name not in known:
            raise SettingsError(f"{variable}={name} is unknown: use {', '.join(known)}")
    return tuple(name for name in names if name != "none")


def _resource(service: str) -> Resource:
    try:
        from opentelemetry.sdk.resources import Resource  # noqa: PLC0415 - optional dependency
    except ImportError as error:
        raise MissingExtra("otel", "exporting telemetry") from error
    return Resource.create({} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": service})


def _start_traces(resource: Resource, processors: Sequence[SpanProcessor]) -> Callable[[], object]:
    from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415 - optional dependency

    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    for processor in processors:
        provider.add_span_processor(processor)
    trace.set_tracer_provider(provider)
    return provider.shutdown


def _start_metrics(resource: Resource, readers: Sequence[MetricReader]) -> Callable[[], object]:
    from opentelemetry.sdk.metrics import MeterProvider  # noqa: PLC0415 - optional dependency

    provider = MeterProvider(readers, resource, shutdown_on_exit=False)
    metrics.set_meter_provider(provider)
    return provider.shutdown


def _span_processor(name: str, service: str, traces_file: Path | None) -> SpanProcessor:
    from opentelemetry.sdk.trace.export import (  # noqa: PLC0415 - optional dependency
        BatchSpanProcessor,
        ConsoleSpanExporter,
    )

    if name == "file":
        if traces_file is None:
            raise SettingsError(f"OTEL_TRACES_EXPORTER=file needs {TRACES_FILE_VARIABLE}")
        return BatchSpanProcessor(
            file_exporter(path_for(traces_file, service)),
            max_queue_size=65_536,
            schedule_delay_millis=FLUSH_MILLISECONDS,
        )
    if name == "console":
        return BatchSpanProcessor(ConsoleSpanExporter())
    _require_safe_transport("TRACES")
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # noqa: PLC0415
            OTLPSpanExporter,
        )
    except ImportError as error:
        raise MissingExtra("otel", "the OTLP exporter") from error
    return BatchSpanProcessor(OTLPSpanExporter())


def _metric_reader(name: str) -> MetricReader:
    from opentelemetry.sdk.metrics.export import (  # noqa: PLC0415 - optional dependency
        ConsoleMetricExporter,
        PeriodicExportingMetricReader,
    )

    if name == "console":
        return PeriodicExportingMetricReader(ConsoleMetricExporter())
    if name == "prometheus":
        return prometheus.reader()
    _require_safe_transport("METRICS")
    try:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import (  # noqa: PLC0415
            OTLPMetricExporter,
        )
    except ImportError as error:
        raise MissingExtra("otel", "the OTLP exporter") from error
    return PeriodicExportingMetricReader(OTLPMetricExporter())


def _require_safe_transport(signal: str) -> None:
    """Headers hold the backend's key, as a rule."""
    _require_http_protocol()
    names = (f"OTEL_EXPORTER_OTLP_{signal}_", "OTEL_EXPORTER_OTLP_")
    endpoint, headers, insecure = (
        next((value for name in names if (value := os.environ.get(name + what))), "")
        for what in ("ENDPOINT", "HEADERS", "INSECURE")
    )
    parts = urlsplit(endpoint)
    if parts.scheme == "http" and (headers or parts.password) and insecure.strip().lower() != "true":
        fix = "use https:// in OTEL_EXPORTER_OTLP_ENDPOINT, or set OTEL_EXPORTER_OTLP_INSECURE=true"
        refuse_plaintext([parts.hostname or ""], "OTEL_EXPORTER_OTLP_HEADERS", fix)


def _require_http_protocol() -> None:
    protocol = os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    if protocol != "http/protobuf":
        raise SettingsError(f"OTEL_EXPORTER_OTLP_PROTOCOL={protocol} is not supported: use http/protobuf")


def file_exporter(path: Path) -> SpanExporter:
    """An exporter that appends finished spans to `path`, one JSON object a line."""
    from opentelemetry.sdk.trace.export import (  # noqa: PLC0415 - optional dependency
        SpanExporter,
        SpanExportResult,
    )

    class FileExporter(SpanExporter):
        def __init__(self) -> None:
            self._writer = LineWriter(path)

        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            is_written = self._writer.write([line_of(span) for span in spans])
            return SpanExportResult.SUCCESS if is_written else SpanExportResult.FAILURE

    return FileExporter()
