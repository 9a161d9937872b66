"""Retries that become due at one moment, as after a long outage: each of a key of its own, with its gate."""

from collections.abc import Sequence
from dataclasses import replace

import asyncpg

from benchmarks.cells.round import Round
from benchmarks.drain import drain, worker, worker_registered
from benchmarks.filling import TRACEPARENT
from benchmarks.measure import Sample
from benchmarks.orders import PAYLOAD, TYPE
from benchmarks.stage import Message, Wire, messages
from towpath.messages import dump_headers

_CHUNK = 5_000
_WAIT = """
insert into towpath.task (consumer_group, id, type, kind, source, key, lane, position, state, held_by, due_at,
                          waiting_for, attempt, version, payload, content_type, headers, trace, reason_code)
select $1, x.id, $2, 'event', $1, x.key, x.key, x.position, 'WAITING', 'database', now() + interval '1 day',
       'retry', 1, 2, $3, 'application/octet-stream', x.headers::json, $4, 'benchmark'
  from unnest($5::uuid[], $6::text[], $7::bigint[], $8::text[]) x(id, key, position, headers)
"""
_GATES = """
insert into towpath.key_gate (consumer_group, source, lane, head)
select consumer_group, source, lane, id from towpath.task
"""
_DUE = "update towpath.task set due_at = now() + interval '2 seconds' where state = 'WAITING'"
_DONE = "select id, finished_at from towpath.task where state = 'SUCCEEDED' and attempt = 2"


async def retries(round_: Round) -> Sample:
    """Drained by a worker that is there already. `first_message_s` counts from the due time."""
    stage = round_.stage
    count = round_.size(100_000, 10_000)
    topic = stage.fresh_name("retries")
    await stage.topic(topic, topic)
    numbers = iter(range(count))
    waiting = messages(count, lambda: f"key-{next(numbers)}")
    async with stage.database() as url:
        connection = await asyncpg.connect(url, command_timeout=600)
        await _fill(connection, topic, waiting)
        due_at = None

        async def make_due(_: asyncpg.Connection) -> None:
            nonlocal due_at
            await worker_registered(connection)
            await connection.execute(_DUE)
            due_at = await connection.fetchval("select min(due_at) from towpath.task")

        programs = {"worker": worker("noop", topic, url, stage)}
        ids = [message.id for message in waiting]
        sample = await drain(stage, url, programs, _DONE, ids, ready=make_due)
        first = await connection.fetchval(f"select min(finished_at) from ({_DONE}) d")
        gated = await connection.fetchval("select count(*) from towpath.key_gate")
        await connection.close()
    if gated and not sample.is_void:
        sample = replace(sample, is_void=True, note=f"{gated} keys are still gated")
    return replace(sample, first_message_s=(first - due_at).total_seconds() if first and due_at else None)


async def _fill(connection: asyncpg.Connection, topic: str, waiting: Sequence[Message]) -> None:
    wire = Wire()
    for start in range(0, len(waiting), _CHUNK):
        chunk = waiting[start : start + _CHUNK]
        await connection.execute(
            _WAIT,
            topic,
            TYPE,
            PAYLOAD,
            TRACEPARENT,
            [message.id for message in chunk],
            [message.key for message in chunk],
            list(range(start, start + len(chunk))),
            [dump_headers(wire.headers(message, start + n)) for n, message in enumerate(chunk)],
        )
    await connection.execute(_GATES)
    await connection.execute("vacuum analyze towpath.task")
