-- Dead letters corrected, exported and imported by an operator. Lock order: dead letters after task rows.

-- name: lock_for_edit
-- An open dead letter with its body as a replay would send it now. Index: primary key.
select d.id, d.consumer_group, d.message_id, d.type, d.state, coalesce(r.revision, 0) as revision,
       case when r.revision is null then coalesce(t.payload, d.payload) else r.payload end as payload,
       coalesce(r.content_type, t.content_type, d.content_type) as content_type,
       coalesce(r.headers, t.headers, d.headers)::text as headers
  from towpath.dead_letter d
  left join towpath.task t on t.consumer_group = d.consumer_group and t.id = d.message_id
  left join lateral (select * from towpath.dead_letter_revision r where r.dead_letter = d.id
                      order by r.revision desc limit 1) r on true
 where d.id = $1 for update of d

-- name: add_revision
insert into towpath.dead_letter_revision (dead_letter, revision, actor, reason, payload, content_type, headers, is_validated)
values ($1, $2, $3, $4, $5, $6, $7::text::json, $8)

-- name: revisions
-- The corrections of dead letters $1, without their bodies where $2 is false. Index: primary key.
select r.dead_letter, r.revision, r.at, r.actor, r.reason, r.is_validated, octet_length(r.payload) as payload_bytes,
       r.content_type, case when $2 then r.payload end as payload, case when $2 then r.headers::text end as headers
  from towpath.dead_letter_revision r where r.dead_letter = any($1::bigint[]) order by r.dead_letter, r.revision

-- name: export
-- Dead letters whole, with what a task row made anew would need; filters as in operator.sql, states $11, the oldest
-- first. Takes no locks; read through a cursor.
select d.*, t.lane, t.owner, t.run_no
  from towpath.dead_letter d
  left join towpath.task t on t.consumer_group = d.consumer_group and t.id = d.message_id
 where ($1::text[] is null or d.consumer_group = any($1)) and ($2::text[] is null or d.type = any($2))
   and ($3::text[] is null or d.reason_code = any($3)) and ($4::text[] is null or d.fingerprint = any($4))
   and ($5::text[] is null or d.stage = any($5)) and ($6::text[] is null or d.key = any($6))
   and ($7::bigint[] is null or d.id = any($7)) and ($8::uuid[] is null or d.message_id = any($8))
   and ($9::timestamptz is null or d.last_dead_at >= $9) and ($10::timestamptz is null or d.last_dead_at < $10)
   and ($11::text[] is null or d.state = any($11))
 order by d.id

-- name: installation
select (select m.value from towpath.meta m where m.name = 'installation_id') as installation,
       (select m.value from towpath.meta m where m.name = 'schema_version') as schema_version

-- name: missing
-- Of the dead letters $1, a JSON array, those that `import` would bring: their lines. Takes no locks; indexes: primary
-- key of task, unique key of dead_letter, looked up row by row: a NOT EXISTS could be hashed, from the whole table.
select x.line
  from json_to_recordset($1::text::json) x(line bigint, consumer_group text, message_id uuid, stage text, state text)
 where (select d.id from towpath.dead_letter d
         where d.consumer_group = x.consumer_group and d.message_id = x.message_id) is null
   and (x.stage = 'publish' or x.state <> 'open'
        or coalesce((select t.state from towpath.task t
                      where t.consumer_group = x.consumer_group and t.id = x.message_id), 'DEAD') = 'DEAD')

-- name: import
-- Dead letters $1, a JSON array, that are not there: with their dead tasks where those are missing too, and left out
-- where the task lives or ended otherwise. Returns the new rows. Indexes: primary key of task, unique key of dead_letter.
with given as materialized (
  select x.*, decode(x.payload_base64, 'base64') as payload from json_to_recordset($1::text::json) x(
    consumer_group text, message_id uuid, stage text, state text, death_count integer, replay_count integer, type text,
    kind text, source text, key text, position bigint, payload_base64 text, content_type text, headers json, origin json,
    reason_code text, error_class text, error_message text, fingerprint text, attempts integer, followers_passed integer,
    trace text, copy_error text, first_dead_at timestamptz, last_dead_at timestamptz, closed_at timestamptz,
    lane text, owner text, run_no integer)
), missing as materialized (
  select g.* from given g
   where (select d.id from towpath.dead_letter d
           where d.consumer_group = g.consumer_group and d.message_id = g.message_id) is null
     and (g.stage = 'publish' or g.state <> 'open'
          or coalesce((select t.state from towpath.task t
                        where t.consumer_group = g.consumer_group and t.id = g.message_id), 'DEAD') = 'DEAD')
), buried as (
  insert into towpath.task (consumer_group, id, type, kind, source, key, lane, position, owner, state, run_no, attempt,
                            held_by, reason_code, error_class, error_message, fingerprint, trace, created_at, finished_at)
  select m.consumer_group, m.message_id, coalesce(m.type, 'unknown'), coalesce(nullif(m.kind, 'copy'), 'event'), m.source,
         m.key, m.lane, m.position, coalesce(m.owner, ''), 'DEAD', coalesce(m.run_no, 0), m.attempts, 'database',
         m.reason_code, m.error_class, m.error_message, m.fingerprint, m.trace, m.first_dead_at, m.last_dead_at
    from missing m where m.stage <> 'publish' and m.state = 'open'
   order by m.consumer_group, m.message_id
  on conflict (consumer_group, id) do nothing
)
insert into towpath.dead_letter (consumer_group, message_id, stage, state, death_count, replay_count, type, kind, source,
                                 key, position, payload, content_type, headers, origin, reason_code, error_class,
                                 error_message, fingerprint, attempts, followers_passed, trace, copy_error,
                                 first_dead_at, last_dead_at, closed_at)
select m.consumer_group, m.message_id, m.stage, m.state, m.death_count, m.replay_count, m.type, m.kind, m.source,
       m.key, m.position, m.payload, m.content_type, m.headers, m.origin, m.reason_code, m.error_class,
       m.error_message, m.fingerprint, m.attempts, m.followers_passed, m.trace, m.copy_error,
       m.first_dead_at, m.last_dead_at, m.closed_at
  from missing m
 order by m.first_dead_at, m.position nulls first
on conflict (consumer_group, message_id) do nothing
returning id, consumer_group, message_id

-- name: import_revisions
-- The corrections of dead letter $1, a JSON array.
insert into towpath.dead_letter_revision (dead_letter, revision, at, actor, reason, payload, content_type, headers, is_validated)
select $1, x.revision, x.at, x.actor, x.reason, decode(x.payload_base64, 'base64'), x.content_type, x.headers, x.is_validated
  from json_to_recordset($2::text::json) x(revision integer, at timestamptz, actor text, reason text, payload_base64 text,
                                           content_type text, headers json, is_validated boolean)
