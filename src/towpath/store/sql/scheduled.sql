-- Events for later. Read committed and autocommit: each statement's snapshot is its own, taken before it
-- has an xid. Run on a connection whose planner is pinned to index scans.
--
-- Moved is what is visible in the newest progress row's snapshot S and not after its place W, which is a
-- due time and an id. A step goes to the statement's own snapshot S2 and a place W2 that is not before W:
--   visible in S,              after W and not after W2
--   not visible in S but in S2,            not after W2
-- The second is entered by transaction, with the due time as an expression, else the planner would walk
-- through everything ever moved.
-- Together with what was moved that is exactly what is visible in S2 and not after W2.

-- name: look
-- When there is something to move: seconds until the next row after W is due; whether a row came too late
-- for W; whether S is behind any row, so that steps without rows keep the next look short. No locks.
-- Indexes: primary keys, scheduled_window.
with done as materialized (
  select p.due_upto, p.id_upto, p.snapshot,
         p.xid::text::numeric % 4294967296 = p.xmin::text::numeric
           and pg_snapshot_xmax(p.snapshot) <= pg_snapshot_xmax(pg_current_snapshot()) as is_ours
  from towpath.scheduled_progress p order by p.seq desc limit 1
)
select d.is_ours,
       (select extract(epoch from s.due_at - towpath.clock())::float8 from towpath.scheduled s
         where (s.due_at, s.id) > (d.due_upto, d.id_upto) order by s.due_at, s.id limit 1) as next_seconds,
       exists (select 1 from towpath.scheduled s
                where s.xid >= pg_snapshot_xmax(d.snapshot) and s.due_at + interval '0' <= d.due_upto)
         or exists (select 1 from towpath.scheduled s
                     where s.xid = any(array(select x from pg_snapshot_xip(d.snapshot) x))
                       and s.due_at + interval '0' <= d.due_upto)
         as is_late,
       exists (select 1 from towpath.scheduled s where s.xid >= pg_snapshot_xmax(d.snapshot))
         or exists (select 1 from towpath.scheduled s where s.xid = any(array(select x from pg_snapshot_xip(d.snapshot) x)))
         as is_behind
from done d

-- name: move
-- One step: up to $1 rows after W, and whatever came too late for W. The progress row comes first and its
-- number is taken: a mover that read the same row as another waits for it and then moves nothing; no row
-- is returned. The shard is computed now. Indexes: primary keys, scheduled_window.
with done as materialized (
  select p.seq, p.due_upto, p.id_upto, p.snapshot from towpath.scheduled_progress p order by p.seq desc limit 1
), now as materialized (
  select towpath.clock() as at, pg_current_snapshot() as snapshot from towpath.raise_synchronous_commit()
), nth as materialized (
  select l.due_at, l.id from done d, now n, lateral (
    select s.due_at, s.id from towpath.scheduled s
    where (s.due_at, s.id) > (d.due_upto, d.id_upto) and s.due_at <= n.at
    order by s.due_at, s.id offset $1::bigint - 1 limit 1) l
), step as (
  insert into towpath.scheduled_progress (seq, due_upto, id_upto, snapshot)
  select d.seq + 1,
         coalesce((select due_at from nth), greatest(n.at, d.due_upto)),
         coalesce((select id from nth), case when n.at > d.due_upto then 9223372036854775807 else d.id_upto end),
         n.snapshot
  from done d, now n
  on conflict (seq) do nothing
  returning seq, due_upto, id_upto, snapshot
), due as (
  select s.* from done d, step w, towpath.scheduled s
  where (s.due_at, s.id) > (d.due_upto, d.id_upto) and (s.due_at, s.id) <= (w.due_upto, w.id_upto)
    and pg_visible_in_snapshot(s.xid, d.snapshot)
  union all
  select s.* from done d, step w, towpath.scheduled s
  where s.xid >= pg_snapshot_xmax(d.snapshot) and pg_visible_in_snapshot(s.xid, w.snapshot)
    and (s.due_at + interval '0', s.id) <= (w.due_upto, w.id_upto)
  union all
  select s.* from done d, step w, towpath.scheduled s
  where s.xid = any(array(select x from pg_snapshot_xip(d.snapshot) x where pg_visible_in_snapshot(x, w.snapshot)))
    and (s.due_at + interval '0', s.id) <= (w.due_upto, w.id_upto)
), moved as (
  insert into towpath.outbox (shard, message_id, kind, destination, type, key, content_type, headers, payload)
  select towpath.shard(m.destination, m.key, m.message_id), m.message_id, 'event', m.destination, m.type, m.key,
         m.content_type, m.headers, m.payload
  from due m order by m.due_at, m.id
  returning 1
)
select w.seq, (select count(*) from moved) as count from step w

-- name: forget_moved
-- Delete up to $3 moved rows after the place $1, $2, in their order. Returns how many and the last place.
-- Whoever read older progress meanwhile moves nothing, so they may go at once. Index: primary key.
with done as materialized (
  select p.due_upto, p.id_upto, p.snapshot from towpath.scheduled_progress p order by p.seq desc limit 1
), gone as (
  delete from towpath.scheduled g
  where g.ctid = any(array(
    select l.ctid from done d, lateral (
      select s.ctid from towpath.scheduled s
      where (s.due_at, s.id) > ($1::text::timestamptz, $2::bigint) and (s.due_at, s.id) <= (d.due_upto, d.id_upto)
        and pg_visible_in_snapshot(s.xid, d.snapshot)
      order by s.due_at, s.id limit $3::int) l))
  returning g.due_at, g.id
)
select count(*) over () as count, g.due_at::text as due_at, g.id from gone g order by g.due_at desc, g.id desc limit 1

-- name: trim_progress
-- Delete superseded progress rows after the number $1, at most $2. They stay for an hour, far longer than a
-- statement may run: else a mover that read an old row could insert the number after it a second time.
-- Returns the last number. Index: primary key.
with gone as (
  delete from towpath.scheduled_progress g
  where g.seq = any(array(
    select p.seq from towpath.scheduled_progress p
    where p.seq > $1 and p.seq < (select max(m.seq) from towpath.scheduled_progress m)
      and p.created_at < towpath.clock() - interval '1 hour'
    order by p.seq limit $2::int))
  returning g.seq
)
select max(seq) from gone
