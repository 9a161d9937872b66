-- Clearing the outbox ring. Written for slot 0: `outbox_0` stands for the leaf of whichever slot is meant.
-- Parameters of what runs inside a block are session settings (`towpath.retention_seconds`), for a block has none.

-- name: survey
-- Every slot with its sizes, and the ring's arithmetic. Reads no row.
select n::smallint as slot, pg_relation_size(('towpath.outbox_' || n)::regclass) = 0 as is_empty,
       pg_total_relation_size(('towpath.outbox_' || n)::regclass) as bytes,
       towpath.ring_slots() as slot_count, towpath.rotate_seconds() as rotate_seconds
from generate_series(0, towpath.ring_slots() - 1) n order by n

-- name: arm
-- Session settings for `verdict` and `clear`: retention in seconds, longest hold of the lock in milliseconds.
select set_config('towpath.retention_seconds', $1, false), set_config('statement_timeout', $2, false),
       set_config('towpath.slot_outcome', 'none', false)

-- name: outcome
-- What `clear` did. Ends its limit of time.
select current_setting('towpath.slot_outcome') as outcome, set_config('statement_timeout', '0', false)

-- name: verdict
-- Why slot 0 may not be cleared: null, or the first of `isolation`, `current` (or next), `unsent`, `young`; with the
-- shards of which a row is not known to be sent. A shard's rows are sent when its newest journal row, written in
-- this cluster and not ahead of it, completes a window whose end sees them all. Trust it only when it began after
-- the ACCESS EXCLUSIVE lock was granted and in READ COMMITTED: an older snapshot misses what a straggler committed.
-- The newest row: each shard's last by xid, and the end of the heap, where a long transaction's late rows are.
-- Index: outbox_window, primary keys of journal and leases; reads the journal as `load_progress` does.
with recursive present as (
  (select o.shard from towpath.outbox_0 o order by o.shard limit 1)
  union all
  select (select o.shard from towpath.outbox_0 o where o.shard > p.shard order by o.shard limit 1)
  from present p where p.shard is not null
), progress as materialized (
  select distinct on (p.shard) p.shard, case when p.last_id is null then j.snapshot_to else j.snapshot_from end as cut,
         j.xid::text::numeric % 4294967296 = j.xmin::text::numeric as is_ours
  from towpath.journal j, unnest(j.shards, j.epochs, j.last_ids) as p(shard, epoch, last_id)
  where j.seq >= (
    select min(l.journaled) from present n(shard), lateral (
      select s.journaled from towpath.shard_lease s where s.shard = n.shard
      order by s.epoch desc, s.lease_until desc limit 1) l)
  order by p.shard, p.epoch desc, j.seq desc
), unsent as materialized (
  select s.shard from present s left join progress p on p.shard = s.shard
  where s.shard is not null and (
    p.cut is null or not p.is_ours or pg_snapshot_xmax(p.cut) > pg_snapshot_xmax(pg_current_snapshot())
    or exists (select from towpath.outbox_0 o where o.shard = s.shard and o.xid >= pg_snapshot_xmax(p.cut))
    or exists (select from pg_snapshot_xip(p.cut) x, lateral (
                 select from towpath.outbox_0 o where o.shard = s.shard and o.xid = x offset 0) o))
), newest as (
  select greatest(
    (select max(l.created_at)
     from present s, lateral (select o.created_at from towpath.outbox_0 o where o.shard = s.shard
                              order by o.xid desc, o.id desc limit 1) l),
    (select max(o.created_at) from towpath.outbox_0 o
     where o.ctid >= (select format('(%s,0)', greatest(0, pg_relation_size('towpath.outbox_0'::regclass)
                                                          / current_setting('block_size')::bigint - 256))::tid))
  ) as at
)
select case
         when current_setting('transaction_isolation') <> 'read committed' then 'isolation'
         when split_part('outbox_0', '_', 2)::integer - towpath.ring_slot() in (0, 1, 1 - towpath.ring_slots())
           then 'current'
         when exists (select from unsent) then 'unsent'
         when n.at > towpath.clock() - make_interval(secs => current_setting('towpath.retention_seconds')::float8)
           then 'young'
       end as reason,
       array(select u.shard from unsent u order by u.shard) as unsent
from newest n

-- name: clear
-- Truncate slot 0, or leave it and say why; the statement above is put in for the placeholder. One message to the server, so that
-- nothing the relay's process does prolongs the lock. A queued ACCESS EXCLUSIVE lock would hold up every poll behind
-- it: hence NOWAIT, and a few milliseconds for the index and TOAST table. Every statement of the block has its own
-- snapshot, so `verdict` sees whatever was committed before the lock was granted. An error releases the lock.
do $$
declare
  reason text;
begin
  lock table towpath.outbox_0 in access exclusive mode nowait;
  select v.reason into reason from (:verdict) v;
  if reason is null then
    truncate table towpath.outbox_0;
  end if;
  perform set_config('towpath.slot_outcome', coalesce(reason, 'cleared'), false);
exception when lock_not_available then
  perform set_config('towpath.slot_outcome', 'locked', false);
end $$

-- name: holders
-- Who holds a lock on slot 0: backends by pid, prepared transactions without.
select distinct coalesce(l.pid::text, 'prepared') as holder from pg_locks l
where l.relation = 'towpath.outbox_0'::regclass and l.granted and l.pid is distinct from pg_backend_pid()
  and l.database = (select d.oid from pg_database d where d.datname = current_database())
order by 1

-- name: oldest_age
-- Seconds since the oldest row of slot 0 was written: each shard's first by xid. Index: outbox_window.
with recursive present as (
  (select o.shard from towpath.outbox_0 o order by o.shard limit 1)
  union all
  select (select o.shard from towpath.outbox_0 o where o.shard > p.shard order by o.shard limit 1)
  from present p where p.shard is not null
)
select extract(epoch from towpath.clock() - min(f.created_at))::float8
from present s, lateral (select o.created_at from towpath.outbox_0 o where o.shard = s.shard
                         order by o.xid, o.id limit 1) f

-- name: shards
-- Shards that have a journal row of this cluster.
select distinct s.shard from towpath.journal j, unnest(j.shards) s(shard) order by 1

-- name: delete_sent
-- Delete at most $2 rows of shard $1 in slot 0 that are sent and older than $3 seconds, past the row ($4 xid, $5 id):
-- the same condition as `verdict`, row by row. Returns how many and the last. Locks those rows; index: outbox_window.
with progress as materialized (
  select case when p.last_id is null then j.snapshot_to else j.snapshot_from end as cut,
         j.xid::text::numeric % 4294967296 = j.xmin::text::numeric as is_ours
  from towpath.journal j, unnest(j.shards, j.epochs, j.last_ids) as p(shard, epoch, last_id)
  where p.shard = $1::smallint
    and j.seq >= (
      select s.journaled from towpath.shard_lease s where s.shard = $1::smallint
      order by s.epoch desc, s.lease_until desc limit 1)
  order by p.epoch desc, j.seq desc limit 1
), doomed as materialized (
  select o.ctid, o.xid, o.id from progress p, lateral (
    select o.ctid, o.xid, o.id from towpath.outbox_0 o
    where p.is_ours and pg_snapshot_xmax(p.cut) <= pg_snapshot_xmax(pg_current_snapshot())
      and o.shard = $1::smallint and (o.xid, o.id) > ($4::text::xid8, $5::bigint) and o.xid < pg_snapshot_xmax(p.cut)
      and pg_visible_in_snapshot(o.xid, p.cut) and o.created_at < towpath.clock() - make_interval(secs => $3)
    order by o.xid, o.id limit $2
  ) o
), gone as (
  delete from towpath.outbox_0 where ctid = any(array(select d.ctid from doomed d)) returning id
)
select (select count(*) from gone) as deleted, (select count(*) from doomed) as found,
       d.xid::text as xid, d.id
from (select 1) one left join lateral (select x.xid, x.id from doomed x order by x.xid desc, x.id desc limit 1) d on true
