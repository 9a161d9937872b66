-- The business side of the scripted consumer group.

create table aggregate (
  key text primary key,
  n   integer not null default 0
);

-- No unique constraint: a doubled effect must be able to show.
create table effect (
  seq        bigint generated always as identity primary key,
  message_id uuid not null,
  handler    text not null,
  key        text not null,
  n          integer not null,
  attempt    integer not null
);

-- What left the process, committed at once: an outside system's view of us.
create table outside_call (
  seq             bigint generated always as identity primary key,
  message_id      uuid not null,
  idempotency_key text not null,
  attempt         integer not null,
  at              timestamptz not null default clock_timestamp()
);

-- While a row stands here, messages that are told so fail.
create table cause (
  name text primary key
);
