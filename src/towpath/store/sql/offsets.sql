-- How far consumer groups have read at brokers that keep offsets for them. One row per partition, so every
-- statement is a few primary-key lookups.

-- name: note_offsets
-- What changed since the last beat, in one statement. Locks the rows in order; index: primary key.
insert into towpath.group_offset as o (consumer_group, address, partition, position, refused)
select $1, x.address, x.partition, x.position, x.refused
  from unnest($2::text[], $3::integer[], $4::bigint[], $5::text[]) x(address, partition, position, refused)
 order by x.address, x.partition
on conflict (consumer_group, address, partition) do update
   set position = coalesce(excluded.position, o.position), refused = excluded.refused, updated_at = towpath.clock()

-- name: take_bookmarks
-- What is noted of these partitions; a person's word becomes the position and is gone. Index: primary key.
with taken as (
  update towpath.group_offset o set position = o.resume_from, resume_from = null, updated_at = towpath.clock()
   where o.consumer_group = $1 and (o.address, o.partition) in (select * from unnest($2::text[], $3::integer[]))
     and o.resume_from is not null
  returning o.address, o.partition, o.position
)
select o.address, o.partition, o.position, t.position as word
  from towpath.group_offset o left join taken t on t.address = o.address and t.partition = o.partition
 where o.consumer_group = $1 and (o.address, o.partition) in (select * from unnest($2::text[], $3::integer[]))

-- name: list_offsets
-- Of groups $1 and addresses $2 (each null: any).
select o.consumer_group, o.address as topic, o.partition, o.position, o.refused, o.resume_from, o.updated_at
  from towpath.group_offset o
 where ($1::text[] is null or o.consumer_group = any($1)) and ($2::text[] is null or o.address = any($2))
 order by o.consumer_group, o.address, o.partition

-- name: give_word
-- Where a group goes on in one partition, unless a member has read there meanwhile. Index: primary key.
insert into towpath.group_offset as o (consumer_group, address, partition, resume_from) values ($1, $2, $3, $4)
on conflict (consumer_group, address, partition) do update set resume_from = excluded.resume_from
 where o.refused is not null or o.position is null
returning 1
