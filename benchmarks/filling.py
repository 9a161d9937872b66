"""Rows of an outbox's table: a backlog of them, in transactions as services write them, and single ones."""

from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

import asyncpg

ROWS_PER_TRANSACTION: Final = 50
TRACEPARENT: Final = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
TRACE: Final = f'[["traceparent","{TRACEPARENT}"]]'
RANDOM_KEY: Final = "(random() * 1000)::integer::text"
PAYLOAD: Final = "decode(repeat('ab', 300), 'hex')"


@dataclass(frozen=True)
class Rows:
    """How messages are written down. `columns` makes a row of `m.id`, `m.key` and `topic`."""

    table: str
    names: str
    columns: str
    ids: str = "message_id"
    topic: str = "topic"
    """The column that has it, or what stands for it."""

    def select_ids(self, topic: str) -> str:
        """The ids of a topic's rows."""
        return f"select {self.ids} from {self.table} where {self.topic} = '{topic}'"

    def procedure(self, key: str = RANDOM_KEY) -> str:
        """Creates `public.fill(topic, transactions, rows of each)`, with this expression for the key."""
        return f"""
            create or replace procedure public.fill(topic text, transactions integer, rows_each integer)
            language plpgsql as $$
            begin
              for t in 1..transactions loop
                insert into {self.table} ({self.names})
                select {self.columns}
                from (select gen_random_uuid() as id, {key} as key from generate_series(1, rows_each)) m;
                commit;
              end loop;
            end $$
            """

    def insert(self) -> str:
        """Writes $4 rows to topic $1 with id $2 and key $3; where those are null, each row gets its own."""
        return f"""
            insert into {self.table} ({self.names})
            select {self.columns}
            from (select $1::text as topic, coalesce($2::uuid, gen_random_uuid()) as id,
                         coalesce($3::text, {RANDOM_KEY}) as key
                  from generate_series(1, $4::integer)) m
            """


FLOOR: Final = Rows(
    "public.floor_outbox",
    "topic, message_id, key, headers, payload",
    f"topic, m.id, m.key, '{TRACE}', {PAYLOAD}",
)
OUTBOX: Final = Rows(
    "towpath.outbox",
    "shard, message_id, kind, destination, type, key, content_type, headers, payload",
    "towpath.shard(topic, m.key, m.id), m.id, 'event', topic, 'order.placed', m.key, 'application/json', "
    f"'{TRACE}', {PAYLOAD}",
    topic="destination",
)
TXOUTBOX: Final = Rows(
    "public.outbox",
    "topic, key, headers, payload",
    f"topic, m.key, jsonb_build_object('ce_id', m.id, 'traceparent', '{TRACEPARENT}'), {PAYLOAD}",
    ids="(headers->>'ce_id')::uuid",
)
FASTSTREAM: Final = Rows(
    "public.outbox",
    "queue, headers, payload",
    f"topic, jsonb_build_object('ce_id', m.id, 'traceparent', '{TRACEPARENT}', 'key', m.key), {PAYLOAD}",
    ids="(headers->>'ce_id')::uuid",
    topic="queue",
)
DEBEZIUM: Final = Rows(
    "public.debezium_outbox",
    "id, aggregatetype, aggregateid, type, payload, traceparent",
    f"m.id, topic, m.key, 'order.placed', {PAYLOAD}, '{TRACEPARENT}'",
    ids="id",
    topic="aggregatetype",
)


async def fill(
    connection: "asyncpg.Connection[Any]",
    rows: Rows,
    topic: str,
    count: int,
    *,
    key: str = RANDOM_KEY,
    rows_each: int = ROWS_PER_TRANSACTION,
) -> list[UUID]:
    """Write a backlog and let the server settle; the ids of the topic's rows."""
    await connection.execute("set synchronous_commit = off")
    await connection.execute(rows.procedure(key))
    await connection.execute(f"call public.fill('{topic}', {count // rows_each}, {rows_each})")
    await settle(connection)
    return [row[0] for row in await connection.fetch(rows.select_ids(topic))]


async def settle(connection: "asyncpg.Connection[Any]") -> None:
    """What a server does by itself in the hours in which a backlog grows."""
    await connection.execute("vacuum analyze")
    await connection.execute("checkpoint")
