"""The relay and a worker as processes, asked as a probe asks them."""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, build_opener

import jsonschema

from tests.fixtures.json_documents import published
from towpath.cli import health
from towpath.cli.exits import OK, Stop
from towpath.store.installed import library_version
from towpath.testing.services.ports import ReservedPort

Noun = Literal["relay", "worker"]
_LOCAL = build_opener(ProxyHandler({}))


def at_port(url: str, port: int) -> str:
    """The URL with another port."""
    parts = urlsplit(url)
    return parts._replace(netloc=f"{parts.netloc.rpartition(':')[0]}:{port}").geturl()


async def until(what: str, ask: Callable[[], Awaitable[object]], *, seconds: float = 60) -> None:
    """Poll until it is so."""
    deadline = time.monotonic() + seconds
    while not await ask():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.1)


class Deployable:
    """One process of ours with a health port."""

    def __init__(self, noun: Noun, process: asyncio.subprocess.Process, log: Path, port: int) -> None:
        self.noun = noun
        self._process = process
        self._log = log
        self.port = port

    async def get(self, path: str) -> tuple[int, str]:
        """Status and body; status 0 where nothing answers."""

        def ask() -> tuple[int, str]:
            try:
                with _LOCAL.open(f"http://127.0.0.1:{self.port}{path}", timeout=30) as answer:
                    return answer.status, answer.read().decode()
            except HTTPError as error:
                return error.code, error.read().decode()
            except OSError:
                return 0, ""

        return await asyncio.to_thread(ask)

    async def facts(self, path: str) -> dict[str, Any]:
        """What `/livez` or `/readyz` says, which has the published shape; empty where nothing answers."""
        status, body = await self.get(path)
        facts: dict[str, Any] = json.loads(body) if body else {}
        if body:
            jsonschema.validate(facts, published(f"{self.noun}.check"))
            assert facts["version"] == library_version()
        assert facts.get("ok", False) is (status == 200)
        return facts

    async def until_ready(self) -> None:
        """Wait until it says that it can work."""
        await self._until_facts("ready", lambda facts: bool(facts.get("ok")))

    async def until_problem(self, *texts: str) -> str:
        """Wait until one line of its problems has all these texts; the line."""
        found: list[str] = []

        def has_it(facts: dict[str, Any]) -> bool:
            found[:] = [line for line in facts.get("problems", []) if all(text in line for text in texts)]
            return bool(found)

        await self._until_facts(f"a problem with {texts}", has_it)
        return found[0]

    async def _until_facts(self, what: str, is_so: Callable[[dict[str, Any]], bool]) -> None:
        last: dict[str, Any] = {}

        async def ask() -> bool:
            nonlocal last
            assert self._process.returncode is None, self.log
            last = await self.facts("/readyz")
            return is_so(last)

        try:
            await until(what, ask)
        except AssertionError as error:
            raise AssertionError(f"{error}: {last}\n{self.log[-3000:]}") from None

    async def check(self, *, is_live: bool = False) -> int:
        """The exit code of `towpath relay check` or `towpath worker check`."""
        try:
            await asyncio.to_thread(
                health.check, self.noun, "127.0.0.1", self.port, is_live=is_live, is_json=False
            )
        except Stop as stop:
            return stop.code
        return OK

    async def until_check(self, code: int, *, is_live: bool = False) -> None:
        """Wait until the check ends with this code: a busy machine may be slow to answer."""

        async def ask() -> bool:
            return await self.check(is_live=is_live) == code

        await until(f"exit code {code}", ask)

    @property
    def log(self) -> str:
        """All it wrote."""
        return self._log.read_text()

    async def logged(self, event: str) -> None:
        """Wait for a log event."""

        async def ask() -> bool:
            return f'"event": "{event}"' in self.log

        await until(event, ask)

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self._process.send_signal(number)

    async def exit_code(self) -> int:
        """Wait until it is gone."""
        async with asyncio.timeout(60):
            return await self._process.wait()


@asynccontextmanager
async def deployed(
    noun: Noun, directory: Path, environment: Mapping[str, str], *arguments: str
) -> AsyncIterator[Deployable]:
    """Run `towpath relay run`, or `towpath worker run` with the arguments, in a directory."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TOWPATH_", "OTEL_"))}
    port = ReservedPort()
    log = directory / f"{noun}.log"
    with log.open("a") as stderr:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "towpath.cli", noun, "run", *arguments),
            env={**kept, **environment, f"TOWPATH_{noun.upper()}__HEALTH_PORT": str(port.number)},
            cwd=directory,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=stderr,
            stderr=stderr,
        )
    try:
        yield Deployable(noun, process, log, port.number)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        port.release()
