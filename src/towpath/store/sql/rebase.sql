-- A new starting point for a database whose transaction ids are not those its outbox and journal were written under.
-- Run as the owner of the schema, in one REPEATABLE READ transaction: every statement has the same snapshot, and $1,
-- the transaction's own id, is not visible in it. Rows that are to be sent get that id, so they come after the
-- snapshot, which the new journal row says; rows that count as sent get id 3, which every snapshot sees.

-- name: lock_leases
-- Shards with a live lease. Locks every lease, so that no relay takes a shard before the end.
select l.shard from (select l.* from towpath.shard_lease l order by l.shard for update) l
where l.relay is not null and l.lease_until > towpath.clock()

-- name: place
-- This transaction's id and snapshot.
select pg_current_xact_id()::text as xid, pg_current_snapshot()::text as snapshot

-- name: sequences
-- Statements that move each sequence past the rows there are: logical replication copies rows without them.
select format('select setval(%L, n.n) from (select max(%I) as n from %I.%I) n where n.n > (select last_value from %s)',
              s.name, a.attname, t.nspname, c.relname, s.name) as statement
from pg_class c join pg_namespace t on t.oid = c.relnamespace join pg_attribute a on a.attrelid = c.oid,
     lateral (select pg_get_serial_sequence(format('%I.%I', t.nspname, c.relname), a.attname) as name) s
where t.nspname = (select n.nspname from pg_class r join pg_namespace n on n.oid = r.relnamespace
                   where r.oid = 'towpath.journal'::regclass)
  and a.attidentity <> '' and c.relkind in ('r', 'p') and not c.relispartition
order by 1

-- name: progress
-- Where each shard stands. Its journal row is ours if it was written under this cluster's ids and is not ahead of
-- them; else `copied_at` is the id under which it came here, and what was written here since has ids from there on.
-- `$1` is the transaction's own id.
select l.shard, p.snapshot_from, p.snapshot_to, p.last_id, $1::text::bigint - age(j.xmin) as copied_at,
       j.xid::text::numeric % 4294967296 = j.xmin::text::numeric
         and pg_snapshot_xmax(j.snapshot_to) <= pg_snapshot_xmax(pg_current_snapshot()) as is_ours
from towpath.shard_lease l
     left join (towpath.shard_progress p join towpath.journal j on j.seq = p.seq) on p.shard = l.shard

-- name: is_unsent
-- Whether a row `o` of a shard with progress `p` is to be sent, starting from $2, or from the time $3. A row of this
-- cluster that no row of its own tells about is; in a savepoint its xmin is greater than its xid. One that came with
-- the copy counts as such if its old id lies between those of the copying: then it is sent once more.
case $2::text
  when 'now' then false
  when 'oldest' then true
  when 'time' then o.created_at >= $3::timestamptz
  else p.snapshot_to is null
       or (not p.is_ours and o.xid::text::bigint between p.copied_at and $1::text::bigint - age(o.xmin))
       or not (pg_visible_in_snapshot(o.xid, p.snapshot_from)
               or (pg_visible_in_snapshot(o.xid, p.snapshot_to) and (p.last_id is null or o.id <= p.last_id)))
end

-- name: count_outbox
-- What would become of the rows that are retained. Reads all of them; no locks.
with p as materialized (:progress)
select count(*) filter (where :is_unsent) as unsent, count(*) filter (where not (:is_unsent)) as sent,
       min(o.created_at) filter (where :is_unsent) as oldest_unsent_at, max(o.created_at) as newest_at,
       count(*) filter (where o.xid::text::bigint between p.copied_at and $1::text::bigint - age(o.xmin)
                          and not p.is_ours and not (:is_unsent)) as dropped
from p join towpath.outbox o on o.shard = p.shard

-- name: rebase_outbox
with p as materialized (:progress)
update towpath.outbox o set xid = case when :is_unsent then $1::text::xid8 else '3'::xid8 end
from p where p.shard = o.shard

-- name: rebase_scheduled
-- Events for later: what was moved goes, the rest waits for its time, whatever the point.
with done as materialized (
  select p.seq, p.due_upto, p.id_upto, p.snapshot, $1::text::bigint - age(p.xmin) as copied_at,
         p.xid::text::numeric % 4294967296 = p.xmin::text::numeric
           and pg_snapshot_xmax(p.snapshot) <= pg_snapshot_xmax(pg_current_snapshot()) as is_ours
  from towpath.scheduled_progress p order by p.seq desc limit 1
), judged as materialized (
  select s.ctid as place, (s.due_at, s.id) <= (d.due_upto, d.id_upto) and pg_visible_in_snapshot(s.xid, d.snapshot)
         and (d.is_ours or not s.xid::text::bigint between d.copied_at and $1::text::bigint - age(s.xmin)) as is_moved
  from done d, towpath.scheduled s
), gone as (
  delete from towpath.scheduled s using judged j where s.ctid = j.place and j.is_moved
), kept as (
  update towpath.scheduled s set xid = $1::text::xid8 from judged j where s.ctid = j.place and not j.is_moved
  returning 1
), step as (
  insert into towpath.scheduled_progress (seq, due_upto, id_upto, snapshot)
  select d.seq + 1, d.due_upto, d.id_upto, $2::text::pg_snapshot from done d
)
select count(*) from kept

-- name: rebase_tasks
-- Submitted tasks whose message has not come: told by the shard's progress whether it was published, as before.
update towpath.task t set xid = $1::text::xid8 where t.kind = 'task' and t.state = 'ACCEPTED' and t.xid is not null

-- name: forget_journal
delete from towpath.journal

-- name: fence
-- Whoever still believes to own a shard does not. The journal is begun anew, and with it its numbers may be.
update towpath.shard_lease l set relay = null, epoch = l.epoch + 1, lease_until = '-infinity', journaled = 0

-- name: begin_journal
-- One row for every shard, at snapshot $1. Its xid is the transaction's own: never in a savepoint.
insert into towpath.journal (shards, epochs, last_ids, snapshot_from, snapshot_to)
select array_agg(l.shard order by l.shard), array_agg(l.epoch order by l.shard), array_agg(null::bigint),
       $1::text::pg_snapshot, $1::text::pg_snapshot
from towpath.shard_lease l
