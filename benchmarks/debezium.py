"""Debezium: its artifacts from Maven in the user's cache, its settings, and the table that it moves.

The table has the shape of Debezium's outbox event router. Its publication and its slot are made before a
connector runs, so that nothing committed since is missed.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import asyncpg

from benchmarks.filling import DEBEZIUM
from benchmarks.stage import Stage
from towpath.testing.services import java
from towpath.testing.services.processes import make_cached

VERSION: Final = "3.6.1.Final"
CONNECT_VERSION: Final = "4.3.0"
"""What this Debezium is built with; it does not run on Connect 4.4, which moved a class that it uses."""
_WORKER: Final = (
    java.Artifact("org.apache.kafka", "connect-runtime", CONNECT_VERSION),
    java.Artifact("org.apache.logging.log4j", "log4j-slf4j-impl", "2.25.5"),
)
NAME: Final = "outbox"
"""Of the connector."""
_CONNECTOR: Final = (java.Artifact("io.debezium", "debezium-connector-postgres", VERSION),)
_OF_THE_WORKER: Final = ("connect-api-*.jar", "kafka-clients-*.jar")
"""Maven brings them with the connector; two copies of their classes do not go together."""

_TABLE: Final = f"""
create table {DEBEZIUM.table} (
  id uuid primary key, aggregatetype varchar(255) not null, aggregateid varchar(255) not null,
  type varchar(255) not null, payload bytea, traceparent text
);
create publication debezium for table {DEBEZIUM.table}
"""
_USUAL: Final[Mapping[str, str]] = {
    "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
    "plugin.name": "pgoutput",
    "publication.name": "debezium",
    "publication.autocreate.mode": "disabled",
    "table.include.list": DEBEZIUM.table,
    "topic.prefix": "benchmark",
    "snapshot.mode": "no_data",
    "tombstones.on.delete": "false",
    "extended.headers.enabled": "false",
    "transforms": "outbox",
    "transforms.outbox.type": "io.debezium.transforms.outbox.EventRouter",
    "transforms.outbox.route.topic.replacement": "${routedByValue}",
    "transforms.outbox.table.fields.additional.placement": "traceparent:header",
}
DEFAULT: Final[Mapping[str, str]] = {}
TUNED: Final[Mapping[str, str]] = {
    "max.batch.size": "8192",
    "max.queue.size": "32768",
    "poll.interval.ms": "10",
    "producer.override.batch.size": "262144",
    "producer.override.linger.ms": "5",
    "producer.override.buffer.memory": "67108864",
}
LOW_LATENCY: Final[Mapping[str, str]] = {
    "poll.interval.ms": "5",
    "producer.override.linger.ms": "0",
}


@cache
def installed() -> Path:
    """The directory with the worker's libraries and the folder of plugins, downloaded on first use."""

    def make(target: Path) -> None:
        java.copy_artifacts(_WORKER, target / "worker")
        plugin = target / "plugins" / "debezium"
        java.copy_artifacts(_CONNECTOR, plugin)
        for pattern in _OF_THE_WORKER:
            for library in plugin.glob(pattern):
                library.unlink()

    return make_cached(f"debezium-{VERSION}-connect-{CONNECT_VERSION}", make)


def connector(url: str, settings: Mapping[str, str]) -> dict[str, str]:
    """Its configuration for a database made by `captured`: with these settings beside the usual ones."""
    address = urlsplit(url)
    return {
        "name": NAME,
        **_USUAL,
        "database.hostname": address.hostname or "",
        "database.port": str(address.port),
        "database.user": address.username or "",
        "database.password": "not asked for",
        "database.dbname": _database(url),
        "slot.name": _database(url),
        **settings,
    }


def _database(url: str) -> str:
    return urlsplit(url).path.removeprefix("/")


@asynccontextmanager
async def captured(stage: Stage) -> AsyncIterator[str]:
    """A database with the outbox's table, its publication and its slot; all of them are dropped."""
    async with stage.database() as url:
        slot = _database(url)
        connection = await asyncpg.connect(url)
        await connection.execute(_TABLE)
        await connection.execute("select pg_create_logical_replication_slot($1, 'pgoutput')", slot)
        try:
            yield url
        finally:
            await _drop(connection, slot)
            await connection.close()


async def _drop(connection: "asyncpg.Connection[Any]", slot: str) -> None:
    deadline = time.monotonic() + 10
    while True:
        try:
            await connection.execute("select pg_drop_replication_slot($1)", slot)
        except asyncpg.ObjectInUseError:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.05)  # the server has not noticed yet that the connector is gone
        else:
            return
