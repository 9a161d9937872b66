-- At-most-once effects: the marker before the call, and tasks whose effect may have happened.
-- Lock order as everywhere: key gates, then task rows.

-- name: mark_effect
-- Committed just before the call. The body is stored and the database holds the row from now on, so that a worker
-- lost inside the call leaves UNKNOWN without a redelivery. Index: primary key.
update towpath.task t
   set effect_state = 'started', effect_step = $4, held_by = 'database', lane = $5, position = coalesce($6, t.position),
       payload = coalesce($7, t.payload), content_type = coalesce($8, t.content_type),
       headers = coalesce($9::text::json, t.headers), trace = coalesce($10, t.trace), updated_at = towpath.clock()
 where t.consumer_group = $1 and t.id = $2 and t.token = $3 and t.state || '' = 'RUNNING'
returning t.version

-- name: unmark_effect
-- The handler said that the effect did not happen: it may be tried again. Index: primary key.
update towpath.task t set effect_state = null, effect_step = null, updated_at = towpath.clock()
 where t.consumer_group = $1 and t.id = $2 and t.token = $3 and t.state || '' = 'RUNNING'

-- name: doubt
-- RUNNING to UNKNOWN by its own worker. $4 seconds until the first reconcile. Index: primary key.
update towpath.task t
   set state = 'UNKNOWN', worker = null, token = null, attempt = t.attempt + 1, version = t.version + 1,
       reconcile_at = towpath.clock() + make_interval(secs => $4), reconcile_count = 0,
       reason_code = $5, error_class = $6, error_message = $7, fingerprint = $8, updated_at = towpath.clock()
 where t.consumer_group = $1 and t.id = $2 and t.token = $3 and t.state || '' = 'RUNNING' and t.effect_state = 'started'
returning t.version, t.attempt, t.run_no

-- name: doubt_abandoned
-- The same for a dead worker's row, found by the reaper; it checks again. Index: primary key.
update towpath.task t
   set state = 'UNKNOWN', worker = null, token = null, attempt = t.attempt + 1, version = t.version + 1,
       reconcile_at = towpath.clock(), reconcile_count = 0, reason_code = 'worker_lost',
       error_class = 'WorkerLost', error_message = 'the worker was lost after the effect began', fingerprint = 'worker_lost',
       updated_at = towpath.clock()
 where t.consumer_group = $1 and t.id = $2 and t.token = $3 and t.state || '' = 'RUNNING' and t.effect_state = 'started'
   and not exists (select 1 from towpath.worker w where w.id = t.worker and w.lease_until > towpath.clock())
returning t.version, t.attempt, t.run_no

-- name: doubt_given_up
-- The same for rows that their own worker gave up after the effect began, with a line of history. Index: primary key.
with doubted as (
  update towpath.task t
     set state = 'UNKNOWN', worker = null, token = null, attempt = t.attempt + 1, version = t.version + 1,
         reconcile_at = towpath.clock(), reconcile_count = 0, reason_code = 'given_up', error_class = 'GivenUp',
         error_message = 'its worker gave it up after the effect began', fingerprint = 'given_up', updated_at = towpath.clock()
   where t.consumer_group = $1 and t.id = any($2::uuid[]) and t.token = any($3::uuid[]) and t.state || '' = 'RUNNING'
     and t.effect_state = 'started'
  returning t.*
)
insert into towpath.task_event (consumer_group, task_id, event, from_state, to_state, version, attempt, run_no,
                                reason_code, error_class, error_message, trace)
select d.consumer_group, d.id, 'task.unknown', 'RUNNING', d.state, d.version, d.attempt, d.run_no,
       d.reason_code, d.error_class, d.error_message, d.trace
  from doubted d

-- name: take_doubts
-- Tasks to ask about now, of the types $2; the next time is set before the question. Index: task_unknown.
update towpath.task t
   set reconcile_at = towpath.clock() + make_interval(secs => least($4, $3 * 2 ^ least(t.reconcile_count, 30))),
       reconcile_count = t.reconcile_count + 1
 where t.consumer_group = $1
   and t.id = any(array(select u.id from towpath.task u
                         where u.consumer_group = $1 and u.state = 'UNKNOWN' and u.reconcile_at <= (select towpath.clock())
                           and u.type = any($2::text[])
                         order by u.reconcile_at limit $5 for update skip locked))
   and t.state || '' = 'UNKNOWN'
returning t.id, t.type, t.kind, t.source, t.key, t.lane, t.position, t.attempt, t.version, t.deliveries, t.run_no,
          t.owner, t.payload, t.content_type, t.headers, t.trace, t.created_at, t.effect_step

-- name: doubtful
-- One task in doubt, for an operator. Index: primary key.
select t.id, t.type, t.kind, t.source, t.key, t.lane, t.position, t.attempt, t.version, t.deliveries, t.run_no,
       t.owner, t.payload, t.content_type, t.headers, t.trace, t.created_at, t.effect_step, t.state
  from towpath.task t where t.consumer_group = $1 and t.id = $2

-- name: resolve
-- UNKNOWN to what became of it, if nobody else decided since version $3. $5: it heads its lane. Index: primary key.
update towpath.task t
   set state = case when $4 = 'WAITING' and not $5 then 'PARKED' else $4 end,
       due_at = case when $4 = 'WAITING' and $5 then towpath.clock() end,
       waiting_for = case when $4 = 'WAITING' and $5 then 'retry' end,
       effect_state = case when $4 = 'SUCCEEDED' then t.effect_state end, effect_step = null, reconcile_at = null,
       result = $6, reason_code = $7,
       version = t.version + 1, updated_at = towpath.clock(),
       finished_at = case when $4 = 'WAITING' then null else towpath.clock() end
 where t.consumer_group = $1 and t.id = $2 and t.state || '' = 'UNKNOWN' and t.version = $3
returning t.state, t.version, t.attempt, t.run_no, t.due_at
