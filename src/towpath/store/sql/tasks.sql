-- Reading and cancelling tasks on the caller's own session or connection. Values are cast here, so
-- that the statements mean the same through every driver.

-- name: get_task
-- One task of a group. Index: primary key.
select cast(t.id as text) as id, t.consumer_group, t.type, t.kind, t.key, t.owner, t.state, t.version, t.attempt, t.run_no,
       t.cancel_requested, t.waiting_for, t.due_at, t.deadline_at, t.created_at, t.updated_at, t.started_at, t.finished_at,
       cast(t.progress as text) as progress, t.result, t.reason_code, t.error_class, t.error_message, t.trace
from towpath.task t
where t.consumer_group = cast($1 as text) and t.id = cast(cast($2 as text) as uuid);

-- name: list_tasks
-- Tasks of a group, the newest id first, before id $2. Index: primary key, backwards; filters are
-- applied on the way.
select cast(t.id as text) as id, t.consumer_group, t.type, t.kind, t.key, t.owner, t.state, t.version, t.attempt, t.run_no,
       t.cancel_requested, t.waiting_for, t.due_at, t.deadline_at, t.created_at, t.updated_at, t.started_at, t.finished_at,
       cast(t.progress as text) as progress, t.result, t.reason_code, t.error_class, t.error_message, t.trace
from towpath.task t
where t.consumer_group = cast($1 as text)
  and t.id < coalesce(cast(cast($2 as text) as uuid), 'ffffffff-ffff-ffff-ffff-ffffffffffff')
  and (cast($3 as text) is null or t.state = cast($3 as text))
  and (cast($4 as text) is null or t.owner = cast($4 as text))
  and (cast($5 as text) is null or t.type = cast($5 as text))
  and (cast($6 as text) is null or t.key = cast($6 as text))
order by t.id desc
limit cast($7 as integer);

-- name: cancel_task
select towpath.cancel_task(cast($1 as text), cast(cast($2 as text) as uuid), cast($3 as text)) as state;
