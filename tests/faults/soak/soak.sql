-- A ring that turns within minutes, and copies of what retention deletes for the checker.

create or replace function towpath.rotate_seconds() returns integer
  language sql immutable parallel safe as $$ select 60 $$;

create function public.keep_task() returns trigger language plpgsql as $$
begin
  insert into public.kept_task values (old.id, old.state, old.waiting_for, old.reason_code);
  return null;
end $$;
create trigger keep_task after delete on towpath.task for each row execute function public.keep_task();

create function public.keep_event() returns trigger language plpgsql as $$
begin
  insert into public.kept_event values 
    (old.seq, old.task_id, old.event, old.to_state, old.reason_code, old.attempt);
  return null;
end $$;
create trigger keep_event after delete on towpath.task_event for each row execute function public.keep_event();
