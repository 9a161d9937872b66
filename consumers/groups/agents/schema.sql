-- The business tables of the `agents` group.

-- What agents achieved. A message has one row; nothing but the framework's promise makes that so,
-- therefore a doubled effect shows as a second row and not as an error.
create table if not exists agent_effect (
  id          bigint generated always as identity primary key,
  message_id  uuid not null,
  agent_id    text not null,
  step        integer not null,
  kind        text not null check (kind in ('model_call', 'retrieval', 'tool_call')),
  result      text not null,
  attempt     integer not null,
  recorded_at timestamptz not null default clock_timestamp()
);
create index if not exists agent_effect_message on agent_effect (message_id);
create index if not exists agent_effect_agent on agent_effect (agent_id, id);

-- The providers' side: whether each is up (no row: it is), what is wrong with its every answer, and
-- the calls it saw by idempotency key.
create table if not exists provider_status (
  provider   text primary key,
  is_up      boolean not null default true,
  fault      text,
  changed_at timestamptz not null default clock_timestamp()
);
create table if not exists provider_call (
  idempotency_key text primary key,
  provider        text not null,
  calls           integer not null default 1,
  first_at        timestamptz not null default clock_timestamp(),
  last_at         timestamptz not null default clock_timestamp()
);
