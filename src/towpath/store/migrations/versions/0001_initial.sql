-- The first schema. Written for the schema name `towpath`; the loader substitutes another one.

create schema if not exists towpath;

-- Time and identity -----------------------------------------------------------------------------

create function towpath.clock() returns timestamptz
  language sql volatile parallel safe as $$ select clock_timestamp() $$;

create function towpath.shards_per_broker() returns smallint
  language sql immutable parallel safe as $$ select 16::smallint $$;

create function towpath.ring_slots() returns smallint
  language sql immutable parallel safe as $$ select 4::smallint $$;

create function towpath.rotate_seconds() returns integer
  language sql immutable parallel safe as $$ select 21600 $$;

create function towpath.ring_slot() returns smallint
  language sql volatile parallel safe as
  $$ select (floor(extract(epoch from towpath.clock()) / towpath.rotate_seconds())::bigint % towpath.ring_slots())::smallint $$;

create function towpath.key_hash(key text, message_id uuid) returns bigint
  language sql immutable parallel safe as
  $$ select hashtextextended(coalesce(key, message_id::text), 0) & 9223372036854775807 $$;

create table towpath.meta (
  name  text primary key,
  value text not null
);
-- `compatible_from`: the oldest version whose library works with this schema. A migration that only adds leaves it.
insert into towpath.meta values
  ('schema_version', '1'),
  ('compatible_from', '1'),
  ('installation_id', gen_random_uuid()::text);

create table towpath.broker (
  number  smallint primary key check (number between 0 and 63),
  name    text not null unique,
  cluster text,
  home    text
);
insert into towpath.broker values (0, 'default');

create table towpath.destination (
  name      text primary key check (name ~ '^[A-Za-z0-9._-]{1,200}$'),
  broker    smallint not null default 0 references towpath.broker,
  address   text not null check (address ~ '^[A-Za-z0-9._-]{1,200}$'),
  on_poison text not null default 'park' check (on_poison in ('park', 'park_key', 'block'))
);

create table towpath.partitioning (
  broker     smallint not null,
  address    text not null,
  partitions integer not null check (partitions > 0),
  primary key (broker, address)
);

create function towpath.shard(destination text, key text, message_id uuid) returns smallint
  language sql stable parallel safe as
  $$ select (coalesce((select d.broker from towpath.destination d where d.name = destination), 0)
             * towpath.shards_per_broker()
             + towpath.key_hash(key, message_id) % towpath.shards_per_broker())::smallint $$;

-- Outbox ring -----------------------------------------------------------------------------------

create table towpath.outbox (
  slot         smallint not null default towpath.ring_slot(),
  xid          xid8 not null default pg_current_xact_id(),
  id           bigint generated always as identity (cache 1),
  shard        smallint not null,
  message_id   uuid not null,
  kind         text not null check (kind in ('event', 'task', 'copy')),
  destination  text not null check (destination ~ '^[A-Za-z0-9._-]{1,200}$'),
  type         text not null check (length(type) between 1 and 200),
  key          text check (octet_length(key) <= 512),
  content_type text not null,
  headers      json not null default '[]',
  payload      bytea,
  created_at   timestamptz not null default towpath.clock()
) partition by list (slot);
create table towpath.outbox_0 partition of towpath.outbox for values in (0)
  with (autovacuum_vacuum_insert_threshold = -1);
create table towpath.outbox_1 partition of towpath.outbox for values in (1)
  with (autovacuum_vacuum_insert_threshold = -1);
create table towpath.outbox_2 partition of towpath.outbox for values in (2)
  with (autovacuum_vacuum_insert_threshold = -1);
create table towpath.outbox_3 partition of towpath.outbox for values in (3)
  with (autovacuum_vacuum_insert_threshold = -1);
create index outbox_window on towpath.outbox (shard, xid, id);

-- Until when a relay is asleep and wants to be notified: seconds since 1970. A sequence, so that writing it is seen
-- at once by transactions of any age, holds up nobody, and expires by itself.
create sequence towpath.relays_asleep_until as bigint minvalue 0 start 0;

create function towpath.wake_relays() returns trigger
  language plpgsql volatile as $$
begin
  perform pg_catalog.pg_notify(tg_table_schema, '');
  return null;
end $$;
-- The condition is all that a commit pays while no relay is asleep: hence neither a query nor `towpath.clock()`.
create trigger wake_relays after insert on towpath.outbox for each statement
  when (pg_sequence_last_value('towpath.relays_asleep_until'::regclass) > date_part('epoch', clock_timestamp()))
  execute function towpath.wake_relays();

-- Events for later; moved into the outbox when due.
create table towpath.scheduled (
  xid          xid8 not null default pg_current_xact_id(),
  id           bigint generated always as identity (cache 1),
  due_at       timestamptz not null,
  message_id   uuid not null,
  destination  text not null check (destination ~ '^[A-Za-z0-9._-]{1,200}$'),
  type         text not null check (length(type) between 1 and 200),
  key          text check (octet_length(key) <= 512),
  content_type text not null,
  headers      json not null default '[]',
  payload      bytea,
  created_at   timestamptz not null default towpath.clock(),
  primary key (due_at, id)
);
create index scheduled_window on towpath.scheduled (xid);

create table towpath.scheduled_progress (
  seq        bigint primary key,
  due_upto   timestamptz not null,
  id_upto    bigint not null,
  snapshot   pg_snapshot not null,
  xid        xid8 not null default pg_current_xact_id(),
  created_at timestamptz not null default towpath.clock()
);
insert into towpath.scheduled_progress (seq, due_upto, id_upto, snapshot)
  values (1, towpath.clock(), 0, pg_current_snapshot());

-- Relays, leases and the progress journal -------------------------------------------------------

create table towpath.relay (
  id         uuid primary key,
  broker     smallint not null default 0,
  host       text not null,
  version    text not null default '',
  started_at timestamptz not null default towpath.clock(),
  seen_at    timestamptz not null default towpath.clock()
);

-- One row a shard. Its key grows with each renewal: by index the newest version comes first, and none before it is
-- stepped over, or looked at for a duplicate, while something keeps vacuum from removing them.
create table towpath.shard_lease (
  shard       smallint not null,
  relay       uuid,
  epoch       bigint not null default 0,
  lease_until timestamptz not null default '-infinity',
  journaled   bigint not null default 0,
  primary key (shard, epoch, lease_until)
);
insert into towpath.shard_lease (shard)
  select n::smallint from generate_series(0, towpath.shards_per_broker() - 1) n;

create table towpath.journal (
  seq            bigint generated always as identity primary key,
  relay          uuid,
  shards         smallint[] not null,
  epochs         bigint[] not null,
  last_ids       bigint[] not null,
  snapshot_from  pg_snapshot not null,
  snapshot_to    pg_snapshot not null,
  xid            xid8 not null default pg_current_xact_id(),
  created_at     timestamptz not null default towpath.clock(),
  check (cardinality(shards) = cardinality(epochs) and cardinality(shards) = cardinality(last_ids))
);
insert into towpath.journal (shards, epochs, last_ids, snapshot_from, snapshot_to)
  select array_agg(l.shard order by l.shard), array_agg(0::bigint), array_agg(null::bigint),
         pg_current_snapshot(), pg_current_snapshot()
  from towpath.shard_lease l;

-- Proof of delivery by shard, beside what reading is built on.
create table towpath.canary (
  shard        smallint primary key,
  message_id   uuid not null,
  written_at   timestamptz not null default towpath.clock(),
  is_confirmed boolean not null default false,
  proved_at    timestamptz not null default towpath.clock()
) with (fillfactor = 50);

-- By index from the least number that may be a shard's newest: what lies below is trimmed, and dead for as long as
-- something keeps vacuum from removing it.
create view towpath.shard_progress as
  select distinct on (p.shard) p.shard, p.epoch, p.last_id, j.seq, j.relay, j.snapshot_from, j.snapshot_to, j.created_at
  from towpath.journal j, unnest(j.shards, j.epochs, j.last_ids) as p(shard, epoch, last_id)
  where j.seq >= (
    select min(l.journaled)
    from generate_series(0, (select max(b.number) + 1 from towpath.broker b) * towpath.shards_per_broker() - 1) n(shard), lateral (
      select s.journaled from towpath.shard_lease s where s.shard = n.shard order by s.epoch desc, s.lease_until desc limit 1) l)
  order by p.shard, p.epoch desc, j.seq desc;

-- What people have stopped for now: publishing to a destination ('*' is every one), or a consumer group's starting of
-- work ('' is every type). Those that ended stay: who stopped what, for how long and why.
create table towpath.pause (
  id         bigint generated always as identity primary key,
  kind       text not null check (kind in ('publish', 'start')),
  name       text not null,
  type       text not null default '',
  actor      text not null,
  reason     text not null,
  paused_at  timestamptz not null default towpath.clock(),
  resumed_at timestamptz
);
create unique index pause_open on towpath.pause (kind, name, type) where resumed_at is null;

-- Keys, or whole shards, that wait until a person decides about a message that cannot be published; and a shard's
-- messages to a destination that is paused, or was and is being caught up.
create table towpath.publish_gate (
  id          bigint generated always as identity primary key,
  shard       smallint not null,
  destination text not null,
  key         text,
  policy      text not null check (policy in ('park_key', 'block', 'pause')),
  message_id  uuid,
  sequence    bigint,
  created_at  timestamptz not null default towpath.clock(),
  released_at timestamptz,
  unique (shard, destination, key),
  check ((policy = 'pause') = (message_id is null) and (policy = 'pause') = (sequence is null))
);
create index publish_gate_head on towpath.publish_gate (message_id);
create index publish_gate_block on towpath.publish_gate (shard) where policy = 'block';
create unique index publish_gate_pause on towpath.publish_gate (shard, destination) where policy = 'pause';
create index publish_gate_released on towpath.publish_gate (shard, id) where released_at is not null;

-- What waits behind a gate: taken out of the outbox whole, so that the ring never has to keep it.
create table towpath.parked_message (
  gate         bigint not null references towpath.publish_gate,
  id           bigint not null,
  message_id   uuid not null,
  kind         text not null,
  type         text not null,
  key          text,
  content_type text not null,
  headers      json not null,
  payload      bytea,
  created_at   timestamptz not null,
  primary key (gate, id)
);
create index parked_message_id on towpath.parked_message (message_id);

create view towpath.outbox_message as
  select o.*,
    case when exists (select from towpath.parked_message m where m.message_id = o.message_id and m.id = o.id) then 'PARKED'
         when pg_visible_in_snapshot(o.xid, p.snapshot_from)
           or (pg_visible_in_snapshot(o.xid, p.snapshot_to) and (p.last_id is null or o.id <= p.last_id))
         then 'SENT' else 'PENDING' end as status
  from towpath.outbox o left join towpath.shard_progress p using (shard);

-- Work ------------------------------------------------------------------------------------------

-- What all members of a group must agree on, as its first member or `broker apply` described it.
create table towpath.consumer_group (
  name       text primary key check (length(name) between 1 and 100),
  ordering   text not null check (ordering in ('key', 'partition', 'none')),
  queues     integer check (queues > 0),
  updated_at timestamptz not null default towpath.clock()
);

create table towpath.worker (
  id             uuid primary key,
  consumer_group text not null,
  host           text not null,
  version        text not null default '',
  types          text[] not null default '{}',
  started_at     timestamptz not null default towpath.clock(),
  lease_until    timestamptz not null
) with (fillfactor = 50);

create table towpath.task (
  consumer_group   text not null check (length(consumer_group) between 1 and 100),
  id               uuid not null,
  type             text not null,
  kind             text not null check (kind in ('event', 'task')),
  source           text not null,
  key              text,
  lane             text,
  position         bigint,
  owner            text not null default '' check (length(owner) <= 200),
  request_hash     bytea,
  state            text not null constraint task_state_check check (state in (:task_states)),
  version          integer not null default 1,
  attempt          integer not null default 0,
  deliveries       integer not null default 0,
  run_no           integer not null default 0,
  held_by          text not null check (held_by in ('broker', 'database')),
  worker           uuid,
  token            uuid,
  effect_state     text check (effect_state = 'started'),
  effect_step      text,
  reconcile_at     timestamptz,
  reconcile_count  integer not null default 0,
  cancel_requested boolean not null default false,
  deadline_at      timestamptz,
  due_at           timestamptz,
  waiting_for      text constraint task_waiting_for_check check (waiting_for in (:waiting_reasons)),
  payload          bytea,
  content_type     text,
  headers          json,
  trace            text,
  progress         json,
  result           bytea,
  result_ref       text,
  reason_code      text,
  error_class      text,
  error_message    text,
  fingerprint      text,
  shard            smallint,
  xid              xid8,
  created_at       timestamptz not null default towpath.clock(),
  updated_at       timestamptz not null default towpath.clock(),
  started_at       timestamptz,
  finished_at      timestamptz,
  primary key (consumer_group, id),
  constraint task_running_has_token check ((state = 'RUNNING') = (token is not null and worker is not null)),
  constraint task_waiting_has_due check ((state = 'WAITING') = (due_at is not null and waiting_for is not null)),
  constraint task_final_has_end check ((state in (:final_states)) = (finished_at is not null)),
  constraint task_waits_in_database check (state not in ('WAITING', 'PARKED') or held_by = 'database')
) with (fillfactor = 80);
-- At most one running message of a lane (a key, or a partition where order is per partition).
create unique index task_running_lane on towpath.task (consumer_group, source, lane)
  where state = 'RUNNING' and lane is not null;
create index task_running on towpath.task (worker) where state = 'RUNNING';
create index task_due on towpath.task (consumer_group, due_at) where state = 'WAITING';
create index task_due_of_type on towpath.task (consumer_group, type, due_at) where state = 'WAITING';
create index task_unknown on towpath.task (consumer_group, reconcile_at) where state = 'UNKNOWN';
create index task_parked on towpath.task (consumer_group, source, lane, position) where state = 'PARKED';
create index task_accepted on towpath.task (consumer_group, updated_at) where state = 'ACCEPTED' and kind = 'task';
create index task_created on towpath.task using brin (created_at);
create unique index task_request on towpath.task (consumer_group, owner, request_hash) where request_hash is not null;

create table towpath.task_event (
  consumer_group text not null,
  task_id        uuid not null,
  seq            bigint generated always as identity,
  at             timestamptz not null default towpath.clock(),
  event          text not null,
  from_state     text,
  to_state       text,
  version        integer,
  attempt        integer,
  run_no         integer,
  due_at         timestamptz,
  reason_code    text,
  error_class    text,
  error_message  text,
  worker         uuid,
  actor          text,
  trace          text,
  primary key (consumer_group, task_id, seq)
);

create table towpath.key_gate (
  consumer_group text not null,
  source         text not null,
  lane           text not null,
  head           uuid not null,
  created_at     timestamptz not null default towpath.clock(),
  primary key (consumer_group, source, lane)
);

-- How far groups have read at a broker that keeps offsets for them, beside the broker's own.
create table towpath.group_offset (
  consumer_group text not null,
  address        text not null,
  partition      integer not null,
  position       bigint,
  refused        text check (refused in ('offset_missing', 'offset_out_of_range')),
  resume_from    bigint check (resume_from >= 0),
  updated_at     timestamptz not null default towpath.clock(),
  primary key (consumer_group, address, partition)
) with (fillfactor = 50);

-- What a person has to look at ------------------------------------------------------------------

create table towpath.dead_letter (
  id               bigint generated always as identity primary key,
  consumer_group   text not null,
  message_id       uuid not null,
  stage            text not null check (stage in ('publish', 'decode', 'handle', 'broker')),
  state            text not null default 'open' check (state in ('open', 'replayed', 'discarded')),
  death_count      integer not null default 1,
  replay_count     integer not null default 0,
  type             text,
  kind             text,
  source           text not null,
  key              text,
  position         bigint,
  payload          bytea,
  content_type     text,
  headers          json not null default '[]',
  origin           json,
  reason_code      text not null,
  error_class      text,
  error_message    text,
  fingerprint      text not null,
  attempts         integer not null default 0,
  followers_passed integer not null default 0,
  trace            text,
  copy_error       text,
  first_dead_at    timestamptz not null default towpath.clock(),
  last_dead_at     timestamptz not null default towpath.clock(),
  closed_at        timestamptz,
  unique (consumer_group, message_id)
);
create index dead_letter_open on towpath.dead_letter (consumer_group, id) where state = 'open';

-- Bodies and headers as operators corrected them; the dead letter itself keeps the original.
create table towpath.dead_letter_revision (
  dead_letter  bigint not null references towpath.dead_letter,
  revision     integer not null,
  at           timestamptz not null default towpath.clock(),
  actor        text not null,
  reason       text not null,
  payload      bytea,
  content_type text,
  headers      json not null,
  is_validated boolean not null,
  primary key (dead_letter, revision)
);

create table towpath.audit (
  id     bigint generated always as identity primary key,
  at     timestamptz not null default towpath.clock(),
  actor  text not null,
  action text not null,
  reason text not null,
  filter json not null,
  counts json not null
);

-- Producing from any language -------------------------------------------------------------------

-- A crash after an asynchronous commit could lose a row that was published already.
create function towpath.raise_synchronous_commit() returns void
  language sql volatile as
  $$ select set_config('synchronous_commit', 'on', true) where current_setting('synchronous_commit') = 'off' $$;

-- Headers as a caller writes them, an object of texts or an array of pairs, to the array of pairs
-- that is stored; an error for anything else and for the names that towpath writes itself.
create function towpath.header_pairs(headers json) returns json
  language plpgsql immutable parallel safe set search_path = pg_catalog, pg_temp as $$
declare
  pairs json := headers;
begin
  if json_typeof(headers) = 'object' then
    select coalesce(json_agg(json_build_array(h.key, h.value)), '[]') into pairs from json_each_text(headers) h;
  end if;
  if json_typeof(pairs) <> 'array' or exists (
    select from json_array_elements(pairs) h
    where case
      when json_typeof(h) <> 'array' or json_array_length(h) <> 2 then true
      when json_typeof(h -> 0) <> 'string' or (h ->> 0) !~ '^[\x20-\x7e]{1,128}$' then true
      when json_typeof(h -> 1) = 'string' or json_typeof(h -> 1 -> 'b64') = 'string'
        then (h ->> 0) ~* '^(ce_.*|towpath-.*|content-type)$'
      else true end)
  then
    raise exception 'malformed towpath headers' using errcode = 'invalid_parameter_value',
      hint = 'Write {"name": "text"} or [["name", "text"], ["name", {"b64": "..."}]]; ce_*, towpath-* and content-type are reserved.';
  end if;
  return pairs;
end $$;

-- For services in any language: an event, published at `due_at` where that is given.
create function towpath.emit(
  destination text, type text, payload bytea, key text default null,
  headers json default '[]', content_type text default 'application/json', message_id uuid default gen_random_uuid(),
  due_at timestamptz default null
) returns uuid
  language sql volatile security definer set search_path = pg_catalog, pg_temp as $$
  select towpath.raise_synchronous_commit();
  insert into towpath.outbox (shard, message_id, kind, destination, type, key, content_type, headers, payload)
    select towpath.shard(destination, key, message_id), message_id, 'event', destination, type, key, content_type,
           towpath.header_pairs(headers), payload
     where due_at is null;
  insert into towpath.scheduled (due_at, message_id, destination, type, key, content_type, headers, payload)
    select due_at, message_id, destination, type, key, content_type, towpath.header_pairs(headers), payload
     where due_at is not null;
  select message_id;
$$;

-- The row of a submitted task. A repeat of the same dedupe key returns the first; `same_body` says
-- whether it was submitted with the same payload. The caller writes the outbox row; there is none for a
-- task with `due_at`, which waits here and is started from here, now where that is past: who looks for due rows looks
-- back a little only. It comes at its deadline, to end, where
-- that is earlier.
create function towpath.accept_task(
  consumer_group text, id uuid, type text, destination text, key text, owner text, request_hash bytea,
  deadline_at timestamptz, payload bytea, content_type text, headers json, trace text,
  due_at timestamptz default null,
  out task_id uuid, out created boolean, out same_body boolean
)
  language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
begin
  perform towpath.raise_synchronous_commit();
  loop
    insert into towpath.task (consumer_group, id, type, kind, source, key, owner, request_hash, state, held_by,
                              due_at, waiting_for, deadline_at, payload, content_type, headers, trace, shard, xid)
      values (accept_task.consumer_group, accept_task.id, accept_task.type, 'task',
              coalesce((select d.address from towpath.destination d where d.name = accept_task.destination), accept_task.destination),
              accept_task.key, accept_task.owner, accept_task.request_hash,
              case when accept_task.due_at is null then 'ACCEPTED' else 'WAITING' end,
              case when accept_task.due_at is null then 'broker' else 'database' end,
              case when accept_task.due_at is not null
                then greatest(least(accept_task.due_at, accept_task.deadline_at), towpath.clock()) end,
              case when accept_task.due_at is not null then 'delay' end,
              accept_task.deadline_at, accept_task.payload, accept_task.content_type, accept_task.headers, accept_task.trace,
              towpath.shard(accept_task.destination, accept_task.key, accept_task.id), pg_current_xact_id())
      on conflict (consumer_group, owner, request_hash) where request_hash is not null do nothing;
    if found then
      task_id := accept_task.id; created := true; same_body := true;
      return;
    end if;
    select t.id, false, t.type = accept_task.type and coalesce(t.payload = accept_task.payload, true)
      into task_id, created, same_body
      from towpath.task t
      where t.consumer_group = accept_task.consumer_group and t.owner = accept_task.owner
        and t.request_hash = accept_task.request_hash;
    if found then
      return;
    end if;
    -- The first one expired between the two statements.
  end loop;
end $$;

-- For services in any language: a task for a consumer group. The same dedupe key again, for one owner, gives the
-- first task with `created` false; with another payload it is an error. With `due_at` it starts then.
create function towpath.submit_task(
  consumer_group text, type text, payload bytea, key text default null, owner text default '',
  dedupe_key text default null, deadline_at timestamptz default null, due_at timestamptz default null,
  headers json default '[]', content_type text default 'application/json', destination text default null,
  message_id uuid default gen_random_uuid(),
  out task_id uuid, out created boolean
)
  language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as $$
declare
  pairs json := towpath.header_pairs(headers);
  address text := coalesce(submit_task.destination, 'tasks.' || submit_task.consumer_group);
  same_body boolean;
begin
  select a.task_id, a.created, a.same_body into submit_task.task_id, submit_task.created, same_body
    from towpath.accept_task(
      submit_task.consumer_group, submit_task.message_id, submit_task.type, address, submit_task.key, submit_task.owner,
      sha256(convert_to(submit_task.type, 'UTF8') || '\x006b657900' || convert_to(submit_task.dedupe_key, 'UTF8')),
      submit_task.deadline_at, submit_task.payload, submit_task.content_type, pairs,
      (select h ->> 1 from json_array_elements(pairs) h where lower(h ->> 0) = 'traceparent' limit 1),
      submit_task.due_at) a;
  if not same_body then
    raise exception '% was submitted before under this dedupe key with another payload, as task %', submit_task.type,
      submit_task.task_id using errcode = 'unique_violation', hint = 'Use another dedupe key for another task.';
  end if;
  if submit_task.created and submit_task.due_at is null then
    insert into towpath.outbox (shard, message_id, kind, destination, type, key, content_type, headers)
      values (towpath.shard(address, submit_task.key, submit_task.task_id), submit_task.task_id, 'task', address,
              submit_task.type, submit_task.key, submit_task.content_type, pairs);
  end if;
end $$;

-- Cancel a task: what has not begun ends CANCELLED at once, and its lane goes on; what is running is
-- asked to stop and ends by itself. Returns the state afterwards, null when there is no such task.
-- Lock order: the lane's gate, then the task.
create function towpath.cancel_task(consumer_group text, id uuid, actor text default null) returns text
  language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
  seen record;
  head uuid;
  follower uuid;
begin
  loop
    select t.state, t.version, t.source, t.lane, t.attempt, t.run_no into seen from towpath.task t
      where t.consumer_group = cancel_task.consumer_group and t.id = cancel_task.id;
    if not found then
      return null;
    elsif seen.state = 'RUNNING' then
      update towpath.task t set cancel_requested = true, updated_at = towpath.clock()
        where t.consumer_group = cancel_task.consumer_group and t.id = cancel_task.id
          and t.version = seen.version and t.state = 'RUNNING';
    elsif seen.state in ('ACCEPTED', 'WAITING', 'PARKED') then
      head := null;
      if seen.lane is not null then
        select g.head into head from towpath.key_gate g
          where g.consumer_group = cancel_task.consumer_group and g.source = seen.source and g.lane = seen.lane
          for update;
      end if;
      update towpath.task t
        set state = 'CANCELLED', due_at = null, waiting_for = null, cancel_requested = true, reason_code = 'cancelled',
            version = t.version + 1, updated_at = towpath.clock(), finished_at = towpath.clock()
        where t.consumer_group = cancel_task.consumer_group and t.id = cancel_task.id
          and t.version = seen.version and t.state = seen.state;
    else
      return seen.state;
    end if;
    exit when found;
  end loop;
  if seen.state = 'RUNNING' then
    return seen.state;
  end if;
  insert into towpath.task_event (consumer_group, task_id, event, from_state, to_state, version, attempt, run_no,
                                  reason_code, actor)
    values (cancel_task.consumer_group, cancel_task.id, 'task.cancelled', seen.state, 'CANCELLED', seen.version + 1,
            seen.attempt, seen.run_no, 'cancelled', cancel_task.actor);
  if head = cancel_task.id then
    select t.id into follower from towpath.task t
      where t.consumer_group = cancel_task.consumer_group and t.source = seen.source and t.lane = seen.lane
        and t.state = 'PARKED'
      order by t.position nulls first, t.id limit 1;
    if found then
      update towpath.key_gate g set head = follower
        where g.consumer_group = cancel_task.consumer_group and g.source = seen.source and g.lane = seen.lane;
      update towpath.task t
        set state = 'WAITING', due_at = towpath.clock(), waiting_for = 'promoted', version = t.version + 1,
            updated_at = towpath.clock()
        where t.consumer_group = cancel_task.consumer_group and t.id = follower and t.state = 'PARKED';
    else
      delete from towpath.key_gate g
        where g.consumer_group = cancel_task.consumer_group and g.source = seen.source and g.lane = seen.lane;
    end if;
  end if;
  return 'CANCELLED';
end $$;
