-- The catalog of one schema as (name, json value) pairs; read by `towpath db check` only. $1 is the schema.
-- Rows are few and no lock beyond the catalog's own is taken.

-- name: relations
select c.relname as name,
  json_strip_nulls(json_build_object(
    'kind', case c.relkind when 'r' then 'table' when 'p' then 'partitioned table' when 'v' then 'view'
                           when 'm' then 'materialized view' when 'S' then 'sequence' else c.relkind::text end,
    'partition', nullif(concat_ws(' ', pg_get_partkeydef(c.oid), pg_get_expr(c.relpartbound, c.oid)), ''),
    'options', c.reloptions
  )) as value
from pg_class c
where c.relnamespace = to_regnamespace($1) and c.relkind in ('r', 'p', 'v', 'm', 'f', 'S');

-- name: columns
select c.relname || '.' || a.attname as name,
  json_strip_nulls(json_build_object(
    'type', format_type(a.atttypid, a.atttypmod),
    'not_null', a.attnotnull,
    'default', pg_get_expr(d.adbin, d.adrelid),
    'identity', nullif(a.attidentity::text, ''),
    'generated', nullif(a.attgenerated::text, '')
  )) as value
from pg_class c join pg_attribute a on a.attrelid = c.oid
  left join pg_attrdef d on d.adrelid = c.oid and d.adnum = a.attnum
where c.relnamespace = to_regnamespace($1) and c.relkind in ('r', 'p', 'v', 'm', 'f')
  and a.attnum > 0 and not a.attisdropped;

-- name: constraints
select c.relname || '.' || k.conname as name, to_json(pg_get_constraintdef(k.oid)) as value
from pg_constraint k join pg_class c on c.oid = k.conrelid
where c.relnamespace = to_regnamespace($1) and k.contype <> 'n';

-- name: indexes
select i.relname as name, to_json(pg_get_indexdef(i.oid)) as value
from pg_class i join pg_index x on x.indexrelid = i.oid
where i.relnamespace = to_regnamespace($1) and x.indisvalid;

-- name: functions
select format('%s(%s)', p.proname, pg_get_function_identity_arguments(p.oid)) as name,
  json_strip_nulls(json_build_object(
    'returns', pg_get_function_result(p.oid),
    'volatility', p.provolatile::text,
    'parallel', p.proparallel::text,
    'security_definer', p.prosecdef,
    'settings', p.proconfig,
    'body', regexp_replace(btrim(p.prosrc, E' \n'), '\s+', ' ', 'g')
  )) as value
from pg_proc p where p.pronamespace = to_regnamespace($1);

-- name: triggers
select c.relname || '.' || t.tgname as name, to_json(pg_get_triggerdef(t.oid)) as value
from pg_trigger t join pg_class c on c.oid = t.tgrelid
where c.relnamespace = to_regnamespace($1) and not t.tgisinternal;
