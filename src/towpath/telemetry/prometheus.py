"""Metrics as Prometheus reads them: the SDK's own reader, and the page it fills."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from towpath.errors import MissingExtra

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import MetricReader


def is_installed() -> bool:
    """Whether the exporter is there, without importing it."""
    return find_spec("prometheus_client") is not None


def reader() -> MetricReader:
    """The reader that a scrape asks. Raises MissingExtra."""
    try:
        from opentelemetry.exporter.prometheus import PrometheusMetricReader  # noqa: PLC0415  optional
    except ImportError as error:
        raise MissingExtra("otel", "the Prometheus exporter") from error
    return PrometheusMetricReader()


def page(accept: str) -> tuple[bytes, str]:
    """All metrics of the process and their content type, in the format that `accept` asks for.

    Collects under locks and takes milliseconds: call it in a thread. Raises MissingExtra.
    """
    try:
        from prometheus_client import REGISTRY  # noqa: PLC0415  optional dependency
        from prometheus_client.exposition import choose_encoder  # noqa: PLC0415  optional dependency
    except ImportError as error:
        raise MissingExtra("otel", "/metrics") from error
    try:
        encode, content_type = choose_encoder(accept)
    except TypeError:  # at a version that is no number
        encode, content_type = choose_encoder("")
    return encode(REGISTRY), content_type
