"""What the outbox costs its writers: commits a second beside a bare INSERT of the same row, by pgbench."""

import asyncio
import re
import tempfile
import time
from asyncio.subprocess import PIPE
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

import asyncpg

from benchmarks.cells.round import Round, Trial
from benchmarks.drain import DEADLINE_SECONDS, Program
from benchmarks.filling import OUTBOX
from benchmarks.measure import CpuMeter, Sample, difference
from towpath.testing.services.postgres import run_client

CONNECTIONS = (1, 16, 64)
_ROW = """
\\set shard random(0, 15)
insert into towpath.outbox (shard, message_id, kind, destination, type, key, content_type, headers, payload)
values (:shard, gen_random_uuid(), 'event', 'orders', 'order.placed', :shard, 'application/json', '[]',
        decode(repeat('ab', 300), 'hex'));
"""


@dataclass(frozen=True)
class Writing:
    """How the table is set up and what the relay does."""

    has_trigger: bool = True
    has_relay: bool = True
    is_woken_before: bool = False
    """Rows are written for a while before it is measured."""
    is_always_asked: bool = False
    """Each commit notifies, also while the relay is awake."""


WRITINGS: Mapping[str, Writing] = {
    "bare": Writing(has_trigger=False, has_relay=False),
    "no relay": Writing(has_relay=False),
    "always notifying": Writing(is_woken_before=True, is_always_asked=True),
    "relay asleep": Writing(),
    "towpath": Writing(is_woken_before=True),
}


def trial_of(writing: Writing, connections: int) -> Trial:
    """Commit single rows over so many connections."""

    async def trial(round_: Round) -> Sample:
        async with round_.stage.database() as url:
            return await _write(round_, url, writing, connections)

    return trial


async def _write(round_: Round, url: str, writing: Writing, connections: int) -> Sample:
    server, seconds = round_.stage.postgres, round_.size(10, 1)
    db = await asyncpg.connect(url, command_timeout=DEADLINE_SECONDS)
    switch = "enable" if writing.has_trigger else "disable"
    await db.execute(f"alter table towpath.outbox {switch} trigger wake_relays")
    relay = None
    if writing.has_relay:
        relay = await Program(["-m", "benchmarks.notebook", url, "auto"]).start(PIPE, stdin=PIPE)
    noted = b""
    try:
        if relay is not None:
            await _until_asleep(db)
        if writing.is_woken_before:
            await asyncio.to_thread(_bench, url, connections, round_.size(3, 1))
        if writing.is_always_asked:
            await db.execute("select setval('towpath.relays_asleep_until', 99999999999)")
        before = await db.fetchval("select count(*) from towpath.outbox")
        meter = CpuMeter({"postgres": server.pid, **({} if relay is None else {"relay": relay.pid})})
        meter.start()
        count, rate = await asyncio.to_thread(_bench, url, connections, seconds)
        cpu = meter.stop()
        written = [row[0] for row in await db.fetch(OUTBOX.select_ids("orders"))]
        if relay is not None:
            noted, _ = await relay.communicate(f"{len(written)}\n".encode())
    finally:
        if relay is not None and relay.returncode is None:
            relay.kill()
            await relay.wait()
        await db.close()
    fault = "" if relay is None else difference(written, [UUID(hex_) for hex_ in noted.decode().split()])
    if len(written) - before != count:
        fault += f" {len(written) - before} rows of {count} transactions"
    return Sample(
        messages_per_s=rate,
        cpu_s_per_million={name: used / count * 1e6 for name, used in cpu.items()},
        rss_mb=None,
        first_message_s=None,
        is_void=bool(fault),
        note=fault,
    )


async def _until_asleep(db: "asyncpg.Connection[Any]") -> None:
    deadline = time.monotonic() + 60
    while not await db.fetchval(
        "select last_value > extract(epoch from clock_timestamp()) from towpath.relays_asleep_until"
    ):
        if time.monotonic() > deadline:
            raise TimeoutError("the relay does not fall asleep")
        await asyncio.sleep(0.1)


def _bench(url: str, connections: int, seconds: int) -> tuple[int, float]:
    """Transactions, and how many a second without the time for connecting."""
    with tempfile.TemporaryDirectory() as scratch:
        script = Path(scratch, "row.sql")
        script.write_text(_ROW)
        text = run_client(
            "pgbench",
            *("--no-vacuum", "--protocol=prepared", f"--file={script}", f"--time={seconds}"),
            *(f"--client={connections}", f"--jobs={min(connections, 2)}", url),
        )
    count = re.search(r"transactions actually processed: (\d+)", text)
    rate = re.search(r"tps = ([\d.]+) \(without initial", text)
    if count is None or rate is None:
        raise RuntimeError(f"pgbench said: {text}")
    return int(count[1]), float(rate[1])


TRIALS = {
    connections: {name: trial_of(writing, connections) for name, writing in WRITINGS.items()}
    for connections in CONNECTIONS
}
