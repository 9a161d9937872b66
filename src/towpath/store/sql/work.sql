-- Statements of the consumer engine. Lock order in every transaction: key gates, then task rows,
-- both sorted. All run on connections whose planner is pinned to index scans.
--
-- Where a row is found by its id, its state is compared as `state || ''`: else the planner would walk a
-- whole partial index for a table that nobody has analysed, and keep to it while the table fills. For
-- the same reason values of a batch are found by `array_position` and not by a join with `unnest`, whose
-- outer side became the table. A column is compared with `(select towpath.clock())`: a volatile function is no
-- bound of an index scan, which then steps over every row that is not due yet.

-- name: lock_gates
-- Which lanes of a claim are gated, and whether $4 followers are parked there. Locks the gates found; indexes:
-- primary key, task_parked.
select g.source, g.lane,
       (select count(*) from (select 1 from towpath.task t where t.consumer_group = g.consumer_group
           and t.source = g.source and t.lane = g.lane and t.state = 'PARKED' limit $4) f) >= $4 as is_full
  from towpath.key_gate g
 where g.consumer_group = $1 and g.source = any($2::text[]) and g.lane = any($3::text[])
 order by g.source, g.lane for update of g

-- name: claim_events
-- Create RUNNING rows, or resume a row handed back; with $11 also suspects: one abandoned with no effect started, or
-- handed back in a start that was not the first. Without $12 nothing at all where one of the lanes has a gate: then
-- `lock_gates` comes first. A follower comes to a member when its head was settled, or behind it: a gate that the
-- head leaves is seen. Locks the rows in id order; index: primary keys. Losers are looked up by `states`.
insert into towpath.task as t (consumer_group, id, type, kind, source, key, lane, position, state, deliveries,
                               held_by, worker, token, started_at)
select $1, x.id, x.type, x.kind, x.source, x.key, x.lane, x.position, 'RUNNING', 1, 'broker', $9, $10, towpath.clock()
  from unnest($2::uuid[], $3::text[], $4::text[], $5::text[], $6::text[], $7::text[], $8::bigint[])
       x(id, type, kind, source, key, lane, position)
 where $12 or not exists (select from towpath.key_gate g
                           where g.consumer_group = $1 and g.source = any($5::text[]) and g.lane = any($7::text[]))
 order by x.id
on conflict (consumer_group, id) do update
   set state = 'RUNNING', deliveries = t.deliveries + 1, worker = excluded.worker, token = excluded.token,
       lane = excluded.lane, version = t.version + 1, started_at = coalesce(t.started_at, excluded.started_at),
       updated_at = towpath.clock()
 where t.held_by = 'broker' and (t.state = 'ACCEPTED' and (t.deliveries = 0 or $11)
       or $11 and t.state = 'RUNNING' and t.effect_state is null
       and not exists (select 1 from towpath.worker w where w.id = t.worker and w.lease_until > towpath.clock()))
returning t.id, t.attempt, t.version, t.deliveries, t.run_no, extract(epoch from t.deadline_at - towpath.clock())::float8 as deadline_seconds, t.owner, t.cancel_requested,
          extract(epoch from towpath.clock() - t.started_at)::float8 as age_seconds

-- name: claim_tasks
-- Start submitted tasks, whose body is in the row; with $6 also suspects. Index: primary key, in id order.
update towpath.task t
   set state = 'RUNNING', deliveries = t.deliveries + 1, worker = $3, token = $4, lane = case when $5 then t.key end,
       version = t.version + 1, started_at = coalesce(t.started_at, towpath.clock()), updated_at = towpath.clock()
 where t.consumer_group = $1 and t.id = any($2::uuid[]) and t.held_by = 'broker'
   and (t.state || '' = 'ACCEPTED' and (t.deliveries = 0 or $6)
        or $6 and t.state || '' = 'RUNNING' and t.effect_state is null
        and not exists (select 1 from towpath.worker w where w.id = t.worker and w.lease_until > towpath.clock()))
returning t.id, t.attempt, t.version, t.deliveries, t.run_no, extract(epoch from t.deadline_at - towpath.clock())::float8 as deadline_seconds, t.owner, t.cancel_requested,
          extract(epoch from towpath.clock() - t.started_at)::float8 as age_seconds,
          t.payload, t.content_type, t.headers

-- name: park_events
-- Followers of a gated lane, stored with their body; also one that a dead worker had started before
-- the gate was there, since its RUNNING row would keep the head from starting. Index: primary key.
insert into towpath.task as t (consumer_group, id, type, kind, source, key, lane, position, state, held_by,
                               payload, content_type, headers, trace)
select $1, x.id, x.type, x.kind, x.source, x.key, x.lane, x.position, 'PARKED', 'database',
       x.payload, x.content_type, x.headers::json, x.trace
  from unnest($2::uuid[], $3::text[], $4::text[], $5::text[], $6::text[], $7::text[], $8::bigint[], $9::bytea[],
              $10::text[], $11::text[], $12::text[])
       x(id, type, kind, source, key, lane, position, payload, content_type, headers, trace)
 order by x.id
on conflict (consumer_group, id) do update
   set state = 'PARKED', held_by = 'database', lane = excluded.lane, position = excluded.position,
       payload = excluded.payload, content_type = excluded.content_type,
       headers = excluded.headers, trace = excluded.trace, worker = null, token = null,
       version = t.version + 1, updated_at = towpath.clock()
 where t.held_by = 'broker' and (t.state = 'ACCEPTED' or (t.state = 'RUNNING' and t.effect_state is null
       and not exists (select 1 from towpath.worker w where w.id = t.worker and w.lease_until > towpath.clock())))
returning t.id

-- name: park_tasks
-- The same for submitted tasks: the body is there already. Index: primary key.
update towpath.task t
   set state = 'PARKED', held_by = 'database', lane = ($3::text[])[array_position($2, t.id)],
       position = ($4::bigint[])[array_position($2, t.id)], worker = null, token = null,
       version = t.version + 1, updated_at = towpath.clock()
 where t.consumer_group = $1 and t.id = any($2::uuid[]) and t.held_by = 'broker'
   and (t.state || '' = 'ACCEPTED' or (t.state || '' = 'RUNNING' and t.effect_state is null
        and not exists (select 1 from towpath.worker w where w.id = t.worker and w.lease_until > towpath.clock())))
returning t.id

-- name: states
-- What a lost claim found, read after it. Index: primary key.
select t.id, t.state, t.held_by, t.deliveries,
       exists (select 1 from towpath.worker w where w.id = t.worker and w.lease_until > towpath.clock()) as worker_is_alive
  from towpath.task t where t.consumer_group = $1 and t.id = any($2::uuid[])

-- name: due
-- Due rows of the types $3 whose lane is free, up to $2, oldest first. A type's scan begins at its floor in $4 (null: at
-- its first row) or $5 seconds ago, whichever is earlier: what was started before that left entries in the index, which
-- stay there while vacuum is held back. It reads no row of other types: while a dependency is away there may be a
-- million. The rows without id say where the next look at a type may begin: at its first row that is due, if it may
-- start or has not waited for its lane for long, but not later than $6 seconds ago. Locks nothing; index:
-- task_due_of_type, then task_running_lane.
with now as materialized (
  select towpath.clock() as at
), looked as materialized (
  select k.type, n.at, f.due_at as first_at
    from now n cross join unnest($3::text[], $4::timestamptz[]) k(type, floor) left join lateral (
      select t.due_at from towpath.task t
       where t.consumer_group = $1 and t.state = 'WAITING' and t.type = k.type
         and t.due_at >= least(coalesce(k.floor, '-infinity'), n.at - make_interval(secs => $5)) and t.due_at <= n.at
         and (t.lane is null or t.due_at > n.at - interval '5 minutes'
              or not exists (select 1 from towpath.task r where r.consumer_group = t.consumer_group
                  and r.source = t.source and r.lane = t.lane and r.state = 'RUNNING'))
       order by t.due_at limit 1) f on true
), found as (
  select d.* from looked l cross join lateral (
    select t.id, t.type, t.source, t.key, t.lane, t.waiting_for, t.deliveries, t.due_at from towpath.task t
     where t.consumer_group = $1 and t.state = 'WAITING' and t.type = l.type
       and t.due_at >= l.first_at and t.due_at <= l.at
       and (t.lane is null or not exists (select 1 from towpath.task r where r.consumer_group = t.consumer_group
            and r.source = t.source and r.lane = t.lane and r.state = 'RUNNING'))
     order by t.due_at limit $2) d
   order by d.due_at limit $2
)
select f.* from found f
union all
select null, l.type, null, null, null, null, null, least(l.first_at, l.at - make_interval(secs => $6)) from looked l
 order by due_at

-- name: first_waiting
-- The first waiting row of each type, found by hopping from type to type; and without a type the time $2 seconds before
-- the look. Steps over every entry of a row that waits no more, while vacuum is held back. Locks nothing; index:
-- task_due_of_type.
with recursive now as materialized (
  select towpath.clock() - make_interval(secs => $2) as at
), kind as (
  (select t.type, t.due_at from towpath.task t where t.consumer_group = $1 and t.state = 'WAITING'
    order by t.type, t.due_at limit 1)
  union all
  select f.type, f.due_at from kind k cross join lateral (
    select t.type, t.due_at from towpath.task t where t.consumer_group = $1 and t.state = 'WAITING' and t.type > k.type
     order by t.type, t.due_at limit 1) f)
select null as type, n.at as due_at from now n
union all
select k.type, k.due_at from kind k

-- name: admit_delayed
-- A delayed task is due and takes its place in its lane: WAITING as its head, PARKED behind another, with
-- a number as if it were submitted now. Its gate is locked; index: primary key.
update towpath.task t
   set state = case when $4 then 'WAITING' else 'PARKED' end, due_at = case when $4 then t.due_at end,
       waiting_for = case when $4 then t.waiting_for end, lane = $3, position = nextval('towpath.outbox_id_seq'),
       version = t.version + 1, updated_at = towpath.clock()
 where t.consumer_group = $1 and t.id = $2 and t.state || '' = 'WAITING' and t.waiting_for = 'delay' and t.lane is null
returning t.version

-- name: start_due
-- Start due rows, unless another member was quicker or the lane runs something. For how long they were due
-- (a pause, an open breaker, no member) does not count towards their age. Index: primary key.
update towpath.task t
   set state = 'RUNNING', deliveries = t.deliveries + 1, worker = $3, token = $4, due_at = null, waiting_for = null,
       version = t.version + 1, started_at = coalesce(t.started_at + (towpath.clock() - t.due_at), towpath.clock()), updated_at = towpath.clock()
 where t.consumer_group = $1
   and t.id = any(array(select w.id from towpath.task w where w.consumer_group = $1 and w.id = any($2::uuid[])
                           and w.state || '' = 'WAITING' and w.due_at <= towpath.clock() order by w.id for update skip locked))
   and t.state || '' = 'WAITING'
   and (t.lane is null or not exists (select 1 from towpath.task r where r.consumer_group = t.consumer_group
        and r.source = t.source and r.lane = t.lane and r.state = 'RUNNING'))
returning t.id, t.type, t.kind, t.source, t.key, t.lane, t.position, t.attempt, t.version, t.deliveries, t.run_no, extract(epoch from t.deadline_at - towpath.clock())::float8 as deadline_seconds,
          t.owner, t.cancel_requested, extract(epoch from towpath.clock() - t.started_at)::float8 as age_seconds,
          t.payload, t.content_type, t.headers, t.trace, t.created_at

-- name: lock_heads
-- The gates whose head is settling now. Locks them in order; index: primary key.
select source, lane, head from towpath.key_gate
 where consumer_group = $1 and source = any($2::text[]) and lane = any($3::text[]) and head = any($4::uuid[])
 order by source, lane for update

-- name: succeed
-- Settle first-class successes without a result. Guarded by tokens, not by time; index: primary key. Without $4 only what
-- the broker holds, which heads no gate.
update towpath.task t
   set state = 'SUCCEEDED', worker = null, token = null, attempt = t.attempt + 1, version = t.version + 1,
       reason_code = null, error_class = null, error_message = null, fingerprint = null,
       updated_at = towpath.clock(), finished_at = towpath.clock()
 where t.consumer_group = $1 and t.id = any($2::uuid[]) and t.token = any($3::uuid[]) and t.state || '' = 'RUNNING'
   and ($4 or t.held_by = 'broker')
returning t.id, t.held_by = 'database' as is_held

-- name: succeed_with_results
-- The same with a result per row, $5 as $4 there. Index: primary key, one probe per row.
update towpath.task t
   set state = 'SUCCEEDED', worker = null, token = null, attempt = t.attempt + 1, version = t.version + 1, result = ($4::bytea[])[array_position($2, t.id)],
       reason_code = null, error_class = null, error_message = null, fingerprint = null,
       updated_at = towpath.clock(), finished_at = towpath.clock()
 where t.consumer_group = $1 and t.id = any($2::uuid[]) and t.token = ($3::uuid[])[array_position($2, t.id)] and t.state || '' = 'RUNNING'
   and ($5 or t.held_by = 'broker')
returning t.id, t.held_by = 'database' as is_held

-- name: settle_one
-- The last statement of a transactional handler: gate first, then the row; null when the token is gone.
-- Returns whether the row was its lane's head, and what its history says. Indexes: the two primary keys.
with gate as materialized (
  select 1 from towpath.key_gate where consumer_group = $1 and source = $5 and lane = $6 and head = $2 for update
)
update towpath.task t
   set state = $4, worker = null, token = null, attempt = t.attempt + 1, version = t.version + 1, result = $7,
       reason_code = $8, error_class = null, error_message = $9, fingerprint = null,
       updated_at = towpath.clock(), finished_at = towpath.clock()
 where t.consumer_group = $1 and t.id = $2 and t.token = $3 and t.state || '' = 'RUNNING' and (select count(*) from gate) >= 0
returning (select count(*) from gate) > 0 as is_head, t.held_by = 'database' as is_held, t.version, t.attempt, t.run_no

-- name: next_of_lanes
-- The least parked follower of each lane of a source; no row where none is parked. Under the gates' locks; index:
-- task_parked.
select l.lane, n.id from unnest($3::text[]) l(lane) cross join lateral (
  select id from (
    (select id, position from towpath.task
      where consumer_group = $1 and source = $2 and lane = l.lane and state = 'PARKED' and position is null order by id limit 1)
    union all
    (select id, position from towpath.task
      where consumer_group = $1 and source = $2 and lane = l.lane and state = 'PARKED' and position is not null
      order by position, id limit 1)
  ) least order by position nulls first limit 1
) n

-- name: open_gates
-- Nothing of these lanes waits any more. Under the gates' locks; index: primary key.
delete from towpath.key_gate where consumer_group = $1 and source = $2 and lane = any($3::text[])

-- name: move_gates
-- Under the gates' locks; index: primary key.
update towpath.key_gate set head = ($4::uuid[])[array_position($3, lane)]
 where consumer_group = $1 and source = $2 and lane = any($3::text[])

-- name: promote
-- The new heads become due now. Under the gates' locks; index: primary key.
update towpath.task
   set state = 'WAITING', due_at = towpath.clock(), waiting_for = 'promoted', version = version + 1, updated_at = towpath.clock()
 where consumer_group = $1 and id = any($2::uuid[]) and state || '' = 'PARKED'

-- name: close_gate
-- Make sure the lane has a gate; the first to fail is its head.
insert into towpath.key_gate (consumer_group, source, lane, head) values ($1, $2, $3, $4)
on conflict (consumer_group, source, lane) do nothing

-- name: gate_head
-- Locks the gate; index: primary key.
select head from towpath.key_gate where consumer_group = $1 and source = $2 and lane = $3 for update

-- name: wait
-- RUNNING to WAITING, or PARKED when another head holds the gate ($4 null). Stores the body, so that
-- the broker's message may go. $17: seconds that do not count towards its age. A task to be cancelled
-- comes at once, one with a deadline not later than that, to end; none is due before now. Index: primary key.
update towpath.task t
   set state = case when $4::float8 is null then 'PARKED' else 'WAITING' end,
       due_at = case when $4::float8 is not null then
         greatest(least(towpath.clock() + make_interval(secs => case when t.cancel_requested then 0 else $4 end), t.deadline_at),
                  towpath.clock()) end,
       waiting_for = case when $4::float8 is null then null else $5 end,
       held_by = 'database', position = coalesce($6, t.position), lane = $7,
       payload = coalesce($8, t.payload), content_type = coalesce($9, t.content_type), headers = coalesce($10::text::json, t.headers), trace = coalesce($11, t.trace),
       attempt = t.attempt + $12, deliveries = 0, started_at = t.started_at + make_interval(secs => $17), worker = null, token = null, version = t.version + 1,
       effect_state = null, reason_code = $13, error_class = $14, error_message = $15, fingerprint = $16,
       updated_at = towpath.clock()
 where t.consumer_group = $1 and t.id = $2 and t.token = $3 and t.state || '' = 'RUNNING'
returning t.state, t.version, t.attempt, t.run_no, t.due_at

-- name: keep
-- Work that runs long: the database holds it from now on, so that its broker message may be acknowledged.
-- The lane's gate is closed in the same transaction. Index: primary key.
update towpath.task t
   set held_by = 'database', lane = $4, position = coalesce($5, t.position), payload = coalesce($6, t.payload),
       content_type = coalesce($7, t.content_type), headers = coalesce($8::text::json, t.headers), trace = coalesce($9, t.trace),
       updated_at = towpath.clock()
 where t.consumer_group = $1 and t.id = $2 and t.token = $3 and t.state || '' = 'RUNNING'
returning t.version

-- name: end
-- RUNNING to DEAD, FAILED, EXPIRED, CANCELLED or UNKNOWN outside a handler's transaction. Index: primary key.
update towpath.task t
   set state = $4, attempt = t.attempt + $5, worker = null, token = null, version = t.version + 1,
       held_by = 'database', lane = $6, position = coalesce($7, t.position),
       reason_code = $8, error_class = $9, error_message = $10, fingerprint = $11,
       updated_at = towpath.clock(), finished_at = case when $4 = 'UNKNOWN' then null else towpath.clock() end
 where t.consumer_group = $1 and t.id = $2 and t.token = $3 and t.state || '' = 'RUNNING'
returning t.version, t.attempt, t.run_no

-- name: dead_on_arrival
-- A message that cannot be decoded gets its minimal row; a repeat changes nothing. Index: primary key.
insert into towpath.task (consumer_group, id, type, kind, source, key, state, held_by, reason_code, error_class,
                          error_message, fingerprint, finished_at)
values ($1, $2, $3, 'event', $4, $5, 'DEAD', 'database', $6, $7, $8, $9, towpath.clock())
on conflict (consumer_group, id) do nothing
returning version, attempt, run_no

-- name: broker_death
-- What the task of a message that the broker dead-lettered is doing. Locks nothing; index: primary key.
select t.state, t.held_by, t.version, t.source, t.lane, t.payload, t.content_type, t.headers,
       exists (select 1 from towpath.worker w where w.id = t.worker and w.lease_until > towpath.clock()) as worker_is_alive
  from towpath.task t where t.consumer_group = $1 and t.id = $2

-- name: insert_broker_death
-- It never had a task. Whoever inserts one meanwhile wins. Index: primary key.
insert into towpath.task (consumer_group, id, type, kind, source, key, lane, position, state, held_by, reason_code,
                          error_class, error_message, fingerprint, finished_at)
values ($1, $2, $3, $4, $5, $6, $7, $8, 'DEAD', 'database', $9, $10, $11, $12, towpath.clock())
on conflict (consumer_group, id) do nothing
returning version, attempt, run_no

-- name: end_broker_death
-- Its task waits for the broker's message, which will not come: DEAD, if nobody moved it since version $3. (One whose
-- at-most-once effect began is held by the database.) The lane's gate is locked; index: primary key.
update towpath.task t
   set state = 'DEAD', held_by = 'database', worker = null, token = null, lane = coalesce(t.lane, $4),
       position = coalesce(t.position, $5), reason_code = $6, error_class = $7, error_message = $8, fingerprint = $9,
       version = t.version + 1, updated_at = towpath.clock(), finished_at = towpath.clock()
 where t.consumer_group = $1 and t.id = $2 and t.version = $3 and t.held_by = 'broker'
   and (t.state || '' = 'ACCEPTED' or (t.state || '' = 'RUNNING'
        and not exists (select 1 from towpath.worker w where w.id = t.worker and w.lease_until > towpath.clock())))
returning t.version, t.attempt, t.run_no

-- name: hand_back
-- Shutdown or revoke: unspent. The broker redelivers what it still holds; the rest is due now.
-- Index: primary key.
update towpath.task t
   set state = case t.held_by when 'broker' then 'ACCEPTED' else 'WAITING' end,
       due_at = case t.held_by when 'broker' then null else towpath.clock() end,
       waiting_for = case t.held_by when 'broker' then null else 'retry' end,
       deliveries = greatest(t.deliveries - 1, 0), worker = null, token = null, version = t.version + 1,
       updated_at = towpath.clock()
 where t.consumer_group = $1 and t.id = any($2::uuid[]) and t.token = any($3::uuid[]) and t.state || '' = 'RUNNING'
   and t.effect_state is null
returning t.id

-- name: abandoned
-- Rows held by the database under the group's lapsed workers but $3; and of each without any its id, and whether it
-- lapsed so long ago that no claim of its own may still arrive. Living workers' entries in the index, of all they ever
-- ran while vacuum is held back, are not stepped over. Indexes: primary key of worker, task_running; the group is hidden
-- from the primary key's.
select w.id as worker, w.lease_until < towpath.clock() - interval '1 minute' as is_long_dead,
       a.id, a.source, a.lane, a.token, a.effect_state
  from towpath.worker w left join lateral (
    select t.id, t.source, t.lane, t.token, t.effect_state from towpath.task t
     where t.worker = w.id and t.consumer_group || '' = $1 and t.state = 'RUNNING' and t.held_by = 'database' limit $2) a on true
 where w.consumer_group = $1 and w.lease_until <= towpath.clock() and w.id <> all($3::uuid[])
 order by w.id limit $2

-- name: abandoned_anywhere
-- The same of any worker that does not live, also one that nothing is known of any more. Index: task_running; the group
-- is hidden from the primary key's.
select t.id, t.source, t.lane, t.token, t.worker, t.effect_state from towpath.task t
 where t.consumer_group || '' = $1 and t.state = 'RUNNING' and t.held_by = 'database'
   and not exists (select 1 from towpath.worker w where w.id = t.worker and w.lease_until > towpath.clock())
 order by t.worker limit $2

-- name: reap
-- One abandoned row and its line of history: its gate is locked, the statement checks again. Index: primary key.
with reaped as (
  update towpath.task t
     set state = case when $3 then 'WAITING' else 'PARKED' end, due_at = case when $3 then towpath.clock() end,
         waiting_for = case when $3 then 'lost' end, worker = null, token = null, version = t.version + 1, updated_at = towpath.clock()
   where t.consumer_group = $1 and t.id = $2 and t.token = $4 and t.state || '' = 'RUNNING' and t.effect_state is null
     and not exists (select 1 from towpath.worker w where w.id = t.worker and w.lease_until > towpath.clock())
  returning t.*
)
insert into towpath.task_event (consumer_group, task_id, event, from_state, to_state, version, attempt, run_no, due_at,
                                reason_code, error_message, worker, trace)
select r.consumer_group, r.id, 'task.reaped', 'RUNNING', r.state, r.version, r.attempt, r.run_no, r.due_at,
       'worker_lost', 'its worker was lost', $5, r.trace
  from reaped r
returning version

-- name: release_lost
-- Messages whose worker has been dead for $2 seconds and which the broker has not brought again: their lanes, in which
-- one at a time runs, wait for them no longer. They start if they come after all. Index: task_running; the group is
-- hidden from the primary key's.
with lost as materialized (
  select t.id, t.worker from towpath.task t
   where t.consumer_group || '' = $1 and t.state = 'RUNNING' and t.held_by = 'broker' and t.effect_state is null
     and t.updated_at < (select towpath.clock()) - make_interval(secs => $2)
     and not exists (select 1 from towpath.worker w
                      where w.id = t.worker and w.lease_until > towpath.clock() - make_interval(secs => $2))
   order by t.worker limit $3 for update skip locked
), released as (
  update towpath.task t
     set state = 'ACCEPTED', worker = null, token = null, version = t.version + 1, updated_at = towpath.clock()
    from lost l where t.consumer_group = $1 and t.id = l.id
  returning t.*, l.worker as lost_worker
)
insert into towpath.task_event (consumer_group, task_id, event, from_state, to_state, version, attempt, run_no,
                                reason_code, error_message, worker, trace)
select r.consumer_group, r.id, 'task.reaped', 'RUNNING', r.state, r.version, r.attempt, r.run_no,
       'worker_lost', 'its worker was lost, and its message has not come again', r.lost_worker, r.trace
  from released r
returning task_id

-- name: lost
-- Submitted tasks whose message was published long ago and never came; one that is parked at the relay has its
-- turn yet to come. Indexes: task_accepted, parked_message_id.
select t.id, t.source, case when $4 then t.key end as lane from towpath.task t
  join towpath.shard_progress p on p.shard = t.shard
 where t.consumer_group = $1 and t.state = 'ACCEPTED' and t.kind = 'task'
   and t.updated_at < (select towpath.clock()) - make_interval(secs => $2)
   and (pg_visible_in_snapshot(t.xid, p.snapshot_from) or (p.last_id is null and pg_visible_in_snapshot(t.xid, p.snapshot_to)))
   and not exists (select from towpath.parked_message m where m.message_id = t.id)
 order by t.updated_at limit $3

-- name: redrive
-- One lost task starts from its row, with a line of history. Its gate is locked; index: primary key.
with redriven as (
  update towpath.task t
     set state = case when $3 then 'WAITING' else 'PARKED' end, due_at = case when $3 then towpath.clock() end,
         waiting_for = case when $3 then 'lost' end, held_by = 'database', lane = $4, version = t.version + 1, updated_at = towpath.clock()
   where t.consumer_group = $1 and t.id = $2 and t.state || '' = 'ACCEPTED'
  returning t.*
)
insert into towpath.task_event (consumer_group, task_id, event, from_state, to_state, version, attempt, run_no, due_at,
                                reason_code, error_message, trace)
select r.consumer_group, r.id, 'task.redriven', 'ACCEPTED', r.state, r.version, r.attempt, r.run_no, r.due_at,
       'message_lost', 'its message was published and never came', r.trace
  from redriven r
returning version

-- name: stale_gates
-- Of the next $4 gates behind ($2, $3): those whose head neither waits, runs nor is in doubt, since somebody deleted
-- it; and the last, from where to go on. Index: primary keys.
select x.source, x.lane, x.head, x.is_stale, x.n = $4 as is_last
  from (select g.source, g.lane, g.head, row_number() over (order by g.source, g.lane) as n,
               not exists (select 1 from towpath.task t where t.consumer_group = $1 and t.id = g.head
                              and t.state in ('WAITING', 'RUNNING', 'UNKNOWN', 'ACCEPTED')) as is_stale
          from (select k.source, k.lane, k.head from towpath.key_gate k
                 where k.consumer_group = $1 and (k.source, k.lane) > ($2, $3)
                 order by k.source, k.lane limit $4) g) x
 where x.is_stale or x.n = $4

-- name: expire_finished
-- Delete finished rows past their retention with their history, never one whose dead letter is open.
-- Returns how many. A row is finished after it was created, so the BRIN index on created_at narrows
-- it, as long as the primary key does not see the group; bitmap scans are on for it. The history by its primary key.
with expired as (
  delete from towpath.task t
   where t.ctid = any(array(
     select f.ctid from towpath.task f
      where f.consumer_group || '' = $1 and f.created_at < (select towpath.clock()) - make_interval(secs => $2)
        and f.finished_at < (select towpath.clock()) - make_interval(secs => $2)
        and f.state in ('SUCCEEDED', 'FAILED', 'CANCELLED', 'EXPIRED')
        and not exists (select 1 from towpath.dead_letter d where d.consumer_group = f.consumer_group
                           and d.message_id = f.id and d.state = 'open')
      limit $3 for update skip locked))
     and t.state in ('SUCCEEDED', 'FAILED', 'CANCELLED', 'EXPIRED')
  returning t.consumer_group, t.id
), forgotten as (
  delete from towpath.task_event e using expired x where e.consumer_group = x.consumer_group and e.task_id = x.id
)
select count(*) from expired

-- name: record_event
-- One line of a task's history.
insert into towpath.task_event (consumer_group, task_id, event, from_state, to_state, version, attempt, run_no, due_at,
                                reason_code, error_class, error_message, worker, trace)
values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14)

-- name: bury
-- One catalog row per group and message; a later death reopens it. Index: its unique key.
insert into towpath.dead_letter as d (consumer_group, message_id, stage, type, kind, source, key, position, payload, content_type,
                                      headers, origin, reason_code, error_class, error_message, fingerprint, attempts,
                                      followers_passed, trace)
values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11::text::json, $12::text::json, $13, $14, $15, $16, $17,
        (select count(*) from towpath.task t where t.consumer_group = $1 and t.source = $6 and t.lane = $18 and t.state = 'PARKED'), $19)
on conflict (consumer_group, message_id) do update
   set stage = excluded.stage, state = 'open', death_count = d.death_count + 1, reason_code = excluded.reason_code,
       error_class = excluded.error_class, error_message = excluded.error_message, fingerprint = excluded.fingerprint,
       attempts = excluded.attempts, followers_passed = excluded.followers_passed, copy_error = null,
       last_dead_at = towpath.clock(), closed_at = null
returning d.id, d.death_count

-- name: copy_to_broker
-- The dead letter's copy for alerts and other tools; leaves with the next window of the relay.
insert into towpath.outbox (shard, message_id, kind, destination, type, key, content_type, headers, payload)
values (towpath.shard($1, $2, $3), $3, 'copy', $1, $4, $2, $5, $6::text::json, $7)

-- name: register_worker
insert into towpath.worker (id, consumer_group, host, lease_until, types, version)
values ($1, $2, $3, towpath.clock() + make_interval(secs => $4), $5, $6)

-- name: beat
-- Renew a living worker; a lapsed one cannot revive. Index: primary key.
update towpath.worker set lease_until = towpath.clock() + make_interval(secs => $2)
 where id = $1 and lease_until > towpath.clock() returning 1

-- name: report_progress
-- Latest progress of running tasks, once a beat. Index: primary key, one probe per row.
update towpath.task t set progress = ($4::text[])[array_position($2, t.id)]::json, updated_at = towpath.clock()
 where t.consumer_group = $1 and t.id = any($2::uuid[]) and t.token = ($3::uuid[])[array_position($2, t.id)] and t.state || '' = 'RUNNING'

-- name: cancellations
-- Those of the tasks $2 that worker $3 runs and somebody wants cancelled. Index: primary key.
select t.id from towpath.task t
 where t.consumer_group = $1 and t.id = any($2::uuid[]) and t.worker = $3 and t.state || '' = 'RUNNING'
   and t.cancel_requested

-- name: claims_of_worker
-- What the database takes this worker to be running. Index: task_running.
select id, token from towpath.task where worker = $1 and state = 'RUNNING'

-- name: leave
delete from towpath.worker where id = $1

-- name: forget_workers
-- Dead workers nobody's row points to. Index: primary key, task_running.
delete from towpath.worker w where w.consumer_group = $1 and w.lease_until < towpath.clock() - interval '1 day'
   and not exists (select 1 from towpath.task t where t.worker = w.id and t.state = 'RUNNING')

-- name: census
-- What of a group is not finished; each count stops at $2. Takes no locks. Indexes: the partial ones of each state,
-- task_running by way of the group's workers, dead_letter_open.
select (select count(*) from (select from towpath.task t where t.consumer_group = $1 and t.state = 'ACCEPTED'
          and t.kind = 'task' limit $2) x) as accepted,
       r.count as running,
       (select count(*) from (select from towpath.task t where t.consumer_group = $1 and t.state = 'WAITING' limit $2) x)
         as waiting,
       (select count(*) from (select from towpath.task t where t.consumer_group = $1 and t.state = 'PARKED' limit $2) x)
         as parked,
       (select count(*) from (select from towpath.task t where t.consumer_group = $1 and t.state = 'UNKNOWN' limit $2) x)
         as unknown,
       (select count(*) from (select from towpath.task t where t.consumer_group = $1 and t.state = 'WAITING'
          and t.due_at <= (select towpath.clock()) order by t.due_at limit $2) x) as due,
       (select count(*) from (select from towpath.dead_letter d where d.consumer_group = $1 and d.state = 'open'
          limit $2) x) as dead_letters,
       coalesce(extract(epoch from towpath.clock() - r.oldest), 0)::float8 as oldest_running_seconds,
       coalesce(greatest(extract(epoch from towpath.clock() - (select t.due_at from towpath.task t
          where t.consumer_group = $1 and t.state = 'WAITING' order by t.due_at limit 1)), 0), 0)::float8
         as oldest_due_seconds
  from (select count(*) as count, min(x.started_at) as oldest
          from (select t.started_at from towpath.worker w join towpath.task t on t.worker = w.id
                 where w.consumer_group = $1 and t.consumer_group = $1 and t.state = 'RUNNING' limit $2) x) r
