"""Where the relay's CPU goes: microseconds a message by stage, from samples of a relay that drains a backlog.

The stages add up to what the process used, and the ids that came out are those committed.
"""

import json
import platform
import sys
from asyncio.subprocess import PIPE
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import aiormq
import asyncpg

from benchmarks.cells.publishing import exchange, read_queue
from benchmarks.drain import DEADLINE_SECONDS, Program
from benchmarks.filling import OUTBOX, fill
from benchmarks.measure import difference
from benchmarks.relaying import Watch
from benchmarks.report import row
from benchmarks.stage import Stage, open_stage
from benchmarks.stages import STAGES

_MOST_APART = 0.02
"""Of the sum of the stages and what the system counted."""


@dataclass
class Profile:
    """What came of the rounds of one broker."""

    messages: int = 0
    cpu_s: float = 0.0
    samples: int = 0
    stages: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def add(self, found: dict[str, Any]) -> None:
        """One more round."""
        self.messages += found["messages"]
        self.cpu_s += found["cpu_s"]
        self.samples += found["samples"]
        self.stages.update(found["stages"])

    def judge(self) -> None:
        """The stages have to add up."""
        total = sum(self.stages.values())
        if not self.messages or abs(total - self.cpu_s) > _MOST_APART * self.cpu_s:
            self.faults.append(f"the stages add up to {total:.3f} s of {self.cpu_s:.3f} s")

    def facts(self, broker: str) -> dict[str, Any]:
        """The line that is printed."""
        per_message = {
            name: round(self.stages[name] / max(1, self.messages) * 1e6, 2)
            for name in STAGES
            if name in self.stages
        }
        return {
            "broker": broker,
            "messages": self.messages,
            "samples": self.samples,
            "cpu_us_per_message": round(self.cpu_s / max(1, self.messages) * 1e6, 2),
            "stages": per_message,
            "void": self.faults,
        }


async def _kafka(stage: Stage, name: str) -> tuple[str, Callable[[int], Awaitable[list[UUID]]]]:
    await stage.topic(name)

    async def read(count: int) -> list[UUID]:
        async with Watch(stage.kafka.bootstrap, name) as watch:
            ids, _ = await watch.read(count)
        return ids

    return f"kafka://{stage.kafka.bootstrap}", read


async def _rabbitmq(stage: Stage, name: str) -> tuple[str, Callable[[int], Awaitable[list[UUID]]]]:
    queue = await exchange(stage.rabbit.url, name)

    async def read(count: int) -> list[UUID]:
        connection = await aiormq.connect(stage.rabbit.url)
        ids = await read_queue(await connection.channel(), queue, count)
        await connection.close()
        return ids

    return stage.rabbit.url, read


BROKERS = {"kafka": _kafka, "rabbitmq": _rabbitmq}
CELLS = tuple(BROKERS)


async def _round(stage: Stage, broker: str, profile: Profile) -> None:
    name, count = stage.fresh_name("profiled"), 20_000 if stage.is_quick else 200_000
    broker_url, read = await BROKERS[broker](stage, name)
    async with stage.database() as url:
        connection = await asyncpg.connect(url, command_timeout=DEADLINE_SECONDS)
        committed = await fill(connection, OUTBOX, name, count)
        await connection.close()
        program = Program(["-m", "benchmarks.sampled", url, broker_url, str(count)])
        process = await program.start(PIPE)
        printed, _ = await process.communicate()
        ids = await read(count)
    if printed:
        profile.add(json.loads(printed))
    if fault := difference(committed, ids):
        profile.faults.append(fault)


async def main(*, quick: bool, as_json: bool, rounds: int, cells: Sequence[str]) -> bool:
    """Run and print; False when one is void."""
    profiles = {broker: Profile() for broker in cells}
    async with open_stage(quick=quick) as stage:
        for number in range(1, rounds + 1):
            for broker, profile in profiles.items():
                await _round(stage, broker, profile)
                print(f"round {number}: {broker}", file=sys.stderr)
        connection = await asyncpg.connect(stage.postgres.url())
        version = await connection.fetchval("show server_version")
        await connection.close()
    for broker, profile in profiles.items():
        profile.judge()
        facts = profile.facts(broker)
        print(json.dumps(facts) if as_json else shown(facts))
    if not as_json:
        print(f"Python {platform.python_version()}, Postgres {version}, {platform.machine()}")
    return not any(profile.faults for profile in profiles.values())


def shown(facts: dict[str, Any]) -> str:
    """A table for docs/performance.md."""
    whole = facts["cpu_us_per_message"]
    stages = facts["stages"]
    lines = [
        [facts["broker"], "what", "µs a message", "share"],
        ["---"] * 4,
        *([name, STAGES[name], f"{us:.2f}", f"{us / whole:.0%}"] for name, us in stages.items()),
        [
            "**sum**",
            f"{facts['messages']:,} messages, {facts['samples']:,} samples",
            f"{sum(stages.values()):.2f}",
            "",
        ],
        ["process", "as the system counted it", f"{whole:.2f}", ""],
    ]
    return "\n".join([*map(row, lines), *(f"VOID: {fault}" for fault in facts["void"])])
