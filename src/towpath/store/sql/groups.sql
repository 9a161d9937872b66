-- What the members of a group agree on.

-- name: note_terms
-- The group as it is known, or as described by ordering $2 and queues $3 where it is not. Locks the row, so that
-- of two members that differ one comes first. Index: primary key.
insert into towpath.consumer_group as g (name, ordering, queues) values ($1, $2, $3)
on conflict (name) do update set queues = coalesce(g.queues, excluded.queues)
returning g.ordering, g.queues

-- name: known_queues
select g.queues from towpath.consumer_group g where g.name = $1

-- name: lock_queues
-- Locks the group's row: who joins waits for the end of the transaction. Index: primary key.
select g.queues from towpath.consumer_group g where g.name = $1 for update

-- name: under_way
-- Living members, and tasks that stand in an order; counted up to $2. Indexes: the partial ones of each state,
-- task_running by way of the group's workers.
select (select count(*) from towpath.worker w where w.consumer_group = $1 and w.lease_until > towpath.clock()) as members,
       (select count(*) from (select from towpath.task t where t.consumer_group = $1 and t.state = 'WAITING'
          and not (t.waiting_for = 'delay' and t.lane is null) limit $2) x)
     + (select count(*) from (select from towpath.task t where t.consumer_group = $1 and t.state = 'PARKED' limit $2) x)
     + (select count(*) from (select from towpath.task t where t.consumer_group = $1 and t.state = 'UNKNOWN' limit $2) x)
     + (select count(*) from (select from towpath.worker w join towpath.task t on t.worker = w.id
          where w.consumer_group = $1 and t.consumer_group = $1 and t.state = 'RUNNING' limit $2) x) as tasks

-- name: change_ordering
update towpath.consumer_group set ordering = $2, updated_at = towpath.clock() where name = $1

-- name: change_queues
update towpath.consumer_group set queues = $2, updated_at = towpath.clock() where name = $1

-- name: other_members
-- Living members that handle other types than $2.
select w.host, w.types from towpath.worker w
 where w.consumer_group = $1 and w.lease_until > towpath.clock() and w.types <> $2::text[] order by w.started_at
