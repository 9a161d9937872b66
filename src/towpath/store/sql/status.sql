-- How things stand, from the database alone. Take no locks.

-- name: relays
-- Relays that beat of late, with the shards each holds and whether idle ones are notified. Index: primary keys.
select r.id, r.host, r.version, r.started_at, r.seen_at, extract(epoch from towpath.clock() - r.seen_at)::float8 as seen_ago_seconds,
       array(select l.shard from towpath.shard_lease l where l.relay = r.id and l.lease_until > towpath.clock()
             order by l.shard) as shards,
       (select s.last_value from towpath.relays_asleep_until s) > extract(epoch from towpath.clock()) as is_notified
  from towpath.relay r order by r.started_at, r.id

-- name: backlog
-- Of shards $1 to $2: how many nobody holds, committed rows that the journal does not call sent, up to $3, and seconds
-- since the oldest of them was written; open dead letters that no group has, up to $3, since they were not published;
-- seconds since the transaction began that has held the vacuum horizon longest, a second and more, of those that this
-- role may see; and the statement's own snapshot. Reads the journal, which is trimmed, and leases from the newest entry
-- of each shard, as renewals do; indexes: outbox_window, primary key of leases, dead_letter_open. Transactions in progress
-- are probed one by one: before Postgres 17 a list of them is not always a way into the index, as in `poll`.
with s as materialized (
  select l.shard, l.relay, l.lease_until, p.snapshot_from, p.snapshot_to, p.last_id
  from generate_series($1::integer, $2::integer) n(shard)
  cross join lateral (
    select l.shard, l.relay, l.lease_until from towpath.shard_lease l where l.shard = n.shard
    order by l.epoch desc, l.lease_until desc limit 1
  ) l
  left join towpath.shard_progress p on p.shard = l.shard
)
select count(*) filter (where s.relay is null or s.lease_until <= towpath.clock()) as unowned,
       coalesce(extract(epoch from towpath.clock() - min(b.oldest)), 0)::float8 as oldest_unsent_seconds,
       (select count(*) from (
          select from s cross join lateral (
            select from pg_snapshot_xip(s.snapshot_from) x, lateral (
              select from towpath.outbox o where o.shard = s.shard and o.xid = x
                and not (pg_visible_in_snapshot(x, s.snapshot_to) and (s.last_id is null or o.id <= s.last_id)) offset 0) o
            union all
            select from towpath.outbox o
             where o.shard = s.shard and o.xid >= pg_snapshot_xmax(s.snapshot_from)
               and not (pg_visible_in_snapshot(o.xid, s.snapshot_to) and (s.last_id is null or o.id <= s.last_id))
          ) w limit $3) x) as pending,
       (select count(*) from (select from towpath.dead_letter d where d.consumer_group = '' and d.state = 'open'
          limit $3) x) as dead_letters,
       coalesce((select extract(epoch from clock_timestamp() - min(a.xact_start)) from pg_stat_activity a
          where a.backend_xmin is not null and a.backend_type = 'client backend' and a.pid <> pg_backend_pid()
            and a.xact_start < clock_timestamp() - interval '1 s'), 0)::float8 as horizon_seconds,
       pg_snapshot_xmin(pg_current_snapshot())::text as xmin, pg_snapshot_xmax(pg_current_snapshot())::text as xmax
  from s
  cross join lateral (
    select min(w.created_at) as oldest from (
      (select o.created_at from pg_snapshot_xip(s.snapshot_from) x, lateral (
        select o.created_at from towpath.outbox o where o.shard = s.shard and o.xid = x
          and not (pg_visible_in_snapshot(x, s.snapshot_to) and (s.last_id is null or o.id <= s.last_id)) offset 0) o
        limit 1)
      union all
      (select o.created_at from towpath.outbox o
        where o.shard = s.shard and o.xid >= pg_snapshot_xmax(s.snapshot_from)
          and not (pg_visible_in_snapshot(o.xid, s.snapshot_to) and (s.last_id is null or o.id <= s.last_id))
        order by o.xid, o.id limit 1)
    ) w
  ) b

-- name: oldest_transaction
-- What has been open longest and keeps others from cleaning up, as far as this role may see.
select x.pid, x.kind, extract(epoch from clock_timestamp() - x.began)::float8 as age_seconds from (
  select a.pid, coalesce(nullif(a.application_name, ''), a.usename::text, 'unknown') || ', ' || a.state as kind,
         a.xact_start as began
    from pg_stat_activity a
   where a.pid <> pg_backend_pid() and a.backend_type = 'client backend'
     and (a.backend_xid is not null or a.backend_xmin is not null)
  union all
  select null, 'prepared transaction ' || t.gid, t.prepared from pg_prepared_xacts t
) x where x.began is not null order by x.began limit 1

-- name: groups
-- Consumer groups of $1 (null: any) that have a task, a worker or a pause. Skips from group to group in the primary key.
with recursive g as (
  select min(t.consumer_group) as name from towpath.task t
  union all
  select (select min(t.consumer_group) from towpath.task t where t.consumer_group > g.name) from g
   where g.name is not null
)
select n.name from (select g.name from g where g.name is not null
                    union select w.consumer_group from towpath.worker w
                    union select p.name from towpath.pause p where p.kind = 'start' and p.resumed_at is null) n
 where $1::text[] is null or n.name = any($1) order by n.name

-- name: workers
-- Members of groups $1 with what each runs. Index: task_running.
select w.consumer_group, w.id, w.host, w.version, w.started_at, w.lease_until, w.lease_until > towpath.clock() as is_alive,
       (select count(*) from towpath.task t where t.worker = w.id and t.state = 'RUNNING') as running
  from towpath.worker w where w.consumer_group = any($1::text[]) order by w.consumer_group, w.started_at, w.id

-- name: find_in_outbox
-- Rows of the ring under message id $1 or outbox id $2, the oldest first. Reads the whole ring: no index has either.
select m.status, m.id, m.shard, m.message_id, m.kind, m.destination, m.type, m.key, m.content_type,
       m.headers::text as headers, m.payload, m.created_at
  from towpath.outbox_message m where m.message_id = $1 or m.id = $2 order by m.id

-- name: find_parked
-- The same of what waits behind gates, with its gate. By message id: index parked_message_id.
select p.id, g.shard, p.message_id, p.kind, g.destination, p.type, p.key, p.content_type, p.headers::text as headers,
       p.payload, p.created_at, g.policy, g.message_id as waits_for_message, g.released_at is not null as is_released
  from towpath.parked_message p join towpath.publish_gate g on g.id = p.gate
 where p.message_id = $1 or p.id = $2 order by p.id

-- name: find_delayed
-- Events for later under message id $1 that are not in the outbox yet. Reads the whole table.
select s.message_id, s.destination, s.type, s.key, s.content_type, s.headers::text as headers, s.payload, s.created_at,
       s.due_at
  from towpath.scheduled s
  cross join (select p.due_upto, p.id_upto, p.snapshot from towpath.scheduled_progress p order by p.seq desc limit 1) d
 where s.message_id = $1
   and not ((s.due_at, s.id) <= (d.due_upto, d.id_upto) and pg_visible_in_snapshot(s.xid, d.snapshot))
