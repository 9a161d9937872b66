-- Where a message came from, and what came of it: for a person who looks at one. Takes no locks.

-- name: own_headers
-- Headers of message $1 with key $2 as it was written; $3 is its position where that is known. Index: outbox_window, of
-- the shards it may be in.
select o.headers::text from towpath.outbox o
 where o.shard = any(array(select (b.number * towpath.shards_per_broker()
                                   + towpath.key_hash($2, $1) % towpath.shards_per_broker())::smallint
                             from towpath.broker b))
   and ($3::bigint is null or o.id = $3) and o.message_id = $1 limit 1

-- name: came_of
-- What was written from $2 until a minute after $3 and says $1 in its headers: events, events for later, tasks; at most $4. Reads the
-- ring, and the tasks of that time. Index: task_created.
select c.* from (
  (select 'emitted' as relation, o.message_id as id, o.type, o.destination as "to", o.created_at as at
     from towpath.outbox o
    where o.created_at between $2 and $3::timestamptz + interval '1 minute' and o.kind = 'event' and strpos(o.headers::text, $1) > 0 limit $4)
  union all
  (select 'scheduled', s.message_id, s.type, s.destination, s.created_at from towpath.scheduled s
    where s.created_at between $2 and $3::timestamptz + interval '1 minute' and strpos(s.headers::text, $1) > 0 limit $4)
  union all
  (select 'submitted', t.id, t.type, t.consumer_group, t.created_at from towpath.task t
    where t.created_at between $2 and $3::timestamptz + interval '1 minute' and t.kind = 'task' and strpos(t.headers::text, $1) > 0 limit $4)
) c order by c.at, c.id limit $4
