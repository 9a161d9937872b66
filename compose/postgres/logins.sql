-- A login for each process of the compose file, with the least that it needs. Run after `towpath db roles`.
do $$ begin create role relay login password 'relay'; exception when duplicate_object then null; end $$;
do $$ begin create role worker login password 'worker'; exception when duplicate_object then null; end $$;
do $$ begin create role operator login password 'operator'; exception when duplicate_object then null; end $$;
grant towpath_relay to relay;
grant towpath_worker to worker;
grant towpath_operator to operator;

-- What the handlers of the groups write: their own tables.
grant select, insert, update, delete on
  order_projection, order_effect, invoice, agent_effect, provider_call, provider_status to worker;
grant usage on all sequences in schema public to worker;
