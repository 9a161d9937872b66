-- Of the services without migrations of their own.
create table if not exists shop_order (id text primary key, amount integer not null check (amount > 0));
-- Of the group.
create table if not exists shop_payment (order_id text not null, amount integer not null, told_by text not null);
