-- What a producer runs inside its own transaction. Every value is passed as text or bytea and cast
-- here, so that the statements mean the same through every driver and whatever codecs are set.

-- name: insert_outbox
-- The messages of one transaction, in the order of the arrays, which becomes the order of ids.
-- Locks: none that another producer waits for. Reads destination by primary key.
insert into towpath.outbox (shard, message_id, kind, destination, type, key, content_type, headers, payload)
select towpath.shard(m.destination, m.key, m.message_id),
       m.message_id, m.kind, m.destination, m.type, m.key, m.content_type, m.headers, m.payload
from towpath.raise_synchronous_commit(),
     unnest(cast(cast($1 as text[]) as uuid[]), cast($2 as text[]), cast($3 as text[]), cast($4 as text[]),
            cast($5 as text[]), cast($6 as text[]), cast(cast($7 as text[]) as json[]), cast($8 as bytea[]))
       with ordinality as m(message_id, kind, destination, type, key, content_type, headers, payload, n)
order by m.n;

-- name: insert_outbox_row
-- The same for the one message that most transactions have: two thirds of the cost.
insert into towpath.outbox (shard, message_id, kind, destination, type, key, content_type, headers, payload)
select towpath.shard(cast($3 as text), cast($5 as text), cast(cast($1 as text) as uuid)),
       cast(cast($1 as text) as uuid), cast($2 as text), cast($3 as text), cast($4 as text), cast($5 as text),
       cast($6 as text), cast(cast($7 as text) as json), cast($8 as bytea)
from towpath.raise_synchronous_commit();

-- name: insert_scheduled
-- Messages for later, in the order of the arrays. An instant, or seconds from now by the database clock.
-- Locks: none. The shard is found when they are due, by what `destination` says then.
insert into towpath.scheduled (message_id, destination, type, key, content_type, headers, payload, due_at)
select m.message_id, m.destination, m.type, m.key, m.content_type, m.headers, m.payload,
       coalesce(m.due_at, towpath.clock() + make_interval(secs => m.delay))
from unnest(cast(cast($1 as text[]) as uuid[]), cast($2 as text[]), cast($3 as text[]), cast($4 as text[]),
            cast($5 as text[]), cast(cast($6 as text[]) as json[]), cast($7 as bytea[]),
            cast(cast($8 as text[]) as timestamptz[]), cast(cast($9 as text[]) as double precision[]))
       with ordinality as m(message_id, destination, type, key, content_type, headers, payload, due_at, delay, n)
order by m.n;

-- name: accept_task
-- The row of a submitted task, or the one that was submitted before under the same request hash.
-- Waits for a concurrent submit of the same hash; unique index task_request.
select cast(a.task_id as text) as task_id, a.created, a.same_body
from towpath.accept_task(
  cast($1 as text), cast(cast($2 as text) as uuid), cast($3 as text), cast($4 as text), cast($5 as text),
  cast($6 as text), cast($7 as bytea),
  coalesce(cast($8 as timestamptz), towpath.clock() + make_interval(secs => cast($9 as double precision))),
  cast($10 as bytea), cast($11 as text), cast(cast($12 as text) as json), cast($13 as text),
  coalesce(cast($14 as timestamptz), towpath.clock() + make_interval(secs => cast($15 as double precision)))) a;

-- name: has_changed
-- Whether this transaction has written or locked anything.
select pg_current_xact_id_if_assigned() is not null as has_changed;
