"""Everything the demo starts: two servers, the schema and topics, a relay, two groups, a producer.

All of it runs below supervisors that end it when this process goes, however it goes.
"""

import asyncio
import json
import os
import shlex
import signal
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Final, NamedTuple, Self

import asyncpg

from consumers.__main__ import business_schema
from consumers.groups.agents.app import app as agents
from consumers.groups.orders.app import app as orders
from examples.demo.promises import INVOICE_LIMIT_CENTS
from examples.demo.script import FAULTY, OUTAGE
from towpath.brokers.factory import broker_from_url
from towpath.brokers.ports import GroupTopology
from towpath.messages.limits import CANARY
from towpath.store import migrate
from towpath.testing.services import EmbeddedKafka, KafkaServer, PostgresServer, RabbitServer
from towpath.testing.services.ports import ReservedPort
from towpath.testing.services.processes import Command, ProcessGroup

ROOT: Final = Path(__file__).resolve().parents[2]
PARTITIONS: Final = 4


class Choice(NamedTuple):
    """A broker to tell the story on."""

    name: str
    server: type[EmbeddedKafka | KafkaServer | RabbitServer]
    options: Mapping[str, object]


BROKERS: Final = {
    # It has no idempotent producer and makes a group wait for half a session timeout at its first join.
    "embedded": Choice(
        "Kafka-compatible broker",
        EmbeddedKafka,
        {"enable_idempotence": False, "session_timeout_ms": 6_000, "heartbeat_interval_ms": 1_500},
    ),
    "kafka": Choice("Apache Kafka", KafkaServer, {}),
    "rabbitmq": Choice("RabbitMQ", RabbitServer, {}),
}
_TROUBLE: Final = """
    insert into provider_status (provider, is_up, fault) values ($1, false, null), ($2, true, 'error')
"""
_FORGOTTEN: Final = f"""
    alter table invoice add constraint invoice_amount_fits check (amount <= {INVOICE_LIMIT_CENTS})
"""
"""Invoices of large orders cannot be written until somebody drops it."""
PRODUCER: Final = "producer"
_STOP_SECONDS: Final = 5.0


class ProcessDied(Exception):
    """A process ended that should not have."""


class Installation:
    """One towpath installation in a temporary directory, from start to nothing left."""

    def __init__(self, broker: str = "embedded") -> None:
        self.choice = BROKERS[broker]
        self._stack = ExitStack()
        self._ports: dict[str, ReservedPort] = {}
        self._daemons: list[str] = []

    def __enter__(self) -> Self:
        try:
            self.postgres = self._stack.enter_context(PostgresServer())
            self.broker = self._stack.enter_context(self.choice.server())
            self._processes = ProcessGroup("demo")
            self._stack.callback(self._processes.close)
            self.traces.mkdir()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in self._daemons:
            if self._processes.exit_code(name) is None:
                self._processes.send_signal(name, signal.SIGTERM)  # all drain at once
        self._stack.close()
        for port in self._ports.values():
            port.release()

    @property
    def database_url(self) -> str:
        """The one database: business tables and towpath's schema."""
        return self.postgres.url()

    @property
    def broker_url(self) -> str:
        """The broker."""
        return self.broker.address.url

    @property
    def traces(self) -> Path:
        """Where every process writes its spans."""
        return self._processes.directory / "traces"

    @property
    def promises(self) -> Path:
        """Where the producer writes what it promised; absent until it is done."""
        return self._processes.directory / "promises.json"

    def settings(self) -> dict[str, str]:
        """The variables that a process of this installation needs, and nothing else of its kind."""
        return {
            "TOWPATH_DATABASE_URL": self.database_url,
            "TOWPATH_BROKER_URL": self.broker_url,
            "TOWPATH_BROKER_OPTIONS": json.dumps(self.choice.options),
            "TOWPATH_TELEMETRY__TRACES_FILE": str(self.traces),
            "OTEL_SPAN_LINK_COUNT_LIMIT": "2000",  # the relay's span links to every message of its window
            # A demo is watched: look for due work more often than a service has to.
            "TOWPATH_WORKER__DUE_POLL_MAX": "200ms",
        }

    def environment(self, **extra: str) -> dict[str, str]:
        """A child's whole environment; the caller's own TOWPATH_ and OTEL_ variables stay outside."""
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith(("TOWPATH_", "OTEL_"))
        }
        path = os.pathsep.join([str(ROOT), *filter(None, [kept.get("PYTHONPATH")])])
        return {**kept, **self.settings(), "PYTHONPATH": path, **extra}

    def prepare(self) -> int:
        """Migrate, create business tables and topics or queues, let the providers fail; how many of these."""
        migrate.upgrade(self.database_url)
        return asyncio.run(self._prepare())

    async def _prepare(self) -> int:
        connection = await asyncpg.connect(self.database_url)
        try:
            for group in (agents, orders):
                await connection.execute(business_schema(group.name))
            await connection.execute(Path(__file__).with_name("business.sql").read_text())
            await connection.execute(_FORGOTTEN)
            await connection.execute(_TROUBLE, f"tool:{OUTAGE}", f"search:{FAULTY}")
        finally:
            await connection.close()
        admin = broker_from_url(self.broker_url, self.choice.options).admin()
        try:
            groups = [GroupTopology(group.name, group.destinations) for group in (agents, orders)]
            return len(await admin.apply([CANARY], groups, partitions=PARTITIONS))
        finally:
            await admin.aclose()

    def start(self) -> None:
        """The relay and both groups, each a process of its own as in production."""
        self._start("relay", "outbox_relay", "TOWPATH_RELAY__HEALTH_PORT")
        for group in (agents, orders):
            self._start(group.name, "consumers", "TOWPATH_WORKER__HEALTH_PORT", "run", group.name)

    def start_producer(self) -> None:
        """The producing service; its end is seen by `promises`."""
        argv = [sys.executable, "-m", "examples.demo.producing", "--promises", str(self.promises)]
        self._processes.spawn(Command(PRODUCER, argv, self.environment()))

    def _start(self, name: str, module: str, port_variable: str, *arguments: str) -> None:
        port = self._ports[name] = ReservedPort()
        self._processes.spawn(
            Command(
                name,
                [sys.executable, "-m", module, *arguments],
                self.environment(**{port_variable: str(port.number)}),
                end_signal=signal.SIGTERM,
                end_grace_seconds=_STOP_SECONDS,
            )
        )
        self._daemons.append(name)

    def check_alive(self) -> None:
        """Raises ProcessDied with the end of its log when a process has died."""
        for name in self._daemons:
            self._complain(name, self._processes.exit_code(name))
        if not self.promises.exists():
            self._complain(PRODUCER, self._processes.exit_code(PRODUCER))

    def _complain(self, name: str, code: int | None) -> None:
        if code is not None:
            raise ProcessDied(f"{name} ended with {code}:\n{self._processes.log_tail(name)}")

    def addresses(self) -> dict[str, str]:
        """Where what is running can be reached."""
        health = {name: f"http://127.0.0.1:{port.number}/readyz" for name, port in self._ports.items()}
        logs = str(self._processes.directory / "*.log")
        return {"Postgres": self.database_url, "broker": self.broker_url, **health, "logs": logs}

    def write_exports(self) -> Path:
        """A file for a shell to read, so that commands reach this installation."""
        path = self._processes.directory / "settings.sh"
        path.write_text(
            "".join(f"export {name}={shlex.quote(value)}\n" for name, value in self.settings().items())
        )
        return path
