-- Asking producers to notify. Run on the relay's listening connection, in autocommit.

-- name: may_prepare
-- Whether transactions may be prepared on this server: PREPARE TRANSACTION fails after a NOTIFY.
select current_setting('max_prepared_transactions')::int > 0

-- name: notify
-- A relay's probe on the channel $1: the token $2 comes back to whoever can hear.
select pg_notify($1, $2)

-- name: stay_asleep
-- Ask every INSERT into the outbox to notify until the next whole second and one more; the same time for all relays,
-- so that one of them writes it. `seconds_left` is how long that lasts, null where it was not asked for: because more
-- than $2 numbers were drawn since $1 (null for the first time), so that each would be a NOTIFY for somebody awake.
-- A time further ahead is of a clock that was set back. Takes no lock that anybody waits for; no index needed.
with now as materialized (
  select extract(epoch from towpath.clock()) as at
), wanted as materialized (
  select n.at, floor(n.at)::bigint + 2 as until, s.last_value as last_id,
         coalesce(s.last_value - $1::bigint, 0) > $2::bigint as is_busy
  from now n, towpath.outbox_id_seq s
)
select w.last_id,
       (case when w.is_busy then null
             when g.last_value between w.until and w.until + 1 then g.last_value
             else setval('towpath.relays_asleep_until', w.until) end - w.at)::float8 as seconds_left
from wanted w, towpath.relays_asleep_until g

-- name: be_awake
-- Take back what was asked for: rows come, and each commit would wait for the one before it. Another relay that still
-- sleeps asks again within a second.
select setval('towpath.relays_asleep_until', 0)
