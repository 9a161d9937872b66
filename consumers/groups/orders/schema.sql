-- The business tables of the `orders` group.

create table if not exists order_projection (
  order_id text primary key,
  position integer not null,
  status   text not null,
  amount   integer not null
);

-- One row per applied event; nothing but the framework's promise makes that so, therefore a doubled
-- or overtaken event shows in the rows.
create table if not exists order_effect (
  id          bigint generated always as identity primary key,
  message_id  uuid not null,
  order_id    text not null,
  position    integer not null,
  recorded_at timestamptz not null default clock_timestamp()
);
create index if not exists order_effect_message on order_effect (message_id);
create index if not exists order_effect_order on order_effect (order_id, id);

create table if not exists invoice (
  id          bigint generated always as identity primary key,
  message_id  uuid not null,
  order_id    text not null,
  amount      integer not null,
  recorded_at timestamptz not null default clock_timestamp()
);
create index if not exists invoice_order on invoice (order_id);
