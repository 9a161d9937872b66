-- Statements of operators' tools. Lock order in every transaction: key gates, then task rows, then dead letters, each
-- sorted; the engines keep the same order. Filters: $1 groups, $2 types, $3 reason codes, $4 fingerprints, $5 stages,
-- $6 keys, $7 catalog ids, $8 message ids (each null: any), $9 not before and $10 before (of the last death). Where a
-- row is found by its id, its state (and group) is compared as `state || ''`: else the index of all that are open, or of
-- a whole group, may be walked for every batch.

-- name: list_dead_letters
-- The newest first, below id $12 (null: from the newest); states $11 (null: any). Takes no locks; walks the primary
-- key backwards, or dead_letter_open.
select d.id, d.consumer_group, d.message_id, d.stage, d.state, d.type, d.kind, d.source, d.key, d.position,
       d.reason_code, d.error_class, d.error_message, d.fingerprint, d.attempts, d.death_count, d.replay_count,
       d.followers_passed, octet_length(d.payload) as payload_bytes, d.content_type, d.trace, d.copy_error,
       d.first_dead_at, d.last_dead_at, d.closed_at
  from towpath.dead_letter d
 where ($1::text[] is null or d.consumer_group = any($1)) and ($2::text[] is null or d.type = any($2))
   and ($3::text[] is null or d.reason_code = any($3)) and ($4::text[] is null or d.fingerprint = any($4))
   and ($5::text[] is null or d.stage = any($5)) and ($6::text[] is null or d.key = any($6))
   and ($7::bigint[] is null or d.id = any($7)) and ($8::uuid[] is null or d.message_id = any($8))
   and ($9::timestamptz is null or d.last_dead_at >= $9) and ($10::timestamptz is null or d.last_dead_at < $10)
   and ($11::text[] is null or d.state = any($11)) and ($12::bigint is null or d.id < $12)
 order by d.id desc limit $13

-- name: summarise_dead_letters
-- Causes of the open ones, the most frequent first, at most $11, each with its newest example. Takes no locks; reads
-- every open row.
with cause as (
  select d.consumer_group, d.stage, d.type, d.reason_code, d.error_class, d.fingerprint, count(*) as count,
         count(distinct d.key collate "C") as keys, min(d.first_dead_at) as first_dead_at, max(d.last_dead_at) as last_dead_at,
         max(d.replay_count) as replay_count, max(d.id) as sample_id
    from towpath.dead_letter d
   where d.state = 'open'
     and ($1::text[] is null or d.consumer_group = any($1)) and ($2::text[] is null or d.type = any($2))
     and ($3::text[] is null or d.reason_code = any($3)) and ($4::text[] is null or d.fingerprint = any($4))
     and ($5::text[] is null or d.stage = any($5)) and ($6::text[] is null or d.key = any($6))
     and ($7::bigint[] is null or d.id = any($7)) and ($8::uuid[] is null or d.message_id = any($8))
     and ($9::timestamptz is null or d.last_dead_at >= $9) and ($10::timestamptz is null or d.last_dead_at < $10)
   group by d.consumer_group, d.stage, d.type, d.reason_code, d.error_class, d.fingerprint
   order by count(*) desc, d.consumer_group, d.fingerprint limit $11
)
select c.*, d.error_message from cause c join towpath.dead_letter d on d.id = c.sample_id
 order by c.count desc, c.consumer_group, c.fingerprint

-- name: plan_dead_letters
-- The open ones that died before $11, in the order of their release: lanes by their oldest death, messages of a lane by
-- position. Takes no locks; read through a cursor.
select d.id, d.consumer_group, d.stage, d.type, d.reason_code, d.replay_count
  from towpath.dead_letter d
  left join towpath.task t on t.consumer_group = d.consumer_group and t.id = d.message_id
  cross join lateral (select coalesce(t.lane, case d.stage when 'publish' then d.key end) as name) lane
 where d.state = 'open' and d.last_dead_at < $11
   and ($1::text[] is null or d.consumer_group = any($1)) and ($2::text[] is null or d.type = any($2))
   and ($3::text[] is null or d.reason_code = any($3)) and ($4::text[] is null or d.fingerprint = any($4))
   and ($5::text[] is null or d.stage = any($5)) and ($6::text[] is null or d.key = any($6))
   and ($7::bigint[] is null or d.id = any($7)) and ($8::uuid[] is null or d.message_id = any($8))
   and ($9::timestamptz is null or d.last_dead_at >= $9) and ($10::timestamptz is null or d.last_dead_at < $10)
 order by d.consumer_group,
          min(d.id) over (partition by d.consumer_group, d.source, lane.name, case when lane.name is null then d.id end),
          d.position nulls first, d.id

-- name: show_dead_letter
-- One, by catalog id $1 or message id $2; with the state of its task. Indexes: the primary keys; by message id it
-- reads the unique key of every group.
select d.*, t.state as task_state, t.version as task_version
  from towpath.dead_letter d
  left join towpath.task t on t.consumer_group = d.consumer_group and t.id = d.message_id
 where ($1::bigint is null or d.id = $1) and ($2::uuid is null or d.message_id = $2)
 order by d.id

-- name: lanes_of_dead_letters
-- The dead tasks behind dead letters $2 of group $1, before anything is locked.
select t.id, t.source, t.lane, t.position
  from towpath.dead_letter d join towpath.task t on t.consumer_group = d.consumer_group and t.id = d.message_id
 where d.consumer_group = $1 and d.id = any($2::bigint[]) and d.state || '' = 'open' and t.state || '' = 'DEAD'
 order by t.position nulls first, d.id

-- name: lock_replay_gates
-- Lock the gate of each lane, made with our message at its head where there was none. In gate order.
insert into towpath.key_gate as g (consumer_group, source, lane, head)
select $1, x.source, x.lane, x.head from unnest($2::text[], $3::text[], $4::uuid[]) x(source, lane, head)
 order by x.source, x.lane
on conflict (consumer_group, source, lane) do update set head = g.head
returning g.source, g.lane, g.head, g.xmax = 0 as is_new

-- name: lock_dead_tasks
-- Index: primary key.
select t.id from towpath.task t where t.consumer_group = $1 and t.id = any($2::uuid[]) and t.state || '' = 'DEAD'
 order by t.id for update

-- name: lock_open_dead_letters
-- Index: primary key.
select d.id, d.consumer_group, d.message_id, d.type, d.source, d.trace from towpath.dead_letter d
 where d.id = any($1::bigint[]) and d.state || '' = 'open' and d.consumer_group || '' = $2
   and ($3::integer is null or d.replay_count < $3)
 order by d.id for update

-- name: move_replay_gate
-- Under the gate's lock.
update towpath.key_gate set head = $4 where consumer_group = $1 and source = $2 and lane = $3

-- name: drop_replay_gate
-- Under the gate's lock; it was made in this transaction and nothing moved.
delete from towpath.key_gate where consumer_group = $1 and source = $2 and lane = $3

-- name: revive_tasks
-- DEAD to WAITING, due now, or PARKED unless among the heads $3. A new life: attempts and age begin again, and a
-- deadline that has passed no longer counts. Body and headers are those of the newest revision; else what the row does
-- not hold comes from its dead letter. Both are locked
-- and known to be dead and open (asked again here, the partial index of open ones is walked for every row); indexes:
-- primary key and the unique key of dead_letter.
update towpath.task t
   set state = case when t.id = any($3::uuid[]) then 'WAITING' else 'PARKED' end,
       due_at = case when t.id = any($3::uuid[]) then towpath.clock() end,
       waiting_for = case when t.id = any($3::uuid[]) then 'replay' end,
       attempt = 0, deliveries = 0, started_at = null, finished_at = null, held_by = 'database',
       worker = null, token = null, effect_state = null, cancel_requested = false,
       deadline_at = case when t.deadline_at > towpath.clock() then t.deadline_at end,
       payload = case when r.revision is not null then r.payload else coalesce(t.payload, d.payload) end,
       content_type = coalesce(r.content_type, t.content_type, d.content_type),
       headers = coalesce(r.headers, t.headers, d.headers), trace = coalesce(t.trace, d.trace),
       key = coalesce(t.key, d.key), position = coalesce(t.position, d.position),
       version = t.version + 1, updated_at = towpath.clock()
  from towpath.dead_letter d
  left join lateral (select * from towpath.dead_letter_revision r where r.dead_letter = d.id
                      order by r.revision desc limit 1) r on true
 where t.consumer_group = $1 and t.id = any($2::uuid[]) and t.state || '' = 'DEAD'
   and d.consumer_group = t.consumer_group and d.message_id = t.id
returning t.id, 'DEAD' as from_state, t.state, t.version, t.attempt, t.run_no, t.due_at

-- name: republish
-- Refused messages go back under their own id, in the order of their first try. One that holds a publish gate closed
-- keeps its place too: it is put before what waits behind the gate, which opens; there are several where it was sent
-- to several destinations. The others are written into the outbox again. Indexes: primary key, publish_gate_head.
with letter as materialized (
  select d.id, d.message_id, d.kind, d.type, d.source, d.key, d.position, d.first_dead_at,
         case when r.revision is null then d.payload else r.payload end as payload,
         coalesce(r.content_type, d.content_type) as content_type, coalesce(r.headers, d.headers) as headers
    from towpath.dead_letter d
    left join lateral (select * from towpath.dead_letter_revision r where r.dead_letter = d.id
                        order by r.revision desc limit 1) r on true
   where d.id = any($1::bigint[]) and d.state || '' = 'open'
), opened as (
  update towpath.publish_gate g set released_at = towpath.clock()
    from letter d
   where g.message_id = d.message_id and g.released_at is null
  returning g.id as gate, g.sequence, d.id as letter, g.destination = d.source as is_of_source
), put_first as (
  insert into towpath.parked_message (gate, id, message_id, kind, type, key, content_type, headers, payload, created_at)
  select g.gate, g.sequence, d.message_id, coalesce(d.kind, 'event'), coalesce(d.type, 'unknown'), d.key,
         coalesce(d.content_type, 'application/octet-stream'), d.headers, d.payload, d.first_dead_at
    from opened g join letter d on d.id = g.letter
  on conflict (gate, id) do nothing
)
insert into towpath.outbox (shard, message_id, kind, destination, type, key, content_type, headers, payload)
select towpath.shard(d.source, d.key, d.message_id), d.message_id, coalesce(d.kind, 'event'), d.source,
       coalesce(d.type, 'unknown'), d.key, coalesce(d.content_type, 'application/octet-stream'), d.headers, d.payload
  from letter d where d.id <> all(array(select g.letter from opened g where g.is_of_source))
 order by d.position nulls first, d.id

-- name: open_publish_gates
-- What waits for dead letters $1 goes on without them. Indexes: primary key, publish_gate_head.
update towpath.publish_gate g set released_at = towpath.clock()
  from towpath.dead_letter d
 where d.id = any($1::bigint[]) and d.consumer_group || '' = '' and d.state || '' = 'open' and g.message_id = d.message_id
   and g.released_at is null

-- name: close_dead_letters
-- open to $2, where it is still open. Index: primary key.
update towpath.dead_letter d
   set state = $2, closed_at = towpath.clock(), replay_count = d.replay_count + case $2 when 'replayed' then 1 else 0 end
 where d.id = any($1::bigint[]) and d.state || '' = 'open'
returning d.id

-- name: record_moves
-- One line of history for each task moved.
insert into towpath.task_event (consumer_group, task_id, event, from_state, to_state, version, attempt, run_no, due_at,
                                error_message, actor)
select $1, x.id, $2, x.from_state, x.to_state, x.version, x.attempt, x.run_no, x.due_at, $10, $11
  from unnest($3::uuid[], $4::text[], $5::text[], $6::integer[], $7::integer[], $8::integer[], $9::timestamptz[])
       x(id, from_state, to_state, version, attempt, run_no, due_at)

-- name: raise_synchronous_commit
select towpath.raise_synchronous_commit()

-- name: list_tasks
-- The newest first: ids grow with time. $1 groups, $2 states, $3 types, $4 keys, $5 owners (each null: any), below id
-- $6. Takes no locks; walks the primary key backwards within each group, and skips from group to group.
with recursive g as (
  select min(t.consumer_group) as name from towpath.task t
  union all
  select (select min(t.consumer_group) from towpath.task t where t.consumer_group > g.name) from g
   where g.name is not null
)
select t.consumer_group, t.id, t.type, t.kind, t.source, t.key, t.owner, t.state, t.waiting_for, t.attempt,
       t.deliveries, t.version, t.run_no, t.held_by, t.worker, t.reason_code, t.error_class, t.error_message,
       t.fingerprint, t.due_at, t.deadline_at, t.created_at, t.updated_at, t.started_at, t.finished_at, t.trace
  from g cross join lateral (
    select * from towpath.task t
     where t.consumer_group = g.name
       and ($2::text[] is null or t.state = any($2)) and ($3::text[] is null or t.type = any($3))
       and ($4::text[] is null or t.key = any($4)) and ($5::text[] is null or t.owner = any($5))
       and ($6::uuid is null or t.id < $6)
     order by t.id desc limit $7
  ) t
 where $1::text[] is null or g.name = any($1)
 order by t.id desc limit $7

-- name: show_tasks
-- The rows of one message in every group, or in $2. Index: primary key when the group is given.
select t.consumer_group, t.id, t.type, t.kind, t.source, t.key, t.lane, t.position, t.owner, t.state, t.waiting_for,
       t.attempt, t.deliveries, t.version, t.run_no, t.held_by, t.worker, t.effect_state, t.cancel_requested,
       t.reason_code, t.error_class, t.error_message, t.fingerprint, t.due_at, t.deadline_at, t.created_at,
       t.updated_at, t.started_at, t.finished_at, t.trace, t.progress::text as progress, t.result_ref,
       octet_length(t.payload) as payload_bytes, octet_length(t.result) as result_bytes, t.content_type,
       d.id as dead_letter_id, d.state as dead_letter_state, coalesce(t.headers, d.headers)::text as headers
  from towpath.task t
  left join towpath.dead_letter d on d.consumer_group = t.consumer_group and d.message_id = t.id
 where t.id = $1 and ($2::text is null or t.consumer_group = $2)
 order by t.consumer_group

-- name: task_history
-- Index: primary key.
select e.at, e.event, e.from_state, e.to_state, e.version, e.attempt, e.run_no, e.due_at, e.reason_code, e.error_class,
       e.error_message, e.worker, e.actor, e.trace
  from towpath.task_event e where e.consumer_group = $1 and e.task_id = $2 order by e.seq

-- name: outbox_backlog
-- Per shard: owner, progress, what is not published yet and what is parked behind refused messages or because its
-- destination is paused, each counted up to $1 rows. Shards of an added broker only while it is of use to somebody: a
-- destination names it, a relay holds them, or something waits. Takes no locks; indexes: outbox_window, those of publish_gate.
select l.shard, l.relay, l.epoch, l.relay is not null and l.lease_until > towpath.clock() as is_owned,
       r.host as relay_host,
       extract(epoch from towpath.clock() - p.created_at)::float8 as journal_age_seconds,
       (select extract(epoch from towpath.clock() - c.proved_at)::float8 from towpath.canary c where c.shard = l.shard)
         as canary_age_seconds,
       b.pending, extract(epoch from towpath.clock() - b.oldest)::float8 as oldest_age_seconds,
       (select count(*) from (select from towpath.publish_gate g where g.shard = l.shard and g.policy = 'park_key'
                              limit $1) k) as keys_parked,
       (select count(*) from (select from towpath.publish_gate g join towpath.parked_message m on m.gate = g.id
                              where g.shard = l.shard and g.policy <> 'pause' limit $1) m) as parked,
       (select count(*) from (select from towpath.publish_gate g join towpath.parked_message m on m.gate = g.id
                              where g.shard = l.shard and g.policy = 'pause' limit $1) m) as paused,
       exists (select from towpath.publish_gate g where g.shard = l.shard and g.policy = 'block') as is_blocked
  from towpath.shard_lease l
  left join towpath.relay r on r.id = l.relay
  left join towpath.shard_progress p on p.shard = l.shard
  cross join lateral (
    select count(*) as pending, min(w.created_at) as oldest from (
      select o.created_at from (
        select o.id, o.xid, o.created_at from towpath.outbox o
         where o.shard = l.shard and o.xid = any(array(select pg_snapshot_xip(p.snapshot_from)))
        union all
        select o.id, o.xid, o.created_at from towpath.outbox o
         where o.shard = l.shard and o.xid >= pg_snapshot_xmax(p.snapshot_from)
      ) o
       where not (pg_visible_in_snapshot(o.xid, p.snapshot_to) and (p.last_id is null or o.id <= p.last_id))
       limit $1
    ) w
  ) b
 where l.shard < towpath.shards_per_broker() or b.pending > 0 or (l.relay is not null and l.lease_until > towpath.clock())
    or exists (select from towpath.destination d where d.broker = l.shard / towpath.shards_per_broker())
    or exists (select from towpath.publish_gate g where g.shard = l.shard)
 order by l.shard

-- name: outbox_slots
-- The ring: rows by the planner's estimate and bytes on disk of each slot. Catalog only.
select c.relname as name, greatest(c.reltuples, 0)::bigint as rows_estimated, pg_total_relation_size(c.oid) as bytes,
       c.relname = 'outbox_' || towpath.ring_slot() as is_current, pg_relation_size(c.oid) = 0 as is_empty
  from pg_inherits i join pg_class c on c.oid = i.inhrelid
 where i.inhparent = 'towpath.outbox'::regclass order by c.relname

-- name: destinations
-- Every destination with a row, a gate or a pause: gates that wait for a decision, and all that is parked, counted up
-- to $1. Indexes: primary keys.
select n.name, b.name as broker, coalesce(d.address, n.name) as address, coalesce(d.on_poison, 'park') as on_poison,
       (select count(*) from (select from towpath.publish_gate g where g.destination = n.name and g.policy <> 'pause'
                              limit $1) g) as gates,
       (select count(*) from (select from towpath.publish_gate g join towpath.parked_message m on m.gate = g.id
                              where g.destination = n.name limit $1) m) as parked,
       (select min(p.paused_at) from towpath.pause p
         where p.kind = 'publish' and p.name in ('*', n.name) and p.resumed_at is null) as paused_at
  from (select d.name from towpath.destination d union select g.destination from towpath.publish_gate g
        union select p.name from towpath.pause p where p.kind = 'publish' and p.name <> '*' and p.resumed_at is null) n
  left join towpath.destination d on d.name = n.name
  join towpath.broker b on b.number = coalesce(d.broker, 0)
 order by n.name

-- name: set_destination
-- $4 is a broker's number. Index: primary key.
with d as (
  insert into towpath.destination as d (name, address, on_poison, broker)
  values ($1, coalesce($2, $1), coalesce($3, 'park'), coalesce($4, 0))
  on conflict (name) do update set address = coalesce($2, d.address), on_poison = coalesce($3, d.on_poison),
                                   broker = coalesce($4, d.broker)
  returning d.name, d.address, d.on_poison, d.broker
)
select d.name, b.name as broker, d.address, d.on_poison from d join towpath.broker b on b.number = d.broker

-- name: is_moving
-- Whether destination $1 would leave its broker for that of number $2, and whether messages are still on their way to
-- the old one: not published, or held there. Reads every retained row.
select coalesce((select d.broker from towpath.destination d where d.name = $1), 0) <> $2::smallint as is_moving,
       exists (select from towpath.outbox_message o where o.destination = $1 and o.status = 'PENDING')
         or exists (select from towpath.publish_gate g where g.destination = $1) as is_used

-- name: brokers
-- Brokers with what relays wrote down of them, how many live relays each has, and how many destinations name it.
select b.number, b.name, b.cluster, b.home,
       (select count(distinct l.relay) from towpath.shard_lease l
        where l.lease_until > towpath.clock() and l.shard / towpath.shards_per_broker() = b.number) as relays,
       (select count(*) from towpath.destination d where d.broker = b.number) as destinations
  from towpath.broker b order by b.number

-- name: forget_destination
-- Index: primary key.
delete from towpath.destination d where d.name = $1 returning d.name

-- name: lacking
-- Of the privileges ($1 kinds, $2 things, $3 privileges, $4 columns) those that the login does not have. What does not
-- exist is not lacking: `db check` tells it. Reads the catalog, takes no lock.
select w.kind, w.thing, w.privilege, w.column
from unnest($1::text[], $2::text[], $3::text[], $4::text[]) as w(kind, thing, privilege, "column")
where not coalesce(case w.kind
  when 'schema' then has_schema_privilege(w.thing, w.privilege)
  when 'function' then has_function_privilege(to_regprocedure(w.thing), w.privilege)
  when 'sequence' then has_sequence_privilege(to_regclass(w.thing), w.privilege)
  when 'column' then has_column_privilege(to_regclass(w.thing), w.column, w.privilege)
  else has_table_privilege(to_regclass(w.thing), w.privilege) end, true)

-- name: horizon_holders
-- Who has kept vacuum from removing dead rows for more than $1 seconds. Another login's activity is seen without its text.
-- Reads the server's views, takes no lock.
select format('%s %s (pid %s, %s)', coalesce(a.usename, 'somebody'), coalesce(a.state, 'at work'), a.pid,
              coalesce(nullif(a.application_name, ''), 'no application name')) as holder,
       extract(epoch from clock_timestamp() - a.xact_start)::float8 as seconds
from pg_stat_activity a
where a.backend_type = 'client backend' and a.pid <> pg_backend_pid()
  and (a.backend_xmin is not null or a.backend_xid is not null)
  and a.xact_start < clock_timestamp() - make_interval(secs => $1)
union all
select format('the prepared transaction %s', p.gid), extract(epoch from clock_timestamp() - p.prepared)::float8
from pg_prepared_xacts p where p.prepared < clock_timestamp() - make_interval(secs => $1)
order by seconds desc
limit 5
