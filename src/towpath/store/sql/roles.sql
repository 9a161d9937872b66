-- Least-privilege roles of towpath. Run by the owner of the schema or a superuser, after every upgrade; safe to
-- repeat. Grant a service's login the role it needs: grant towpath_producer to shop; No role owns anything.

do $$ begin create role towpath_producer nologin; exception when duplicate_object then null; end $$;
do $$ begin create role towpath_relay nologin; exception when duplicate_object then null; end $$;
do $$ begin create role towpath_worker nologin; exception when duplicate_object then null; end $$;
do $$ begin create role towpath_operator nologin; exception when duplicate_object then null; end $$;
do $$ begin create role towpath_reader nologin; exception when duplicate_object then null; end $$;

grant usage on schema towpath to towpath_producer, towpath_relay, towpath_worker, towpath_operator, towpath_reader;
grant select on towpath.meta, towpath.destination
  to towpath_producer, towpath_relay, towpath_worker, towpath_operator, towpath_reader;

-- Whoever emits: writes messages, never sees them again. Slot, xid and id are not theirs to give: a row that carried
-- another transaction's xid would never be seen.
grant insert (shard, message_id, kind, destination, type, key, content_type, headers, payload) on towpath.outbox
  to towpath_producer, towpath_worker, towpath_operator;

-- The relay: reads the outbox, keeps leases and journal, buries what the broker refuses. Never touches tasks.
grant select on towpath.outbox, towpath.broker, towpath.journal, towpath.shard_progress, towpath.relay,
  towpath.shard_lease, towpath.dead_letter to towpath_relay;
grant insert, delete on towpath.journal to towpath_relay;
grant insert, update, delete on towpath.relay to towpath_relay;
grant update on towpath.shard_lease to towpath_relay;
grant insert, update on towpath.dead_letter to towpath_relay;

-- Consumer groups: their tasks, gates and leases.
grant select on towpath.task, towpath.task_event, towpath.key_gate, towpath.worker, towpath.dead_letter,
  towpath.shard_progress to towpath_worker;
grant insert, update, delete on towpath.task, towpath.key_gate, towpath.worker to towpath_worker;
grant insert on towpath.task_event to towpath_worker;
grant insert, update on towpath.dead_letter to towpath_worker;

-- People at the command line.
grant select on all tables in schema towpath to towpath_operator, towpath_reader;
grant update on towpath.task to towpath_operator;
grant insert on towpath.task_event to towpath_operator;
grant insert, update, delete on towpath.key_gate to towpath_operator;
grant update on towpath.dead_letter to towpath_operator;
grant insert, update on towpath.audit to towpath_operator;
