"""Work that runs longer than `ack_after` is kept by the database, so that the broker may forget it."""

import asyncio
from datetime import timedelta

from tests.integration.engine import Posted, bench, depot
from towpath import App, Call, RetryPolicy

PROMPT = {"ack_after": timedelta(milliseconds=50)}


class Slow:
    """A handler that takes as long as a test wants."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.may_end = asyncio.Event()

    def app(self) -> App:
        app = depot(retry=RetryPolicy(attempts=3, base="5ms", cap="10ms"))

        @app.idempotent()
        async def carry(posted: Posted, call: Call) -> None:
            self.begun.append(posted.number)
            if posted.number == 1:
                await self.may_end.wait()

        return app


async def test_long_work_is_acknowledged_while_it_runs_and_its_key_waits(migrated_url: str) -> None:
    """S7: nothing stays unacknowledged; followers are parked and run afterwards, in order."""
    slow = Slow()
    async with bench(slow.app(), migrated_url, **PROMPT) as depot_, depot_.member():
        first = await depot_.publish(Posted("a", 1))
        second, third = [await depot_.publish(Posted("a", number)) for number in (2, 3)]
        other = await depot_.publish(Posted("b", 4))
        await depot_.reaches(other, "SUCCEEDED")
        await depot_.reaches(second, "PARKED")
        await depot_.reaches(third, "PARKED")
        await depot_.is_drained()
        row = await depot_.row(first)
        assert (row["state"], row["held_by"]) == ("RUNNING", "database")
        assert row["payload"] is not None
        slow.may_end.set()
        for message_id in (first, second, third):
            await depot_.reaches(message_id, "SUCCEEDED")
        assert [number for number in slow.begun if number != 4] == [1, 2, 3]
        assert await depot_.gates() == 0


async def test_a_worker_lost_after_the_acknowledgement_is_followed_by_the_reaper(migrated_url: str) -> None:
    """S7: the message is gone from the broker, its row starts it again."""
    slow = Slow()
    async with bench(slow.app(), migrated_url, **PROMPT) as depot_:
        async with depot_.member():
            message_id = await depot_.publish(Posted("a", 1))
            await depot_.is_drained()
            await depot_.db.execute("update towpath.worker set lease_until = '-infinity'")
            slow.may_end.set()
            await depot_.reaches(message_id, "SUCCEEDED")
        assert await depot_.gates() == 0


async def test_at_shutdown_kept_work_waits_in_the_database(migrated_url: str) -> None:
    """S4: handed back unspent, due at once for the next member."""
    slow = Slow()
    async with bench(slow.app(), migrated_url, **PROMPT, drain_timeout=timedelta(milliseconds=50)) as depot_:
        async with depot_.member():
            message_id = await depot_.publish(Posted("a", 1))
            await depot_.is_drained()
        row = await depot_.row(message_id)
        assert (row["state"], row["attempt"]) == ("WAITING", 0)
        slow.may_end.set()
        async with depot_.member():
            await depot_.reaches(message_id, "SUCCEEDED")
