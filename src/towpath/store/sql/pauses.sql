-- What people have stopped for now. The table has a row for each time somebody did.

-- name: open
-- Those of kind $1 in force. Index: pause_open.
select p.name, p.type, p.actor, p.reason, p.paused_at from towpath.pause p
 where p.kind = $1 and p.resumed_at is null order by p.id

-- name: pause
-- Begin one, unless it is in force. Index: pause_open.
insert into towpath.pause (kind, name, type, actor, reason) values ($1, $2, $3, $4, $5)
on conflict (kind, name, type) where resumed_at is null do nothing
returning id

-- name: resume
-- End one. Index: pause_open.
update towpath.pause set resumed_at = towpath.clock()
 where kind = $1 and name = $2 and type = $3 and resumed_at is null
returning id

-- name: of_group
-- The types of group $1 of which nothing starts for now. Index: pause_open.
select p.type from towpath.pause p where p.kind = 'start' and p.name = $1 and p.resumed_at is null
