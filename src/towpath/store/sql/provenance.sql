-- Where a database is published from and to. Index: primary keys throughout.

-- name: recognise
-- What stands at broker $1; cluster $2 and home $3 where nothing stands yet. Locks the row only to write.
with noted as (
  update towpath.broker b set cluster = coalesce(b.cluster, $2), home = coalesce(b.home, $3)
  where b.number = $1 and ((b.cluster is null and $2::text is not null) or b.home is null)
  returning b.cluster, b.home
)
select n.cluster, n.home from noted n
union all
select b.cluster, b.home from towpath.broker b where b.number = $1 and not exists (select from noted)

-- name: forget
-- Every broker as it was known, and known no more.
with known as materialized (
  select b.number, b.name, b.cluster, b.home from towpath.broker b order by b.number for update
), gone as (
  update towpath.broker b set cluster = null, home = null from known k where k.number = b.number
)
select k.name, k.cluster, k.home from known k

-- name: keep_partitions
-- Counts $3 of addresses $2 at broker $1; one that is there stays and is returned.
insert into towpath.partitioning as p (broker, address, partitions)
select $1, x.address, x.count from unnest($2::text[], $3::integer[]) x(address, count) order by x.address
on conflict (broker, address) do update set partitions = p.partitions
returning address, partitions

-- name: kept_partitions
select p.address, p.partitions from towpath.partitioning p where p.broker = $1 and p.address = any($2::text[])

-- name: live_leases
-- Whether a relay is at work. Locks the leases: none is taken before the end of the transaction.
select count(*) from (select l.* from towpath.shard_lease l order by l.shard for update) l
where l.relay is not null and l.lease_until > towpath.clock()

-- name: roll_over
-- Count $3 for address $2 at broker $1; returns the old one.
with before as materialized (
  select p.partitions from towpath.partitioning p where p.broker = $1 and p.address = $2 for update
), changed as (
  update towpath.partitioning p set partitions = $3 where p.broker = $1 and p.address = $2
)
select b.partitions from before b
