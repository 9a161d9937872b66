"""The relay with a broker that costs next to nothing and notes what it gets.

`python -m benchmarks.notebook URL WAKEUP` reads a number from standard input, waits until it has noted so
many ids, ends the relay and prints them.
"""

import asyncio
import contextlib
import sys
import time
from collections.abc import Sequence
from typing import cast
from uuid import UUID

from towpath.brokers.memory.broker import MemoryBroker
from towpath.brokers.memory.hub import hub_named
from towpath.brokers.memory.publisher import MemoryPublisher
from towpath.brokers.ports import OutboundMessage, PublishResult
from towpath.relay import Relay, RelayOptions
from towpath.settings import WakeupMode

_PATIENCE_SECONDS = 120
_MAX_BYTES = 1_000_000


class Notebook(MemoryPublisher):
    """A publisher that notes ids and keeps nothing else."""

    def __init__(self) -> None:
        super().__init__(hub_named("notebook"), _MAX_BYTES)
        self.ids: list[UUID] = []
        self.arrived: asyncio.Queue[float] = asyncio.Queue()

    async def publish(self, window: Sequence[OutboundMessage], *, timeout_seconds: float) -> PublishResult:
        del timeout_seconds  # it answers at once
        self.ids += [message.message_id for message in window]
        self.arrived.put_nowait(time.perf_counter())
        return PublishResult(acknowledged=set(range(len(window))))


class NotingBroker(MemoryBroker):
    """The broker of one notebook."""

    def __init__(self) -> None:
        super().__init__("memory://notebook")
        self.notebook = Notebook()

    def publisher(self) -> Notebook:
        return self.notebook


async def relay_until_told(url: str, mode: WakeupMode) -> list[UUID]:
    """What was noted when it was enough, or no more came."""
    broker, stop = NotingBroker(), asyncio.Event()
    notebook = broker.notebook
    running = asyncio.create_task(Relay(url, broker, RelayOptions(wakeup=mode)).run(stop))
    count = int(await asyncio.to_thread(sys.stdin.readline) or 0)
    with contextlib.suppress(TimeoutError):  # what is missing is seen by who counts
        async with asyncio.timeout(_PATIENCE_SECONDS):
            while len(notebook.ids) < count:
                await notebook.arrived.get()
    stop.set()
    await running
    return notebook.ids


if __name__ == "__main__":
    ids = asyncio.run(relay_until_told(sys.argv[1], cast(WakeupMode, sys.argv[2])))
    print("\n".join(id_.hex for id_ in ids))
