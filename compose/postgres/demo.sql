-- The demo's producer: it writes its own tables and messages, nothing else. Run after examples/demo/business.sql.
do $$ begin create role shop login password 'shop'; exception when duplicate_object then null; end $$;
grant towpath_producer to shop;
grant select, insert, update on shop_agent, shop_order to shop;
