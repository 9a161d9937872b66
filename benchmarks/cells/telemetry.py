"""What it costs to be watched: every message sampled, spans and metrics sent to a sink on this machine."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from benchmarks.cells.backlog import by_worker
from benchmarks.cells.round import Round
from benchmarks.drain import Program, running
from benchmarks.measure import Sample
from benchmarks.relaying import drain, relay
from towpath.testing.services.ports import ReservedPort


async def unwatched_relay(round_: Round) -> Sample:
    """A backlog of the outbox to Kafka, without an SDK."""
    return await _relayed(round_)


async def watched_relay(round_: Round) -> Sample:
    """The same, exporting."""
    async with _sink() as environment:
        return await _relayed(round_, **environment)


async def watched_worker(round_: Round) -> Sample:
    """A group whose handler does nothing, exporting a span for each message."""
    async with _sink() as environment:
        backlog = await round_.backlog("watched", round_.size(100_000, 5_000))
        return await by_worker(round_, backlog, "noop", **environment)


async def _relayed(round_: Round, **environment: str) -> Sample:
    stage = round_.stage
    topic = stage.fresh_name("relayed")
    async with stage.database() as url:
        subject = relay(url, stage.kafka.bootstrap, **environment)
        return await drain(subject, round_.size(300_000, 60_000), stage.postgres, stage.kafka, topic, url)


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
