-- Least-privilege roles. Run by the owner of the schema towpath, after every upgrade; repeating it changes nothing.
-- Each is a group without login, to be granted to the login of a service: `grant towpath_producer to shop;`
--
--   towpath_producer   writes messages, submits and cancels tasks; reads, changes and deletes nothing itself
--   towpath_reader     reads tasks: state, progress, result
--   towpath_relay      publishes: reads the outbox, keeps its progress, moves due events into the outbox;
--                      does not see tasks
--   towpath_worker     consumer groups: tasks and dead letters; also a producer
--   towpath_operator   looks, cancels, replays: what the command line does; also a producer
--
-- No role owns anything, nor may it create, alter or drop.

do $$ begin create role towpath_producer nologin; exception when duplicate_object or unique_violation then null; end $$;
do $$ begin create role towpath_reader nologin; exception when duplicate_object or unique_violation then null; end $$;
do $$ begin create role towpath_relay nologin; exception when duplicate_object or unique_violation then null; end $$;
do $$ begin create role towpath_worker nologin; exception when duplicate_object or unique_violation then null; end $$;
do $$ begin create role towpath_operator nologin; exception when duplicate_object or unique_violation then null; end $$;

-- Some functions run with the owner's rights: they are granted one by one.
revoke all on schema towpath from public;
revoke execute on all functions in schema towpath from public;

grant usage on schema towpath to towpath_producer, towpath_reader, towpath_relay, towpath_worker, towpath_operator;
grant execute on function
  towpath.clock(), towpath.shards_per_broker(), towpath.ring_slots(), towpath.rotate_seconds(), towpath.ring_slot(),
  towpath.key_hash(text, uuid)
  to towpath_producer, towpath_reader, towpath_relay, towpath_worker, towpath_operator;
grant select on towpath.meta, towpath.broker, towpath.destination
  to towpath_relay, towpath_worker, towpath_operator;

-- Slot, xid and id are not a producer's to give: a row that carried another transaction's xid would never be seen.
grant select on towpath.destination to towpath_producer;
grant select on sequence towpath.relays_asleep_until to towpath_producer;
grant insert (shard, message_id, kind, destination, type, key, content_type, headers, payload)
  on towpath.outbox to towpath_producer;
grant insert (due_at, message_id, destination, type, key, content_type, headers, payload)
  on towpath.scheduled to towpath_producer;
grant execute on function
  towpath.shard(text, text, uuid), towpath.raise_synchronous_commit(), towpath.header_pairs(json),
  towpath.emit(text, text, bytea, text, json, text, uuid, timestamptz),
  towpath.submit_task(text, text, bytea, text, text, text, timestamptz, timestamptz, json, text, text, uuid),
  towpath.accept_task(text, uuid, text, text, text, text, bytea, timestamptz, bytea, text, json, text, timestamptz),
  towpath.cancel_task(text, uuid, text)
  to towpath_producer;

grant select on towpath.task, towpath.task_event to towpath_reader;

-- Catalog rows only of the stage where publishing failed.
grant select on towpath.outbox, towpath.shard_progress to towpath_relay;
-- What it publishes to, where nothing is known of it yet.
grant update (cluster, home) on towpath.broker to towpath_relay;
grant select, insert, update on towpath.partitioning to towpath_relay;
grant select, insert, update on towpath.canary to towpath_relay;
-- Clearing the ring, leaf by leaf.
grant select, delete, truncate on towpath.outbox_0, towpath.outbox_1, towpath.outbox_2, towpath.outbox_3
  to towpath_relay;
grant select, insert, update, delete on towpath.journal to towpath_relay;
grant select, update on towpath.shard_lease to towpath_relay;
grant select, insert, update, delete on towpath.relay to towpath_relay;
grant select, insert, update on towpath.dead_letter to towpath_relay;
grant select, insert, update, delete on towpath.publish_gate, towpath.parked_message to towpath_relay;
-- Where it must not publish for now.
grant select on towpath.pause to towpath_relay;
-- Events for later become outbox rows when due.
grant select, delete on towpath.scheduled to towpath_relay;
grant select, insert, delete on towpath.scheduled_progress to towpath_relay;
grant insert (shard, message_id, kind, destination, type, key, content_type, headers, payload)
  on towpath.outbox to towpath_relay;
grant execute on function towpath.shard(text, text, uuid), towpath.raise_synchronous_commit() to towpath_relay;
-- Asking to be notified while it sleeps; how fast rows come tells whether that would be dear.
grant select, update on sequence towpath.relays_asleep_until to towpath_relay;
grant select on sequence towpath.outbox_id_seq to towpath_relay;

grant towpath_producer to towpath_worker;
grant select, insert, update, delete on towpath.task, towpath.key_gate, towpath.worker to towpath_worker;
grant select, insert, update on towpath.consumer_group to towpath_worker;
-- History is written, and forgotten with its task; never changed.
grant select, insert, delete on towpath.task_event to towpath_worker;
grant select, insert, update on towpath.dead_letter to towpath_worker;
grant select on towpath.shard_progress, towpath.parked_message, towpath.pause to towpath_worker;
grant select, insert, update on towpath.group_offset to towpath_worker;
-- A delayed task is numbered when it is due.
grant usage on sequence towpath.outbox_id_seq to towpath_worker;

grant towpath_producer to towpath_operator;
grant select on all tables in schema towpath to towpath_operator;
grant update on towpath.task, towpath.dead_letter, towpath.publish_gate to towpath_operator;
grant insert on towpath.parked_message to towpath_operator;
grant insert, update, delete on towpath.key_gate to towpath_operator;
grant insert on towpath.task_event, towpath.dead_letter_revision to towpath_operator;
-- Dead letters that were exported and are missing.
grant insert on towpath.task, towpath.dead_letter to towpath_operator;
grant insert, update on towpath.audit, towpath.group_offset, towpath.consumer_group, towpath.pause to towpath_operator;
grant insert, update, delete on towpath.destination to towpath_operator;
grant update (cluster, home) on towpath.broker to towpath_operator;
grant update on towpath.partitioning to towpath_operator;
grant select on sequence towpath.relays_asleep_until to towpath_operator;
-- To lock them while no relay may run.
grant update (lease_until) on towpath.shard_lease to towpath_operator;
