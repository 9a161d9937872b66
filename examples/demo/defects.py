"""Broken promises to plant before the check, to see that it finds them. Each is one statement."""

from collections.abc import Mapping
from typing import Final

DEFECTS: Final[Mapping[str, str]] = {
    "lost_message": """
        with lost as (
          delete from agent_effect where id = (select min(id) from agent_effect) returning message_id)
        delete from towpath.task t using lost where t.id = lost.message_id
    """,
    "lost_effect": "delete from order_effect where id = (select min(id) from order_effect)",
    "doubled_effect": """
        insert into order_effect (message_id, order_id, position)
        select message_id, order_id, position from order_effect order by id limit 1
    """,
    "doubled_invoice": """
        insert into invoice (message_id, order_id, amount)
        select gen_random_uuid(), order_id, amount from invoice order by id limit 1
    """,
    "order_inversion": """
        with pair as (
          select a.id as first, b.id as second, a.message_id as of_first, b.message_id as of_second
          from order_effect a join order_effect b on b.order_id = a.order_id and b.id > a.id
          order by a.id, b.id limit 1)
        update order_effect e set message_id = case e.id when p.first then p.of_second else p.of_first end
        from pair p where e.id in (p.first, p.second)
    """,
    "task_without_end": """
        update towpath.task set state = 'WAITING', waiting_for = 'retry', due_at = clock_timestamp() + '1h',
          held_by = 'database', finished_at = null
        where (consumer_group, id) = (
          select consumer_group, id from towpath.task where state = 'SUCCEEDED' order by id limit 1)
    """,
    "wrong_end": """
        update towpath.task set state = 'SUCCEEDED'
        where (consumer_group, id) = (
          select consumer_group, id from towpath.task where state = 'FAILED' order by id limit 1)
    """,
    "task_that_nobody_committed": """
        insert into towpath.task (consumer_group, id, type, kind, source, state, held_by, finished_at)
        values ('agents', gen_random_uuid(), 'agent.model_call', 'task', 'tasks.agents', 'SUCCEEDED',
                'broker', clock_timestamp())
    """,
    "effect_that_nobody_committed": """
        insert into order_effect (message_id, order_id, position) values (gen_random_uuid(), 'order-00', 99)
    """,
    "dead_letter_left_open": "update towpath.dead_letter set state = 'open', closed_at = null",
    "business_row_without_message": "update shop_order set steps = steps + 1 where order_id = 'order-00'",
}
"""By name; meant for a database where a whole demo has run."""
