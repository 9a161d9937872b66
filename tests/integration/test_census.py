"""What metrics say of a group's waiting work, compared with the rows."""

import asyncio
from contextlib import suppress

import asyncpg
import pytest

from tests.integration.engine import until
from towpath.consumer.census import CensusLoop
from towpath.consumer.upkeep import StoreWatch
from towpath.store.census import CensusStore
from towpath.store.database import Database
from towpath.telemetry.metrics import Telemetry
from towpath.telemetry.names import Metric

ROWS = """
insert into towpath.worker (id, consumer_group, host, lease_until)
  values ('00000000-0000-0000-0000-000000000001', 'depot', 'h', clock_timestamp() + interval '1 hour');
insert into towpath.task (consumer_group, id, type, kind, source, state, held_by, worker, token,
                          due_at, waiting_for, started_at, finished_at)
  select 'depot', gen_random_uuid(), 't', kind, 's', state, 'database',
         case state when 'RUNNING' then uuid '00000000-0000-0000-0000-000000000001' end,
         case state when 'RUNNING' then gen_random_uuid() end,
         case state when 'WAITING' then clock_timestamp() + due end,
         case state when 'WAITING' then 'retry' end,
         case state when 'RUNNING' then clock_timestamp() - interval '20 minutes' * n end,
         case state when 'SUCCEEDED' then clock_timestamp() end
    from (values ('ACCEPTED', 'task', 1, null), ('RUNNING', 'task', 2, null),
                 ('WAITING', 'event', 3, interval '1 hour'), ('WAITING', 'event', 2, interval '-10 minutes'),
                 ('PARKED', 'event', 4, null), ('UNKNOWN', 'task', 5, null), ('SUCCEEDED', 'task', 6, null))
         x(state, kind, count, due)
         cross join lateral generate_series(1, count) n;
insert into towpath.dead_letter (consumer_group, message_id, stage, state, source, reason_code, fingerprint)
  select 'depot', gen_random_uuid(), 'handle', state, 's', 'r', 'f'
    from unnest('{open,open,replayed}'::text[]) state;
"""


class Recorded(Telemetry):
    """Keeps the present values of gauges."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, str | None], float] = {}
        self.groups = set[str | None]()

    def set(self, metric: Metric, value: float, /, **labels: str | None) -> None:
        self.values[metric.name, labels.get("state")] = value
        self.groups.add(labels["group"])


async def test_a_member_reports_what_waits_runs_and_is_dead_in_its_group(migrated_url: str) -> None:
    """O5"""
    connection = await asyncpg.connect(migrated_url)
    await connection.execute(ROWS)
    await connection.execute(ROWS.replace("depot", "other").replace("0001", "0002"))
    await connection.close()
    database = Database(migrated_url, pool_size=1)
    await database.start()
    telemetry = Recorded()
    loop = CensusLoop(
        "depot",
        store=CensusStore(database, "depot"),
        watch=StoreWatch("depot"),
        telemetry=telemetry,
        on_progress=lambda _: None,
    )
    looking = asyncio.create_task(loop.run())
    await until(lambda: ("towpath.dead_letters.open", None) in telemetry.values)
    looking.cancel()
    with suppress(asyncio.CancelledError):
        await looking
    await database.aclose()

    ages = {
        name: telemetry.values.pop((f"towpath.tasks.{name}.age", None))
        for name in ("oldest_due", "oldest_running")
    }
    assert ages["oldest_due"] == pytest.approx(600, abs=120)
    assert ages["oldest_running"] == pytest.approx(2400, abs=120)
    states = {"ACCEPTED": 1, "RUNNING": 2, "WAITING": 5, "PARKED": 4, "UNKNOWN": 5}
    expected = {("towpath.tasks.open", state): count for state, count in states.items()}
    assert telemetry.values == expected | {
        ("towpath.tasks.due", None): 2,
        ("towpath.dead_letters.open", None): 2,
    }
    assert telemetry.groups == {"depot"}
