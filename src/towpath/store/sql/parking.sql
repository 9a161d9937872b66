-- Publish gates and the messages behind them. All writes run in a transaction that is fenced by the journal's append,
-- so that only the owner of a shard closes, fills and removes its gates; operators only mark them as released.

-- name: state
-- Of shards $1: whether there are gates, and whether one blocks the shard; none on another server than the one with
-- start time $2. Indexes: of publish_gate by shard.
select s.shard, exists (select from towpath.publish_gate g where g.shard = s.shard) as has_gates,
       exists (select from towpath.publish_gate g where g.shard = s.shard and g.policy = 'block') as is_blocked
from unnest($1::smallint[]) s(shard) where pg_postmaster_start_time()::text = $2

-- name: gates_of
-- The gates that some rows wait behind: shard $1, destination $2, key $3, element by element; and, with a null key, those
-- of destinations that are paused in these shards. Asked of the server with start time $4, else one row with a null
-- gate. Indexes: unique (shard, destination, key), publish_gate_pause.
select g.id as gate, g.shard, g.destination, g.key, g.sequence
from unnest($1::smallint[], $2::text[], $3::text[]) w(shard, destination, key)
join towpath.publish_gate g on g.shard = w.shard and g.destination = w.destination and g.key = w.key
where g.policy <> 'pause' and pg_postmaster_start_time()::text = $4
union all
select g.id, g.shard, g.destination, null, null from towpath.publish_gate g
where g.policy = 'pause' and g.shard = any($1::smallint[]) and pg_postmaster_start_time()::text = $4
union all
select null, null, null, null, null where pg_postmaster_start_time()::text <> $4

-- name: close
-- A gate for message $5 with outbox id $6; the same gate again where a message behind it is refused too.
insert into towpath.publish_gate as g (shard, destination, key, policy, message_id, sequence)
values ($1, $2, $3, $4, $5, $6)
on conflict (shard, destination, key) do update
   set policy = excluded.policy, message_id = excluded.message_id, sequence = excluded.sequence, released_at = null

-- name: pause
-- The gate of paused destination $2 in shard $1, made where there is none.
insert into towpath.publish_gate as g (shard, destination, policy) values ($1, $2, 'pause')
on conflict (shard, destination) where policy = 'pause' do update set destination = g.destination
returning g.id

-- name: close_again
-- Gate $1 waits for another message now.
update towpath.publish_gate set policy = $2, message_id = $3, sequence = $4, released_at = null where id = $1

-- name: park
-- Rows behind gates, element by element; what is there already stays. $10: microseconds since 2000-01-01 UTC.
insert into towpath.parked_message (gate, id, message_id, kind, type, key, content_type, headers, payload, created_at)
select w.gate, w.id, w.message_id, w.kind, w.type, w.key, w.content_type, w.headers::json, w.payload,
       timestamptz '2000-01-01 00:00:00+00' + w.created_at * interval '1 microsecond'
from unnest($1::bigint[], $2::bigint[], $3::uuid[], $4::text[], $5::text[], $6::text[], $7::text[], $8::text[],
            $9::bytea[], $10::bigint[]) w(gate, id, message_id, kind, type, key, content_type, headers, payload, created_at)
on conflict (gate, id) do nothing

-- name: released
-- At most $2 gates of shards $1 that a person has opened: whose dead letter was decided about, or whose destination is
-- paused no more, nor its shard blocked. Nothing of a paused destination; none on another server than the one with
-- start time $3. Indexes: publish_gate_released, publish_gate_pause, publish_gate_block.
select g.id as gate, g.shard, g.is_pause from (
  select g.id, g.shard, g.destination, false as is_pause from towpath.publish_gate g
  where g.shard = any($1::smallint[]) and g.released_at is not null
  union all
  select g.id, g.shard, g.destination, true from towpath.publish_gate g
  where g.shard = any($1::smallint[]) and g.policy = 'pause'
    and not exists (select from towpath.publish_gate b where b.shard = g.shard and b.policy = 'block')
) g
where pg_postmaster_start_time()::text = $3
  and not exists (select from towpath.pause p
                  where p.kind = 'publish' and p.name in ('*', g.destination) and p.resumed_at is null)
order by g.id limit $2

-- name: behind
-- The first messages behind gates $1, in order, as the outbox gives its rows, with the gate at the end: at most $2 of
-- a gate, and of all up to $3 bytes but always the first. Index: primary key.
select o.id, o.shard, o.message_id, o.kind, o.destination, o.type, o.key, o.content_type, o.headers::text as headers,
       o.payload, (extract(epoch from o.created_at - timestamptz '2000-01-01 00:00:00+00') * 1000000)::bigint as created_at,
       towpath.key_hash(o.key, o.message_id) as key_hash, o.gate
from (
  select g.shard, g.destination, m.*,
         coalesce(octet_length(m.payload), 0) + pg_column_size(m.headers) as size,
         sum(coalesce(octet_length(m.payload), 0) + pg_column_size(m.headers))
           over (order by m.gate, m.id rows unbounded preceding) as upto_here
  from towpath.publish_gate g
  cross join lateral (select * from towpath.parked_message p where p.gate = g.id order by p.id limit $2) m
  where g.id = any($1::bigint[])
) o
where o.upto_here <= $3::bigint or o.upto_here = o.size
order by o.gate, o.id

-- name: unpark
-- Messages that are sent or given up: gate $1, id $2, element by element. Index: primary key.
delete from towpath.parked_message m using unnest($1::bigint[], $2::bigint[]) w(gate, id)
where m.gate = w.gate and m.id = w.id

-- name: remove
-- Those of gates $1 that are open and have nothing behind them. A person acts on closed ones only. Index: primary key.
delete from towpath.publish_gate g
where g.id = any($1::bigint[]) and (g.released_at is not null or g.policy = 'pause')
  and not exists (select from towpath.parked_message m where m.gate = g.id)
returning g.id

-- name: count
-- Gates of shards $1 that wait for a decision, up to 100,000.
select count(*) from (select from towpath.publish_gate g
                      where g.shard = any($1::smallint[]) and g.policy <> 'pause' limit 100000) c
