"""What every process of ours does besides its work: signals, health endpoints, exit codes.

SIGTERM or SIGINT: drain. A second one: exit at once. A loop that dies takes readiness down, then
the process.
"""

import asyncio
import gc
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Final, Protocol

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from towpath.errors import ConfigurationError, MissingExtra
from towpath.store.installed import library_version
from towpath.telemetry import prometheus
from towpath.telemetry.logging import event_logger

HEALTH_GRACE_SECONDS: Final = 2.0

log = event_logger(__name__)


class HealthProbe(Protocol):
    """What the endpoints ask; both answer at once, without I/O."""

    def liveness(self) -> Mapping[str, object]:
        """Facts, with `ok`: whether the loops came round of late."""
        ...

    def readiness(self) -> Mapping[str, object]:
        """Facts, with `ok`: whether database and broker are usable and nothing drains."""
        ...


async def serve(
    service: str,
    run: Callable[[asyncio.Event], Awaitable[None]],
    *,
    probe: HealthProbe,
    on_draining: Callable[[], None],
    health_host: str,
    health_port: int,
) -> None:
    """Run until a signal, then let `run` drain. Raises what `run` raises.

    `health_port` 0: no endpoints.
    """
    _spare_the_collector()
    stop = asyncio.Event()
    began = time.monotonic()

    def drain(number: int) -> None:
        if stop.is_set():
            os._exit(128 + number)
        log.info("service.draining", service=service, signal=signal.Signals(number).name)
        on_draining()
        stop.set()

    with _signals(drain):
        async with _health(probe, health_host, health_port):
            log.info("service.started", service=service, version=library_version(), pid=os.getpid())
            try:
                await run(stop)
            finally:
                log.info("service.stopped", service=service, seconds=round(time.monotonic() - began, 3))


def _spare_the_collector() -> None:
    """Let the cycle collector look less often: what a message is made of is in no cycle.

    With the defaults it takes a tenth of a relay's time and nearly half of a worker's.
    """
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


@contextmanager
def _signals(drain: Callable[[int], None]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, drain, number)
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


class _Server(uvicorn.Server):
    """Leaves the signals to us."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def _health(probe: HealthProbe, host: str, port: int) -> AsyncIterator[None]:
    if not port:
        yield
        return
    config = uvicorn.Config(_endpoints(probe), log_config=None, access_log=False, lifespan="off")
    server = _Server(config)
    serving = asyncio.create_task(server.serve(sockets=[_listening(host, port)]))
    try:
        yield
    finally:
        server.should_exit = True
        await asyncio.wait([serving], timeout=HEALTH_GRACE_SECONDS)
        serving.cancel()


def _listening(host: str, port: int) -> socket.socket:
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=2048)
    except OSError as error:
        reason = str(error.strerror).partition(" (")[0]
        raise ConfigurationError(
            f"cannot listen for health checks at {host}:{port}: {reason}: end what listens there, or "
            "choose another TOWPATH_RELAY__HEALTH_PORT or TOWPATH_WORKER__HEALTH_PORT"
        ) from error


def _endpoints(probe: HealthProbe) -> Starlette:
    async def livez(_: Request) -> JSONResponse:
        return _answer(probe.liveness())

    async def readyz(_: Request) -> JSONResponse:
        return _answer(probe.readiness())

    def metrics(request: Request) -> Response:  # not async: runs in a thread, off the loop
        try:
            body, content_type = prometheus.page(request.headers.get("accept", ""))
        except MissingExtra as error:
            return PlainTextResponse(f"{error}\n", status_code=501)
        return Response(body, media_type=content_type)

    return Starlette(
        routes=[Route("/livez", livez), Route("/readyz", readyz), Route("/metrics", metrics)],
    )


def _answer(facts: Mapping[str, object]) -> JSONResponse:
    told = {**facts, "version": library_version()}
    return JSONResponse(told, status_code=200 if facts.get("ok") else 503)
