-- The tables of the producing service. A writer locks the row of its agent or order first, so steps
-- are numbered in commit order and a transaction that rolls back leaves no gap.
create table if not exists shop_agent (
  agent_id text primary key,
  steps    integer not null default 0
);
create table if not exists shop_order (
  order_id text primary key,
  steps    integer not null default 0
);
