-- Tasks that an operator puts back to work. Lock order: key gates, then task rows, both sorted. Filters: $1 groups,
-- $2 types, $3 keys, $4 owners, $5 reason codes, $6 message ids (each null: any), $7 not before and $8 before (of the
-- last change), and $9: only what stood like this before.

-- name: plan_retry
-- What waits for a later time, the next due first; delayed tasks only by their ids. Takes no locks; read through a
-- cursor. Index: task_due or task_due_of_type.
select t.consumer_group, t.id, t.type, t.waiting_for as why, t.reason_code, false as has_effect, true as has_body
  from towpath.task t
 where t.state = 'WAITING' and t.due_at > towpath.clock() and t.updated_at < $9
   and (t.waiting_for <> 'delay' or t.id = any($6::uuid[]))
   and ($1::text[] is null or t.consumer_group = any($1)) and ($2::text[] is null or t.type = any($2))
   and ($3::text[] is null or t.key = any($3)) and ($4::text[] is null or t.owner = any($4))
   and ($5::text[] is null or t.reason_code = any($5)) and ($6::uuid[] is null or t.id = any($6))
   and ($7::timestamptz is null or t.updated_at >= $7) and ($8::timestamptz is null or t.updated_at < $8)
 order by t.consumer_group, t.due_at, t.id

-- name: plan_rerun
-- What has ended in states $10, lanes by their oldest message, messages of a lane by position. Whether its body is in
-- its row or its dead letter, and whether an at-most-once effect began in it. Takes no locks; read through a cursor.
-- Indexes: primary key, the unique key of dead_letter.
select t.consumer_group, t.id, t.type, t.state as why, t.reason_code, t.effect_state is not null as has_effect,
       t.headers is not null or exists (select from towpath.dead_letter d
         where d.consumer_group = t.consumer_group and d.message_id = t.id) as has_body
  from towpath.task t
 where t.state = any($10::text[]) and t.finished_at < $9
   and t.consumer_group = any($1::text[]) and ($2::text[] is null or t.type = any($2))
   and ($3::text[] is null or t.key = any($3)) and ($4::text[] is null or t.owner = any($4))
   and ($5::text[] is null or t.reason_code = any($5)) and ($6::uuid[] is null or t.id = any($6))
   and ($7::timestamptz is null or t.updated_at >= $7) and ($8::timestamptz is null or t.updated_at < $8)
 order by t.consumer_group,
          min(t.created_at) over (partition by t.consumer_group, t.source, t.lane, case when t.lane is null then t.id end),
          t.source, t.lane, t.position nulls first, t.id

-- name: retained
-- Which of $1 the outbox still holds. Reads the whole ring once.
select distinct o.message_id from towpath.outbox o where o.message_id = any($1::uuid[]) and o.kind = 'event'

-- name: states_of
-- What became of messages $1 in groups $2 (null: any). Index: primary key where groups are given.
select t.consumer_group, t.id, t.state, t.waiting_for, t.due_at <= towpath.clock() as is_due from towpath.task t
 where t.id = any($1::uuid[]) and ($2::text[] is null or t.consumer_group = any($2))
 order by t.consumer_group, t.id

-- name: retry_tasks
-- WAITING for a later time to WAITING and due now: attempts stay. Index: primary key, in id order.
update towpath.task t
   set due_at = towpath.clock(), version = t.version + 1, updated_at = towpath.clock()
 where t.consumer_group = $1
   and t.id = any(array(select w.id from towpath.task w where w.consumer_group = $1 and w.id = any($2::uuid[])
                           and w.state || '' = 'WAITING' and w.due_at > towpath.clock() and w.updated_at < $3
                         order by w.id for update skip locked))
   and t.state || '' = 'WAITING'
returning t.id, 'WAITING' as from_state, t.state, t.version, t.attempt, t.run_no, t.due_at

-- name: lanes_of_finished
-- Tasks $2 of group $1 that ended in states $4 before $3, before anything is locked. Index: primary key.
select t.id, t.source, t.lane, t.type, t.state as from_state, t.headers is null as lacks_body from towpath.task t
 where t.consumer_group = $1 and t.id = any($2::uuid[]) and t.state = any($4::text[]) and t.finished_at < $3
 order by t.position nulls first, t.id

-- name: lock_finished
-- The same, locked. Index: primary key.
select t.id from towpath.task t
 where t.consumer_group = $1 and t.id = any($2::uuid[]) and t.state = any($4::text[]) and t.finished_at < $3
 order by t.id for update

-- name: bodies
-- Bodies that rows do not hold: of messages $2 of group $1, from the newest revision, the dead letter, or the outbox.
-- Reads the whole ring once.
select distinct on (b.id) b.* from (
  select d.message_id as id, 1 as rank, 0 as n, case when r.revision is null then d.payload else r.payload end as payload,
         coalesce(r.content_type, d.content_type) as content_type, coalesce(r.headers, d.headers)::text as headers
    from towpath.dead_letter d
    left join lateral (select * from towpath.dead_letter_revision r where r.dead_letter = d.id
                        order by r.revision desc limit 1) r on true
   where d.consumer_group = $1 and d.message_id = any($2::uuid[])
  union all
  select o.message_id, 2, o.id, o.payload, o.content_type, o.headers::text from towpath.outbox o
   where o.message_id = any($2::uuid[]) and o.kind = 'event'
) b order by b.id, b.rank, b.n

-- name: rerun_tasks
-- Locked tasks $2 begin a new run, due now, or PARKED unless among the heads $3: the effects' keys carry its number. A
-- deadline that has passed no longer counts. Bodies $5, content types $6 and headers $7 for those of $4. Index: primary key.
update towpath.task t
   set state = case when t.id = any($3::uuid[]) then 'WAITING' else 'PARKED' end,
       due_at = case when t.id = any($3::uuid[]) then towpath.clock() end,
       waiting_for = case when t.id = any($3::uuid[]) then 'rerun' end,
       run_no = t.run_no + 1, attempt = 0, deliveries = 0, started_at = null, finished_at = null, held_by = 'database',
       worker = null, token = null, effect_state = null, effect_step = null, cancel_requested = false, progress = null,
       result = null, result_ref = null, reason_code = null, error_class = null, error_message = null, fingerprint = null,
       deadline_at = case when t.deadline_at > towpath.clock() then t.deadline_at end,
       payload = case when t.headers is null then ($5::bytea[])[array_position($4::uuid[], t.id)] else t.payload end,
       content_type = coalesce(t.content_type, ($6::text[])[array_position($4, t.id)]),
       headers = coalesce(t.headers, ($7::text[])[array_position($4, t.id)]::json),
       trace = coalesce(t.trace, ($8::text[])[array_position($4, t.id)]),
       version = t.version + 1, updated_at = towpath.clock()
 where t.consumer_group = $1 and t.id = any($2::uuid[]) and t.state || '' in ('SUCCEEDED', 'FAILED')
returning t.id, t.state, t.version, t.attempt, t.run_no, t.due_at, t.trace

-- name: stuck
-- What has not moved for $2 seconds in groups $1 (null: any), at most $3 of each kind, and why: the longest first. Parked
-- messages are one line for each lane. What a pause holds says so. Takes no locks. Indexes: the partial ones of each
-- state, primary keys, pause_open.
with old as materialized (
  select towpath.clock() as now, towpath.clock() - make_interval(secs => $2) as since
), alive as materialized (
  select distinct w.consumer_group as name from towpath.worker w, old where w.lease_until > old.now
)
select s.consumer_group, s.id, s.type, s.key, s.state, s.since, coalesce(p.why, s.why) as why, s.behind,
       s.behind_state, s.count, s.consumer_group in (select name from alive) as has_members
  from old, lateral (
  (select t.consumer_group, t.id, t.type, t.key, t.state, coalesce(w.lease_until, t.updated_at) as since,
          case when t.effect_state is not null then 'lost_in_effect' when t.held_by = 'broker' then 'lost_to_redeliver'
               else 'lost_to_reap' end as why,
          null::uuid as behind, null::text as behind_state, null::bigint as count
     from towpath.task t left join towpath.worker w on w.id = t.worker
    where t.state = 'RUNNING' and ($1::text[] is null or t.consumer_group = any($1))
      and (w.lease_until is null or w.lease_until <= old.now) and coalesce(w.lease_until, t.updated_at) < old.since
    order by since limit $3)
  union all
  (select t.consumer_group, t.id, t.type, t.key, t.state, t.updated_at, 'runs_long', null, null, null
     from towpath.task t join towpath.worker w on w.id = t.worker
    where t.state = 'RUNNING' and ($1::text[] is null or t.consumer_group = any($1))
      and w.lease_until > old.now and t.updated_at < old.since
    order by t.updated_at limit $3)
  union all
  (select t.consumer_group, t.id, t.type, t.key, t.state, t.updated_at,
          case when m.policy is not null then case m.policy when 'pause' then 'message_paused' else 'message_parked' end
               when pg_visible_in_snapshot(t.xid, p.snapshot_from)
                 or (p.last_id is null and pg_visible_in_snapshot(t.xid, p.snapshot_to)) then 'message_lost'
               else 'message_unpublished' end, null, null, null
     from towpath.task t left join towpath.shard_progress p on p.shard = t.shard
     left join lateral (select g.policy from towpath.parked_message m join towpath.publish_gate g on g.id = m.gate
                         where m.message_id = t.id limit 1) m on true
    where t.state = 'ACCEPTED' and t.kind = 'task' and ($1::text[] is null or t.consumer_group = any($1))
      and t.updated_at < old.since
    order by t.updated_at limit $3)
  union all
  (select t.consumer_group, t.id, t.type, t.key, t.state, t.due_at,
          case when r.id is null then 'overdue' else 'overdue_behind' end, r.id, 'RUNNING', null
     from towpath.task t
     left join towpath.task r on r.consumer_group = t.consumer_group and r.source = t.source and r.lane = t.lane
                             and r.state = 'RUNNING'
    where t.state = 'WAITING' and ($1::text[] is null or t.consumer_group = any($1)) and t.due_at < old.since
    order by t.due_at limit $3)
  union all
  (select t.consumer_group, t.id, t.type, t.key, t.state, t.updated_at, 'in_doubt', null, null, null
     from towpath.task t
    where t.state = 'UNKNOWN' and ($1::text[] is null or t.consumer_group = any($1)) and t.updated_at < old.since
    order by t.updated_at limit $3)
  union all
  (select g.consumer_group, f.id, f.type, f.key, 'PARKED', g.created_at, 'parked', g.head, h.state, f.count
     from towpath.key_gate g
     left join towpath.task h on h.consumer_group = g.consumer_group and h.id = g.head
     cross join lateral (
       select c.*, count(*) over () as count from (
         select t.id, t.type, t.key from towpath.task t
          where t.consumer_group = g.consumer_group and t.source = g.source and t.lane = g.lane and t.state = 'PARKED'
          order by t.position limit 1000) c limit 1) f
    where ($1::text[] is null or g.consumer_group = any($1)) and g.created_at < old.since
    order by g.created_at limit $3)
  ) s left join lateral (
    select case p.type when '' then 'group_paused' else 'type_paused' end as why from towpath.pause p
     where p.kind = 'start' and p.name = s.consumer_group and p.type in ('', s.type) and p.resumed_at is null
       and s.why in ('message_lost', 'overdue')
     order by p.type limit 1) p on true
 order by s.since limit $3
