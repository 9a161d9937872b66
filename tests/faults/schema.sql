-- The business side of the fault suite; `aggregate` comes with the acceptance tests' schema.

-- A transaction that is here was committed, whatever its producer was told.
create table deed (
  transaction text primary key
);

-- No unique constraint: a doubled effect must be able to show.
create table done (
  id   uuid not null,
  kind text not null,
  at   bigint not null -- boot-time clock of the handler, ns
);

-- What a group's retention deletes, where a run is long enough for that.
create table kept_task (
  id          uuid not null,
  state       text not null,
  waiting_for text,
  reason_code text
);
create table kept_event (
  seq      bigint not null,
  task_id  uuid not null,
  event    text not null,
  to_state text,
  reason_code text,
  attempt  integer
);
