"""Machines whose wall clock is an hour off the database's: the database's is the only one that counts."""

from datetime import datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import text

from tests.integration.engine import EFFECTS, Posted, Weigh, bench, depot, effects
from tests.integration.test_delayed_tasks import delayed
from tests.integration.test_effects import write
from tests.integration.test_worker_pauses import beats
from towpath import Retry, RetryPolicy, Snooze, Tx

_CLOCK = text("select towpath.clock()")


@pytest.mark.parametrize("ahead", [timedelta(hours=1), timedelta(hours=-1)])
async def test_work_goes_by_the_clock_of_the_database_alone(migrated_url: str, ahead: timedelta) -> None:
    """C4, C8, C12: leases hold, and what is delayed, tried again, snoozed or has a deadline is on time."""
    app = depot(retry=RetryPolicy(attempts=3, base="300ms", cap="300ms"))
    starts = dict[Any, list[datetime]]()

    @app.transactional()
    async def sort(parcel: Posted, tx: Tx) -> None:
        begun = starts.setdefault(tx.message_id, [])
        begun.append((await tx.session.execute(_CLOCK)).scalar_one())
        if len(begun) == 1:
            raise Snooze("300ms") if parcel.number else Retry("not_yet", after="300ms")
        await write(tx, parcel)

    @app.transactional()
    async def weigh(task: Weigh, tx: Tx) -> None:
        starts[tx.message_id] = [(await tx.session.execute(_CLOCK)).scalar_one()]
        await write(tx, task)

    async with bench(app, migrated_url) as engine:
        await engine.db.execute(EFFECTS)
        await engine.db.execute(
            "create or replace function towpath.clock() returns timestamptz language sql volatile as"
            f" $$ select clock_timestamp() + interval '{ahead.total_seconds()} seconds' $$"
        )
        async with engine.member(), engine.member():
            retried = await engine.publish(Posted("a", 0))
            snoozed = await engine.publish(Posted("b", 1))
            late = (await delayed(engine.db, Weigh("c", 2), "300ms")).id
            due = (await engine.row(late))["due_at"]
            in_time = await engine.submit(Weigh("d", 3))
            await engine.db.execute(
                "update towpath.task set deadline_at = towpath.clock() + interval '10 minutes' where id = $1",
                in_time,
            )
            for id_ in (retried, snoozed, late, in_time):
                await engine.reaches(id_, "SUCCEEDED")
            await beats(engine)
            now = await engine.db.fetchval("select towpath.clock()")
            members = await engine.db.fetch("select started_at, lease_until from towpath.worker")
        for id_ in (retried, snoozed):
            (event,) = await engine.events(id_)
            first, second = starts[id_]
            assert first + timedelta(milliseconds=300) <= event["due_at"] <= second
        assert due <= starts[late][0]
        assert all(abs(at[-1] - now) < timedelta(minutes=10) for at in starts.values())
        assert len(members) == 2, "a lease lapsed, or its worker began anew"
        assert all(member["lease_until"] > now for member in members)
        assert sorted(await effects(engine)) == [("a", 0), ("b", 1), ("c", 2), ("d", 3)]
