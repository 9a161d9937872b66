-- What operators did.

-- name: clock
select towpath.clock()

-- name: begin
insert into towpath.audit (actor, action, reason, filter, counts) values ($1, $2, $3, $4::text::json, $5::text::json)
returning id, at

-- name: update
-- Index: primary key.
update towpath.audit set counts = $2::text::json where id = $1

-- name: newest
-- The newest run of action $1 with exactly the filter $2. Walks the primary key backwards.
select a.counts::text from towpath.audit a
 where a.action = $1 and a.filter::text = $2 and a.at > towpath.clock() - interval '1 day'
 order by a.id desc limit 1
