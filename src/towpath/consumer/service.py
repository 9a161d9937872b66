"""A consumer group as a process: settings to engine, telemetry, signals and health."""

import asyncio
import importlib
import sys
from collections.abc import Mapping

from towpath.app import App
from towpath.brokers.factory import broker_of
from towpath.consumer.engine import Consumer
from towpath.consumer.health import Health
from towpath.errors import ConfigurationError
from towpath.outbox import Outbox
from towpath.serving import serve
from towpath.settings import Settings
from towpath.store.database import Database
from towpath.telemetry.logging import setup_logging
from towpath.telemetry.metrics import OpenTelemetry
from towpath.telemetry.setup import setup


class _Probe:
    """The consumer's health as the endpoints show it."""

    def __init__(self, group: str, health: Health) -> None:
        self._group = group
        self._health = health

    def liveness(self) -> Mapping[str, object]:
        stuck = self._health.stuck_loops()
        return {"ok": not stuck, "group": self._group, "stuck_loops": stuck}

    def readiness(self) -> Mapping[str, object]:
        problems = self._health.problems
        return {
            "ok": not problems,
            "group": self._group,
            "problems": problems,
            "broker": self._health.is_broker_connected,
            "refused_partitions": self._health.refused_partitions,
            "database": self._health.is_database_seen,
            "schema": "ok" if self._health.outdated is None else str(self._health.outdated),
            "paused": list(self._health.paused),
            "draining": self._health.is_draining,
        }


def load_app(path: str) -> App:
    """The App behind `module:attribute`. Raises ConfigurationError that says what is missing."""
    module_name, separator, attribute = path.partition(":")
    if not separator:
        raise ConfigurationError(
            f"{path!r} is not of the form module:attribute, for example billing.consumer:app"
        )
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigurationError(f"cannot import {module_name!r}: {error}") from error
    app = getattr(module, attribute, None)
    if not isinstance(app, App):
        raise ConfigurationError(f"{path!r} is not a towpath App")
    return app


def run(app: App, settings: Settings) -> None:
    """Consume until SIGTERM, then drain. Raises ConfigurationError, and bugs."""
    setup_logging(level=settings.telemetry.log_level, format_=settings.telemetry.log_format)
    handle = setup(
        f"towpath-{app.name}",
        traces_file=settings.telemetry.traces_file,
        is_scraped=settings.worker.health_port > 0,
    )
    try:
        asyncio.run(_run(app, settings))
    finally:
        handle.shutdown()


async def _run(app: App, settings: Settings) -> None:
    database = Database(
        settings.database_url.get_secret_value(),
        schema=settings.schema_name,
        session_count=settings.worker.sessions,
        lease_seconds=settings.worker.lease.total_seconds(),
    )
    broker = broker_of(settings)
    consumer = Consumer(
        app,
        database,
        broker,
        settings.worker,
        outbox=Outbox(schema=settings.schema_name, max_payload_bytes=settings.max_payload_bytes),
        telemetry=OpenTelemetry(broker.labels),
    )

    def note_draining() -> None:
        consumer.health.is_draining = True

    await serve(
        app.name,
        consumer.run,
        probe=_Probe(app.name, consumer.health),
        on_draining=note_draining,
        health_host=settings.worker.health_host,
        health_port=settings.worker.health_port,
    )
