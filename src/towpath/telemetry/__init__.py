"""Traces, metrics and logs: OpenTelemetry's API in the library, its SDK only through `setup`."""
