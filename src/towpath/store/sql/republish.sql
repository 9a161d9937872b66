-- Sending again what the outbox still holds. Run by an operator, on a connection of its own.

-- name: lock
-- One at a time in an installation; held by the session.
select pg_try_advisory_lock(hashtext('towpath.republish'))

-- name: clock
select towpath.clock()

-- name: raise_synchronous_commit
select towpath.raise_synchronous_commit()

-- name: newest
-- The newest run with the same request $1. Walks the audit table backwards.
select a.id, a.filter::text as filter, a.counts::text as counts from towpath.audit a
 where a.action = 'outbox.republish' and a.filter ->> 'asked' = $1
 order by a.id desc limit 1

-- name: candidates
-- What is meant: created from $1 until $2, of destinations $3, types $4, keys $5, message ids $6 (each null: any),
-- with an id above $7 and at most $8. Only what was published: neither pending, nor parked, nor in the catalog for
-- having been refused. Not the copies of dead letters, and not what was sent again before: else every run would
-- double the next. (As `send_again` writes it; to look into JSON fails where a producer wrote \u0000.) Reads the whole
-- ring once; takes no locks beyond reading.
select o.shard, o.xid::text as xid, o.id, o.message_id, o.destination, o.type, o.created_at
  from towpath.outbox o join towpath.shard_progress p on p.shard = o.shard
 where o.created_at >= $1 and o.created_at < $2
   and ($3::text[] is null or o.destination = any($3)) and ($4::text[] is null or o.type = any($4))
   and ($5::text[] is null or o.key = any($5)) and ($6::uuid[] is null or o.message_id = any($6))
   and o.id > $7 and o.kind <> 'copy'
   and (pg_visible_in_snapshot(o.xid, p.snapshot_from)
        or (pg_visible_in_snapshot(o.xid, p.snapshot_to) and (p.last_id is null or o.id <= p.last_id)))
   and json_typeof(o.headers) = 'array' and not starts_with(o.headers::text, '[["towpath-republished"')
   and not exists (select from towpath.parked_message m where m.message_id = o.message_id and m.id = o.id)
   and not exists (select from towpath.dead_letter d
                   where d.consumer_group = '' and d.message_id = o.message_id and d.state in ('open', 'discarded'))
 order by o.id limit $8

-- name: send_again
-- Rows $1 shard, $2 xid, $3 id, element by element, at the end of the outbox under their own message ids, in order;
-- marked with audit id $4, and with the time they were written at first. Index: outbox_window.
insert into towpath.outbox (shard, message_id, kind, destination, type, key, content_type, headers, payload)
select towpath.shard(o.destination, o.key, o.message_id), o.message_id, o.kind, o.destination, o.type, o.key,
       o.content_type,
       (select json_agg(h.pair order by h.n) from (
          select -1 as n, json_build_array('towpath-republished', $4::bigint::text) as pair
          union all
          select 0, json_build_array('ce_time', to_char(o.created_at at time zone 'utc', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'))
          union all
          select e.n, e.pair from json_array_elements(o.headers) with ordinality e(pair, n)) h),
       o.payload
  from unnest($1::smallint[], $2::text[]::xid8[], $3::bigint[]) k(shard, xid, id)
  join towpath.outbox o on o.shard = k.shard and o.xid = k.xid and o.id = k.id
 order by o.id
