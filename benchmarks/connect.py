"""Kafka Connect's standalone worker, which keeps its offsets in a file, with Debezium's connector in it."""

import asyncio
import tempfile
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx

from benchmarks.debezium import NAME, connector, installed
from benchmarks.drain import Program, running
from benchmarks.stage import Stage
from towpath.testing.services import java
from towpath.testing.services.ports import ReservedPort

_STOP_SECONDS: Final = 60.0
_WATCH_SECONDS: Final = 1.0
_LOGGING: Final = """\
status=error
appender.console.type=Console
appender.console.name=console
appender.console.target=SYSTEM_ERR
appender.console.layout.type=PatternLayout
appender.console.layout.pattern=%d{ISO8601} %p %m (%c)%n%throwable
rootLogger.level=error
rootLogger.appenderRef.console.ref=console
logger.plugins.name=org.apache.kafka.connect.runtime.isolation
logger.plugins.level=off
"""
_JAVA_OPTIONS: Final = (
    "-server",
    "-Xms256M",
    "-Xmx2G",
    "-XX:+UseG1GC",
    "-XX:MaxGCPauseMillis=20",
    "-XX:InitiatingHeapOccupancyPercent=35",
    "-XX:+ExplicitGCInvokesConcurrent",
    "-Djava.awt.headless=true",
)
"""Those of Kafka's own scripts."""


class ConnectFailed(RuntimeError):
    """The connector or its task has failed; carries what Connect says about it."""


def has_reached(status: Mapping[str, Any], state: str) -> bool:
    """Whether connector and tasks are in this state; raises ConnectFailed when one has failed.

    A connector is RUNNING also when its task is not there yet, or has failed. A stopped one has no tasks.
    """
    tasks = status["tasks"]
    for each in (status["connector"], *tasks):
        if each["state"] == "FAILED":
            raise ConnectFailed(each.get("trace", "no reason given"))
    return status["connector"]["state"] == state and (
        not tasks if state == "STOPPED" else bool(tasks) and all(task["state"] == state for task in tasks)
    )


@dataclass(frozen=True)
class Connect:
    """A worker with the connector, and its REST interface."""

    processes: Mapping[str, Process]
    """By role, as `benchmarks.relaying.observe` takes them."""
    _client: httpx.AsyncClient

    @property
    def pid(self) -> int:
        """Of the worker."""
        return next(iter(self.processes.values())).pid

    async def stop(self) -> None:
        """End the task, and return when it has: rows wait in the log from then on."""
        await self._put("stop")
        async with asyncio.timeout(_STOP_SECONDS):
            while True:
                if await self._has_reached("STOPPED"):
                    return
                await asyncio.sleep(0.05)

    async def resume(self) -> None:
        """Let the task start again where it was, without waiting for it."""
        await self._put("resume")

    async def _put(self, verb: str) -> None:
        (await self._client.put(f"/connectors/{NAME}/{verb}")).raise_for_status()

    async def guard(self) -> None:
        """Raise as soon as the task has failed: nothing more would come, and no process ends."""
        while True:
            await self._has_reached("RUNNING")
            await asyncio.sleep(_WATCH_SECONDS)

    async def _has_reached(self, state: str) -> bool:
        try:
            answer = await self._client.get(f"/connectors/{NAME}/status")
        except httpx.TransportError:
            return False  # it does not listen yet, or is just ending
        if answer.status_code == httpx.codes.NOT_FOUND:
            return False  # for a second or two after it listens
        answer.raise_for_status()
        return has_reached(answer.json(), state)


@asynccontextmanager
async def connected(stage: Stage, url: str, settings: Mapping[str, str]) -> AsyncIterator[Connect]:
    """A new worker that begins to move the database's rows; ended with everything it wrote."""
    libraries = await asyncio.to_thread(installed)
    port = ReservedPort()
    rest = f"http://127.0.0.1:{port.number}"
    with tempfile.TemporaryDirectory(prefix="towpath-connect-") as name:
        directory = Path(name)
        worker = {
            "bootstrap.servers": stage.kafka.bootstrap,
            "key.converter": "org.apache.kafka.connect.storage.StringConverter",
            "value.converter": "org.apache.kafka.connect.converters.ByteArrayConverter",
            "offset.storage.file.filename": str(directory / "offsets"),
            "plugin.path": str(libraries / "plugins"),
            "listeners": rest,
        }
        (directory / "worker.properties").write_text(_properties(worker))
        (directory / "connector.properties").write_text(_properties(connector(url, settings)))
        (directory / "log4j2.properties").write_text(_LOGGING)
        program = Program(
            [
                *_JAVA_OPTIONS,
                f"-Dlog4j2.configurationFile={directory}/log4j2.properties",
                *("-cp", f"{libraries}/worker/*", "org.apache.kafka.connect.cli.ConnectStandalone"),
                *(f"{directory}/worker.properties", f"{directory}/connector.properties"),
            ],
            python=str(java.find_java()),
        )
        try:
            async with (
                httpx.AsyncClient(base_url=rest, timeout=30) as client,
                running({"relay": program}) as processes,
                asyncio.TaskGroup() as group,
            ):
                connect = Connect(processes, client)
                guard = group.create_task(connect.guard())
                yield connect
                guard.cancel()
        finally:
            port.release()


def _properties(settings: Mapping[str, str]) -> str:
    return "".join(f"{name}={value}\n" for name, value in settings.items())
