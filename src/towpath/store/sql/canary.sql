-- Canaries: one small message per shard and minute, whose confirmation by the broker is noted by its id. Sixteen rows a
-- broker, read as a whole.

-- name: write
-- A new one into each of shards $1 whose last is confirmed and $2 seconds old, or $3 seconds old and will not come.
-- Returns those given up. Locks its own rows; only the owner of a shard writes.
with due as materialized (
  select s.shard, c.message_id, c.is_confirmed from unnest($1::smallint[]) s(shard) left join towpath.canary c on c.shard = s.shard
  where c.shard is null
     or (c.is_confirmed and c.written_at <= towpath.clock() - make_interval(secs => $2))
     or c.written_at <= towpath.clock() - make_interval(secs => $3)
), written as (
  insert into towpath.canary as c (shard, message_id)
  select d.shard, gen_random_uuid() from due d order by d.shard
  on conflict (shard) do update
    set message_id = excluded.message_id, written_at = towpath.clock(), is_confirmed = false
  returning c.shard, c.message_id
), sent as (
  insert into towpath.outbox (shard, message_id, kind, destination, type, key, content_type, payload)
  select w.shard, w.message_id, 'event', 'towpath.canary', 'towpath.canary', null, 'text/plain', 'canary'
  from written w, towpath.raise_synchronous_commit()
)
select d.shard, d.message_id from due d where not d.is_confirmed order by d.shard

-- name: confirm
-- The broker confirmed messages $1.
update towpath.canary set is_confirmed = true, proved_at = towpath.clock() where message_id = any($1::uuid[])

-- name: age
-- Seconds since the delivery of the shard of $1 to $2 was last proved for which that is longest; null where none was.
select extract(epoch from towpath.clock() - min(c.proved_at))::float8 from towpath.canary c where c.shard between $1 and $2
