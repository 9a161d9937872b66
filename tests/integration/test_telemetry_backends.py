"""A telemetry backend that fails in every way costs neither a message nor the end of a process."""

import asyncio
import json
import re
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import asyncpg

from tests.integration.deployables import Deployable, deployed, until
from tests.integration.relaying import emit
from towpath.testing.proxy import TcpProxy

TRACED = json.dumps([["traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"]])


class Backend:
    """Takes what exporters send, and answers with a status."""

    def __init__(self) -> None:
        self.status = "500 Internal Server Error"
        self.requests = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = re.search(rb"(?i)content-length: (\d+)", head)
                await reader.readexactly(int(length[1]) if length else 0)
                self.requests += 1
                writer.write(f"HTTP/1.1 {self.status}\r\nContent-Length: 0\r\n\r\n".encode())
                await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            writer.close()


@asynccontextmanager
async def backend() -> AsyncIterator[tuple[Backend, TcpProxy]]:
    """One that answers 500, behind a proxy."""
    taking = Backend()
    server = await asyncio.start_server(taking.serve, "127.0.0.1", 0)
    try:
        async with TcpProxy("127.0.0.1", server.sockets[0].getsockname()[1]) as proxy:
            yield taking, proxy
    finally:
        server.close()


async def test_a_backend_that_fails_costs_no_message_and_does_not_hold_up_the_end(
    migrated_url: str, db: "asyncpg.Connection[Any]", tmp_path: Path
) -> None:
    """O5, S4: errors, a hanging link, a refused one, a slow one; what was dropped is counted."""
    async with backend() as (taking, proxy):
        environment = {
            "TOWPATH_DATABASE_URL": migrated_url,
            "TOWPATH_BROKER_URL": "memory://bells",
            "TOWPATH_RELAY__CANARIES": "false",
            "OTEL_TRACES_EXPORTER": "otlp",
            "OTEL_METRICS_EXPORTER": "otlp,prometheus",
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{proxy.port}",
            "OTEL_EXPORTER_OTLP_TIMEOUT": "2",
            "OTEL_METRIC_EXPORT_INTERVAL": "200",
            "OTEL_BSP_SCHEDULE_DELAY": "100",
            "OTEL_BSP_MAX_QUEUE_SIZE": "2",
            "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "1",
        }

        async def is_asked() -> bool:
            return taking.requests > 0

        async with deployed("relay", tmp_path, environment) as relay:
            began = time.monotonic()
            await relay.until_ready()
            await publish(db)
            await until("an export answered with 500", is_asked)
            await publish(db)
            await proxy.cut()
            await publish(db)
            await proxy.restore()
            await proxy.delay(1)
            await publish(db)
            await proxy.hang()
            for _ in range(10):  # windows of their own: as many spans
                await publish(db)
            await until("drops in the metrics", lambda: says(relay, "queue_full"))
            relay.signal(signal.SIGTERM)
            assert await relay.exit_code() == 0
            minutes = (time.monotonic() - began) / 60
            assert relay.log.count('"logger": "opentelemetry') <= minutes + 1, relay.log
            assert "service.stopped" in relay.log


async def publish(db: "asyncpg.Connection[Any]") -> None:
    """Write into the outbox, and wait until it is published."""
    await emit(db, "k", b"{}", headers=TRACED)

    async def is_empty() -> bool:
        statement = "select count(*) from towpath.outbox_message where status = 'PENDING'"
        return not await db.fetchval(statement)

    await until("published", is_empty)


async def says(relay: Deployable, text: str) -> bool:
    return text in (await relay.get("/metrics"))[1]
