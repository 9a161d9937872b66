"""A relay that drains a backlog and takes samples of itself.

`python -m benchmarks.sampled DATABASE BROKER COUNT` prints the messages published while it took samples, the
CPU-seconds of each stage, and those of the process meanwhile as the system counted them.
"""

import asyncio
import json
import logging
import resource
import sys
import time

from benchmarks.drain import DEADLINE_SECONDS
from benchmarks.stages import Sampler
from towpath.brokers.factory import broker_from_url
from towpath.relay import Relay
from towpath.telemetry.metrics import OpenTelemetry

_LOOK_SECONDS = 0.01


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


async def relay_and_sample(url: str, broker_url: str, count: int) -> dict[str, object]:
    """From when the first window is published to the last."""
    broker, stop, sampler = broker_from_url(broker_url), asyncio.Event(), Sampler()
    relay = Relay(url, broker, telemetry=OpenTelemetry(broker.labels))
    running = asyncio.create_task(relay.run(stop))
    deadline = time.monotonic() + DEADLINE_SECONDS

    async def published(wanted: int) -> int:
        while (so_far := relay.status().published_count) < wanted:
            if running.done() or time.monotonic() > deadline:
                break
            await asyncio.sleep(_LOOK_SECONDS)
        return so_far

    before, cpu_before = await published(1), _cpu_seconds()
    sampler.start()
    after = await published(count)
    sampler.stop()
    cpu = _cpu_seconds() - cpu_before
    stop.set()
    await running
    return {
        "messages": after - before,
        "cpu_s": cpu,
        "samples": sampler.sample_count,
        "stages": dict(sampler.seconds),
    }


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    print(json.dumps(asyncio.run(relay_and_sample(sys.argv[1], sys.argv[2], int(sys.argv[3])))))
