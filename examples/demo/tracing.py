"""One message's whole trace: from the producer's transaction through its retries to the replay."""

import asyncio
import time
from pathlib import Path
from typing import Any, Final

import asyncpg
from rich.console import Console

from examples.demo.promises import AGENTS
from towpath.telemetry.tracing import trace_id_of
from towpath.telemetry.tree import TraceTree, load_trace, render_trace

_REPLAYED: Final = """
    select t.id, t.trace from towpath.task t
      join towpath.dead_letter d on d.consumer_group = t.consumer_group and d.message_id = t.id
     where t.consumer_group = $1 order by d.attempts desc, d.id limit 1
"""
_WAIT_SECONDS: Final = 30.0
"""Processes write their spans twice a second, unless the machine has no time for them."""


async def show_trace(connection: "asyncpg.Connection[Any]", console: Console, traces: Path) -> bool:
    """Print the trace of one replayed task; whether it is in one piece."""
    row = await connection.fetchrow(_REPLAYED, AGENTS)
    trace_id = None if row is None else trace_id_of(row["trace"])
    if row is None or trace_id is None:
        console.print("         no replayed task has a trace")
        return False
    is_whole = await _written(traces, trace_id)
    console.print(f"         message {row['id']}, a task of the group {AGENTS}", highlight=False)
    console.print(render_trace([traces], trace_id))
    return is_whole


async def _written(traces: Path, trace_id: str) -> bool:
    """Wait until every process has written its part."""
    deadline = time.monotonic() + _WAIT_SECONDS
    while True:
        if _is_whole(load_trace([traces], trace_id)):
            return True
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.2)


def _is_whole(trace: TraceTree) -> bool:
    """Also where it came behind one of its key that waited, and so was started from the database."""
    steps = [node.step for node, _ in trace.walk()]
    return (
        trace.is_connected
        and {"emit", "relay", "retry"} <= set(steps)
        and not {"process", "promoted"}.isdisjoint(steps)
        and steps.count("replay") >= 2
    )
