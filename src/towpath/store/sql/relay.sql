-- Statements of the relay. Snapshots and xids travel as text. Read statements run in autocommit on a
-- read-only connection of the relay's own, planner pinned to index scans; index: outbox_window (shard, xid, id).

-- name: poll
-- The window between the cut $1:$3 (xmax and list of xids in progress) and $4, an earlier cut, or null for this
-- statement's own snapshot. Takes no locks. Branch one: rows of transactions that were in progress at the cut and
-- have finished since; only finished xids are probed, one by one: before Postgres 17 a list of them is no way into the
-- index behind a list of shards, and everything retained would be read. Branch two: rows of younger transactions.
-- At most $5 rows, in no particular choice; of those past $6 bytes only the id, shard and xid are returned.
-- The first row, id 0, is the statement's own: in `destination` the window's end, in `kind` this statement's snapshot,
-- in `type` the server's start time, in `key` its timeline (null on a standby), in `content_type` the backend, and in
-- `headers` nothing, or where the reader is idle what the statement `look` of scheduled.sql sees.
with s as materialized (
  select coalesce($4::text::pg_snapshot, pg_current_snapshot()) as s2
), found as (
  select w.*, coalesce(octet_length(w.payload), 0) + pg_column_size(w.headers) as size
  from s, lateral (
    select o.* from unnest($3::text::xid8[]) x, lateral (
      select o.* from towpath.outbox o where o.shard = any($2::smallint[]) and o.xid = x offset 0) o
    where pg_visible_in_snapshot(x, s.s2)
    union all
    select o.* from towpath.outbox o
    where o.shard = any($2::smallint[]) and o.xid >= $1::text::xid8 and o.xid < pg_snapshot_xmax(s.s2)
      and pg_visible_in_snapshot(o.xid, s.s2)
  ) w
  limit $5::int
), sized as (
  select f.*, sum(f.size) over (rows unbounded preceding) as upto_here from found f
)
select 0::bigint as id, null::smallint as shard, null::uuid as message_id, pg_current_snapshot()::text as kind,
       s.s2::text as destination, pg_postmaster_start_time()::text as type,
       case when not pg_is_in_recovery() then left(pg_walfile_name(pg_current_wal_lsn()), 8) end as key,
       pg_backend_pid()::text as content_type, null::text as headers, null::bytea as payload,
       null::timestamptz as created_at, null::bigint as key_hash, true as fits
from s
union all
select o.id, o.shard, o.message_id, o.kind, o.destination, o.type, o.key, o.content_type,
       case when o.fits then o.headers::text end, case when o.fits then o.payload end, o.created_at,
       towpath.key_hash(o.key, o.message_id), o.fits
from (select z.*, z.upto_here <= $6::bigint or z.upto_here = z.size as fits from sized z) o
order by 1

-- name: list_keys
-- Keys of shards $1 in a window too large to read at once: per shard the (xid, id) pairs after id $5, at most $6, in
-- id order, packed 16 bytes each into one bytea. $2 xmax of the cut, $3 its transactions, $4 the window's end. No locks.
select s.shard, (
  select coalesce(string_agg(xid8send(k.xid) || int8send(k.id), ''::bytea), '')
  from (
    select w.xid, w.id from (
      select o.xid, o.id from unnest($3::text::xid8[]) x, lateral (
        select o.xid, o.id from towpath.outbox o
        where o.shard = s.shard and o.xid = x and o.id > s.after_id offset 0) o
      where pg_visible_in_snapshot(x, $4::text::pg_snapshot)
      union all
      select o.xid, o.id from towpath.outbox o
      where o.shard = s.shard and o.id > s.after_id
        and o.xid >= $2::text::xid8 and o.xid < pg_snapshot_xmax($4::text::pg_snapshot)
        and pg_visible_in_snapshot(o.xid, $4::text::pg_snapshot)
    ) w
    order by w.id limit $6::int
  ) k
) as keys
from unnest($1::smallint[], $5::bigint[]) s(shard, after_id)

-- name: fetch_keys
-- Rows of listed keys: shard $1, xid $2, from id $3 to id $4, element by element; in id order, up to $5 bytes and
-- always the first. Everything listed was seen to be committed, so ranges need no second look. No locks.
select o.id, o.shard, o.message_id, o.kind, o.destination, o.type, o.key, o.content_type, o.headers::text as headers,
       o.payload, o.created_at, towpath.key_hash(o.key, o.message_id) as key_hash, true as fits
from (
  select f.*, sum(f.size) over (order by f.id rows unbounded preceding) as upto_here
  from (
    select o.*, coalesce(octet_length(o.payload), 0) + pg_column_size(o.headers) as size
    from unnest($1::smallint[], $2::text::xid8[], $3::bigint[], $4::bigint[]) k(shard, xid, first_id, last_id)
    join towpath.outbox o on o.shard = k.shard and o.xid = k.xid and o.id between k.first_id and k.last_id
  ) f
) o
where o.upto_here <= $5::bigint or o.upto_here = o.size
order by o.id

-- name: server
-- Which server this is and where it stands: start time, timeline (null on a standby), backend, snapshot.
select pg_postmaster_start_time()::text as started_at,
       case when not pg_is_in_recovery() then left(pg_walfile_name(pg_current_wal_lsn()), 8) end as timeline,
       pg_backend_pid()::text as backend, pg_current_snapshot()::text as snapshot

-- name: installation
-- Who we are on the wire. Index: primary key.
select m.value from towpath.meta m where m.name = 'installation_id'

-- name: load_progress
-- The newest journal row of each shard in $1: a higher epoch wins over a later row. `is_ours` is false when the row
-- was written under another cluster's xids (restored or logically copied). Reads the journal from the least number that
-- may be one of these: below, what was trimmed may still lie dead. Index: primary keys of journal and leases.
select distinct on (p.shard) p.shard, p.epoch, p.last_id, j.seq,
       j.snapshot_from::text as snapshot_from, j.snapshot_to::text as snapshot_to,
       j.xid::text::numeric % 4294967296 = j.xmin::text::numeric as is_ours
from towpath.journal j, unnest(j.shards, j.epochs, j.last_ids) as p(shard, epoch, last_id)
where p.shard = any($1::smallint[])
  and j.seq >= (
    select min(l.journaled) from unnest($1::smallint[]) n(shard), lateral (
      select s.journaled from towpath.shard_lease s where s.shard = n.shard
      order by s.epoch desc, s.lease_until desc limit 1) l)
order by p.shard, p.epoch desc, j.seq desc

-- name: append_progress
-- One row for shards $2 that relay $1 holds under epochs $3: the window $5 to $6 is done up to the ids $4, or wholly
-- where that is null. Nothing is written unless every lease is held and the server is the one that was read from
-- ($7 start time, $8 timeline). Locks the lease rows FOR SHARE in the order given, by shard, so that no takeover can pass
-- it. Index: primary key of leases, from the newest.
with held as materialized (
  select h.shard from unnest($2::smallint[], $3::bigint[]) s(shard, epoch), lateral (
    select l.shard from towpath.shard_lease l
    where l.shard = s.shard and l.epoch = s.epoch and l.relay = $1 and l.lease_until > towpath.clock()
    order by l.lease_until desc limit 1 for share) h
), written as (
  insert into towpath.journal (relay, shards, epochs, last_ids, snapshot_from, snapshot_to)
  select $1, $2, $3, $4::bigint[], $5::text::pg_snapshot, $6::text::pg_snapshot
  where (select count(*) from held) = cardinality($2::smallint[]) and pg_postmaster_start_time()::text = $7
    and not pg_is_in_recovery() and left(pg_walfile_name(pg_current_wal_lsn()), 8) = $8
  returning seq
)
select (select w.seq from written w) as seq, array(select h.shard from held h) as held

-- name: trim_journal
-- Delete rows known to be superseded. Waits for no lock: what somebody else deletes is deleted. Index: primary key.
delete from towpath.journal where seq = any(array(
  select j.seq from towpath.journal j where j.seq = any($1::bigint[]) order by j.seq for update skip locked))

-- name: sweep_journal
-- Delete what other relays left behind: rows up to $1 that are the newest of no shard. Reads the whole journal; run at
-- most once per start. Waits for no lock.
delete from towpath.journal where seq = any(array(
  select j.seq from towpath.journal j
  where j.seq <= $1 and j.seq <> all(array(select p.seq from towpath.shard_progress p))
  order by j.seq for update skip locked))

-- name: bury_unpublished
-- A message the broker refuses, into the catalog of no group. Reopened if it died before; found again after a crash
-- between this and the journal it stays as it is. Index: unique (consumer_group, message_id).
insert into towpath.dead_letter as d (consumer_group, message_id, stage, type, kind, source, key, position, payload,
                                      content_type, headers, origin, reason_code, error_class, error_message,
                                      fingerprint, attempts, trace)
values ('', $1, 'publish', $2, $3, $4, $5, $6, $7, $8, $9::text::json, $10::text::json, $11, $12, $13, $14, $15, $16)
on conflict (consumer_group, message_id) do update
   set stage = excluded.stage, state = 'open', death_count = d.death_count + (d.state <> 'open')::integer,
       origin = excluded.origin, reason_code = excluded.reason_code, error_class = excluded.error_class,
       error_message = excluded.error_message, fingerprint = excluded.fingerprint, attempts = excluded.attempts,
       last_dead_at = towpath.clock(), closed_at = null

-- name: mark_copy
-- The copy of a dead letter that cannot be published: noted on its row. Index: primary key.
update towpath.dead_letter set copy_error = $2 where id = $1

-- name: beat_relay
-- Say that relay $1 of broker $4 and version $5 on host $2 lives, forget those long gone, and count the living of that
-- broker, this one included, and those of them that come before it; where publishing is paused; and by name the address
-- and the policy of destinations that are not their own address at the broker, or whose policy is not `park`. $3 is the
-- lease in seconds. Locks its own row and dead ones.
with me as (
  insert into towpath.relay (id, host, broker, version) values ($1, $2, $4, $5)
  on conflict (id) do update set seen_at = towpath.clock()
), gone as (
  delete from towpath.relay where id = any(array(
    select r.id from towpath.relay r where r.id <> $1 and r.seen_at < towpath.clock() - 20 * make_interval(secs => $3)
    for update skip locked))
)
select 1 + count(*) as living, count(*) filter (where r.id < $1) as before,
       exists (select from towpath.broker b where b.number = $4) as is_known,
       array(select p.name from towpath.pause p where p.kind = 'publish' and p.resumed_at is null) as paused,
       (select coalesce(json_object_agg(d.name, json_build_array(d.address, d.on_poison)), '{}')::text
          from towpath.destination d where d.address <> d.name or d.on_poison <> 'park') as destinations
from towpath.relay r
where r.id <> $1 and r.broker = $4 and r.seen_at > towpath.clock() - make_interval(secs => $3)

-- name: renew_leases
-- Prolong what relay $1 holds by $2 seconds; a lapsed lease is not revived. Note that shards $3 have the journal rows $4,
-- where they are there: memory may be ahead of a server that was replaced. Locks in shard order. Index: primary key, from
-- the newest entry of each shard: those behind it are of dead rows, which nothing can remove while vacuum is held back.
with newest as materialized (
  select h.place, h.relay
  from generate_series(0, (select max(b.number) + 1 from towpath.broker b) * towpath.shards_per_broker() - 1) n(shard), lateral (
    select l.ctid as place, l.relay from towpath.shard_lease l where l.shard = n.shard
    order by l.epoch desc, l.lease_until desc limit 1) h
), held as materialized (
  select l.ctid as place from towpath.shard_lease l
  where l.ctid = any(array(select n.place from newest n where n.relay = $1)) and l.relay = $1
    and l.lease_until > towpath.clock()
  order by l.shard for update
)
update towpath.shard_lease l set lease_until = towpath.clock() + make_interval(secs => $2),
       journaled = greatest(l.journaled, (
         select j.seq from towpath.journal j
         where j.seq = ($4::bigint[])[array_position($3::smallint[], l.shard)] and l.shard = any(j.shards)))
where l.ctid = any(array(select h.place from held h)) and l.relay = $1
returning l.shard, l.epoch

-- name: take_leases
-- Up to $4 shards of $5 to $6 that nobody holds: released ones at once, lapsed ones $3 seconds after their end. Waits
-- for no lock.
update towpath.shard_lease set relay = $1, epoch = epoch + 1, lease_until = towpath.clock() + make_interval(secs => $2)
where shard = any(array(
  select l.shard from towpath.shard_lease l
  where l.shard between $5 and $6
    and (l.relay is null or l.lease_until + make_interval(secs => $3) < towpath.clock())
  order by l.shard limit $4 for update skip locked))
returning shard, epoch

-- name: release_leases
-- Give back shards $2 held under epochs $3. Locks in shard order.
update towpath.shard_lease set relay = null
where shard = any(array(
  select l.shard from towpath.shard_lease l
  where l.shard = any($2::smallint[]) and l.relay = $1
    and l.epoch = ($3::bigint[])[array_position($2::smallint[], l.shard)]
  order by l.shard for update))
returning shard

-- name: leave_relay
-- Forget relay $1, and give back all that it holds, also what it took in a beat that was cut short. Locks in shard order.
with released as (
  update towpath.shard_lease set relay = null
  where shard = any(array(select l.shard from towpath.shard_lease l where l.relay = $1 order by l.shard for update))
    and relay = $1
)
delete from towpath.relay where id = $1
