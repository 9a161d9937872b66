"""The relay as a process: settings to engine, logs, telemetry, signals and health."""

import asyncio
from collections.abc import Mapping

from towpath.brokers.factory import broker_of
from towpath.errors import TowpathError
from towpath.relay.engine import Relay
from towpath.relay.options import RelayOptions
from towpath.serving import serve
from towpath.settings import Settings
from towpath.telemetry.logging import setup_logging
from towpath.telemetry.metrics import OpenTelemetry
from towpath.telemetry.setup import setup

SERVICE = "outbox-relay"


class _Probe:
    """The relay's status as the endpoints show it."""

    def __init__(self, relay: Relay) -> None:
        self._relay = relay

    def liveness(self) -> Mapping[str, object]:
        status = self._relay.status()
        return {"ok": not status.stuck_loops, "relay": status.relay, "stuck_loops": status.stuck_loops}

    def readiness(self) -> Mapping[str, object]:
        status = self._relay.status()
        return {"ok": status.is_ready, **status.as_dict()}


def run(settings: Settings) -> None:
    """Relay until SIGTERM, then finish what is in flight and release the leases.

    Raises ConfigurationError where only a person can help, and bugs.
    """
    setup_logging(level=settings.telemetry.log_level, format_=settings.telemetry.log_format)
    handle = setup(
        SERVICE,
        traces_file=settings.telemetry.traces_file,
        is_scraped=settings.relay.health_port > 0,
    )
    try:
        asyncio.run(_run(settings))
    finally:
        handle.shutdown()


async def _run(settings: Settings) -> None:
    broker = broker_of(settings)
    relay = Relay(
        settings.database_url.get_secret_value(),
        broker,
        RelayOptions.of(settings.relay),
        schema=settings.schema_name,
        telemetry=OpenTelemetry(broker.labels),
    )
    try:
        await serve(
            SERVICE,
            relay.run,
            probe=_Probe(relay),
            on_draining=relay.drain,
            health_host=settings.relay.health_host,
            health_port=settings.relay.health_port,
        )
    except BaseExceptionGroup as group:
        ours, _ = group.split(TowpathError)
        raise (_first(ours) if ours is not None else group) from group


def _first(group: BaseExceptionGroup[TowpathError]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
