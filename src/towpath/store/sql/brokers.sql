-- Brokers, as the owner of the schema adds them.

-- name: lock_brokers
-- One is added at a time.
select from towpath.broker b order by b.number for update

-- name: add_broker
-- Broker $1 under the next number, with shards that nobody holds and a journal that begins now. Never in
-- a savepoint: the journal row's xid is the transaction's. Nothing where the name is taken.
with added as (
  insert into towpath.broker (number, name) select max(b.number) + 1, $1 from towpath.broker b
  on conflict (name) do nothing returning number
), own as (
  select (a.number * towpath.shards_per_broker() + n)::smallint as shard
  from added a, generate_series(0, towpath.shards_per_broker() - 1) n
), leases as (
  insert into towpath.shard_lease (shard) select o.shard from own o
), journal as (
  insert into towpath.journal (shards, epochs, last_ids, snapshot_from, snapshot_to)
  select array_agg(o.shard order by o.shard), array_agg(0::bigint), array_agg(null::bigint),
         pg_current_snapshot(), pg_current_snapshot()
  from own o having count(*) > 0
)
select a.number from added a
