"""What it costs to be watched: every message sampled, spans and metrics sent to a sink on this machine."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from benchmarks.cells.backlog import by_worker
from benchmarks.cells.round import Round
from benchmarks.drain import Program, running
from benchmarks.measure import Sample
from benchmarks.relaying import drain, relay
from towpath.testing.services.ports import ReservedPort


async def watched_relay(round_: Round) -> Sample:
    """A backlog of the outbox to Kafka, exporting."""
    async with _sink() as environment:
        return await drain(round_.stage, relay(**environment), round_.size(300_000, 500))


async def watched_worker(round_: Round) -> Sample:
    """A group whose handler does nothing, exporting a span for each message."""
    async with _sink() as environment:
        backlog = await round_.backlog("watched", round_.size(100_000, 5_000))
        return await by_worker(round_, backlog, "noop", **environment)


@asynccontextmanager
async def _sink() -> AsyncIterator[dict[str, str]]:
    """A sink that runs, as the exporters' variables name it."""
    port = ReservedPort()
    program = Program(["-m", "benchmarks.sink", str(port.number)])
    try:
        async with running({"sink": program}):
            yield {
                "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port.number}",
                "OTEL_METRIC_EXPORT_INTERVAL": "5000",
            }
    finally:
        port.release()
