-- Any language: the functions are called in the transaction of the change.
--
--   psql -v ON_ERROR_STOP=1 -v order=o-1 -v amount=5 -v traceparent=00-…-01 -f place_order.sql
\set QUIET on
\if :{?traceparent}
\else
  \set traceparent ''
\endif
begin;
select json_build_object('order_id', :'order', 'amount', (:'amount')::integer) as body,
       json_strip_nulls(json_build_object('traceparent', nullif(:'traceparent', ''))) as headers \gset
insert into shop_order values (:'order', (:'amount')::integer);
select towpath.emit('orders', 'order.placed', convert_to(:'body', 'UTF8'),
                    key => :'order', headers => :'headers') as event \gset
select task_id, created
  from towpath.submit_task('billing', 'payment.charge', convert_to(:'body', 'UTF8'),
                           key => :'order', dedupe_key => :'order', headers => :'headers') \gset
commit;
\echo :task_id
