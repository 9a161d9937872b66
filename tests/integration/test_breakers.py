"""A dependency that is away for everybody is probed by one message at a time, and nothing is spent."""

import time
from datetime import timedelta
from itertools import pairwise

from tests.integration.engine import Engine, Note, Posted, depot, running, until
from towpath import App, Call, Retry, RetryPolicy, Snooze
from towpath.consumer import breakers


class Warehouse:
    """An outside system that answers only when it is open."""

    def __init__(self) -> None:
        self.is_open = False
        self.calls: list[float] = []
        """When."""

    def app(self) -> App:
        app = depot(retry=RetryPolicy(attempts=3, base="5ms", cap="20ms"), ordering="none")

        @app.idempotent(dependency="warehouse")
        async def store(posted: Posted, call: Call) -> None:
            self.calls.append(time.monotonic())
            if not self.is_open:
                raise ConnectionError("closed")

        @app.idempotent()
        async def note(left: Note, call: Call) -> None: ...

        return app


def _is_probing(calls: list[float]) -> bool:
    return all(later - earlier >= 0.99 for earlier, later in pairwise(calls))


async def test_an_outage_of_a_dependency_kills_nothing_and_other_handlers_go_on(
    migrated_url: str,
) -> None:
    """C14: 60 messages with three attempts each outlast it; meanwhile one at a time asks, once a second.

    None of them stays at the broker, where it would hold back what is acknowledged behind it.
    """
    warehouse = Warehouse()
    async with running(warehouse.app(), migrated_url, concurrency=8, max_in_flight=400) as depot_:
        ids = [await depot_.publish(Posted(f"p{number}", number)) for number in range(60)]
        # Whatever ran or was claimed when it opened calls at once: what comes a second apart are probes.
        enough = breakers.KEYS_TO_OPEN + 3
        await until(lambda: len(warehouse.calls) >= enough and _is_probing(warehouse.calls[-3:]))
        probed = len(warehouse.calls) - 3
        note = await depot_.publish(Note(1))
        await depot_.reaches(note, "SUCCEEDED")
        await depot_.is_drained()
        assert _is_probing(warehouse.calls[probed:]), warehouse.calls
        assert [] == await depot_.letters()
        warehouse.is_open = True
        for message_id in ids:
            row = await depot_.reaches(message_id, "SUCCEEDED")
            assert row["attempt"] <= 3
        assert [] == await depot_.letters()


async def test_a_probe_that_snoozes_does_not_keep_the_others_waiting_for_its_timeout(
    migrated_url: str,
) -> None:
    """C14: it says nothing about the dependency, so the next message probes."""
    app = depot(retry=RetryPolicy(attempts=9, base="1s", cap="1s"), ordering="none")
    failed: set[str] = set()
    snoozed: list[str] = []

    @app.idempotent(dependency="warehouse")
    async def store(posted: Posted, call: Call) -> None:
        if len(failed) < breakers.KEYS_TO_OPEN:
            failed.add(posted.parcel)
            raise Retry("closed")
        if not snoozed:
            snoozed.append(posted.parcel)
            raise Snooze("1h")

    async with running(app, migrated_url) as depot_:
        parcels = [f"p{number}" for number in range(breakers.KEYS_TO_OPEN)]
        ids = {parcel: await depot_.publish(Posted(parcel)) for parcel in parcels}
        await until(lambda: bool(snoozed))
        for parcel in {*parcels} - {*snoozed}:
            await depot_.reaches(ids[parcel], "SUCCEEDED")


async def test_a_storm_of_deaths_pauses_its_handler_alone(migrated_url: str) -> None:
    """D8: after most of the last 200 ends died of one reason, one at a time is tried."""
    app = depot(retry=RetryPolicy(attempts=1), ordering="none")

    @app.idempotent()
    async def store(posted: Posted, call: Call) -> None:
        raise LookupError("no such shelf")

    @app.idempotent()
    async def note(left: Note, call: Call) -> None: ...

    count = breakers.STORM_WINDOW + 100
    async with running(
        app, migrated_url, concurrency=4, max_in_flight=400, lease=timedelta(seconds=30)
    ) as depot_:
        for number in range(count):
            await depot_.publish(Posted(f"p{number}", number))
        await until(lambda: _dead(depot_, breakers.STORM_WINDOW))
        await depot_.reaches(await depot_.publish(Note(1)), "SUCCEEDED")
        await depot_.db.execute("select pg_sleep(1.5)")
        dead = await depot_.db.fetchval("select count(*) from towpath.dead_letter")
        assert breakers.STORM_WINDOW <= dead < breakers.STORM_WINDOW + 30


async def test_a_flood_that_dies_does_not_keep_the_healthy_from_arriving(migrated_url: str) -> None:
    """D8, C14: what is paused waits in the database, not in the intake ahead of the others."""
    app = depot(retry=RetryPolicy(attempts=1))

    @app.idempotent(destination="notes")
    async def store(posted: Posted, call: Call) -> None:
        raise LookupError("no such shelf")

    @app.idempotent()
    async def note(left: Note, call: Call) -> None: ...

    bad, good = breakers.STORM_WINDOW + 300, 200
    async with running(app, migrated_url, max_in_flight=40, lease=timedelta(seconds=30)) as depot_:
        for number in range(bad):
            await depot_.publish(Posted(f"p{number}", number), address="notes")
        healthy = [await depot_.publish(Note(number)) for number in range(good)]
        for message_id in healthy:
            await depot_.reaches(message_id, "SUCCEEDED")
        await depot_.is_drained("notes")
        await until(lambda: _are_dead_or_wait_unspent(depot_, bad))  # a probe is neither for a moment
        assert breakers.STORM_WINDOW <= len(await depot_.letters()) < breakers.STORM_WINDOW + 40


async def _are_dead_or_wait_unspent(depot_: Engine, count: int) -> bool:
    """By one look at all of them."""
    waiting = "state = 'WAITING' and reason_code = 'breaker_open' and attempt = 0"
    query = f"select count(*) filter (where {waiting} or state = 'DEAD') from towpath.task"
    return bool(await depot_.db.fetchval(query) == count)


async def _dead(depot_: Engine, at_least: int) -> bool:
    return len(await depot_.letters()) >= at_least
