"""A procedure that fills a table with a backlog, in transactions as services write them."""

ROWS_PER_TRANSACTION = 50
TRACE = '[["traceparent","00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"]]'

FILL = """
create or replace procedure public.fill(topic text, transactions integer, rows_each integer)
language plpgsql as $$
begin
  for t in 1..transactions loop
    insert into {table}
    select {columns}
    from (select gen_random_uuid() as id, {key} as key
          from generate_series(1, rows_each)) m;
    commit;
  end loop;
end $$
"""
RANDOM_KEY = "(random() * 1000)::integer::text"

FLOOR = FILL.format(
    key=RANDOM_KEY,
    table="public.floor_outbox (message_id, key, headers, payload)",
    columns=f"m.id, m.key, '{TRACE}', decode(repeat('ab', 300), 'hex')",
)


def outbox_rows(key: str = RANDOM_KEY) -> str:
    """The procedure that fills the outbox, with this expression for the key."""
    return FILL.format(
        key=key,
        table="towpath.outbox "
        "(shard, message_id, kind, destination, type, key, content_type, headers, payload)",
        columns=f"""towpath.shard(topic, m.key, m.id), m.id, 'event', topic, 'order.placed', m.key,
                'application/json', '{TRACE}', decode(repeat('ab', 300), 'hex')""",
    )
