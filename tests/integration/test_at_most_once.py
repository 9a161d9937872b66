"""At-most-once effects: marked before they begin, in doubt when nobody saw them end, never just repeated."""

import asyncio
from typing import Any

import pytest

from tests.integration.engine import Posted, bench, depot, running, until
from towpath import App, DidNotHappen, Happened, OnceCall, Reject, Retry, RetryPolicy, StillUnknown, Verdict

QUICK = RetryPolicy(attempts=3, base="10ms", cap="50ms")


class Provider:
    """A bank that keeps what it was asked to do, and may lose its answer."""

    def __init__(self) -> None:
        self.charges: list[str] = []
        self.questions = 0
        self.trouble: BaseException | None = None
        self.verdict: Verdict[str] = StillUnknown()

    def app(self) -> App:
        app = depot(retry=QUICK)

        async def ask(call: OnceCall) -> Verdict[str]:
            self.questions += 1
            return self.verdict

        @app.at_most_once(reconcile=ask)
        async def charge(posted: Posted, call: OnceCall) -> str:
            async with call.once():
                self.charges.append(call.idempotency_key())
                if self.trouble is not None:
                    raise self.trouble
            return f"charged {posted.parcel}"

        return app


async def test_an_effect_that_ends_well_is_marked_and_done_once(migrated_url: str) -> None:
    """I6: a success needs no question."""
    bank = Provider()
    async with running(bank.app(), migrated_url) as depot_:
        message_id = await depot_.publish(Posted("a"), times=3)
        row = await depot_.reaches(message_id, "SUCCEEDED")
        await depot_.is_drained()
        assert [str(message_id)] == bank.charges
        assert b'"charged a"' == row["result"]
        assert 0 == await depot_.gates()


async def test_an_error_inside_leaves_the_task_in_doubt_and_its_key_waits(migrated_url: str) -> None:
    """C9: nothing is repeated; followers of the key hold until somebody decides."""
    bank = Provider()
    bank.trouble = ConnectionError("no answer")
    async with running(bank.app(), migrated_url) as depot_:
        first = await depot_.publish(Posted("a", 1))
        await depot_.reaches(first, "UNKNOWN")
        bank.trouble = None
        follower = await depot_.publish(Posted("a", 2))
        await depot_.reaches(follower, "PARKED")
        await until(lambda: bank.questions >= 3)
        assert "UNKNOWN" == await depot_.state(first)
        bank.verdict = Happened("receipt 7")
        row = await depot_.reaches(first, "SUCCEEDED")
        assert (b'"receipt 7"', "happened") == (row["result"], row["reason_code"])
        await depot_.reaches(follower, "SUCCEEDED")
        assert [str(first), str(follower)] == bank.charges
        assert ["task.unknown", "task.resolved"] == [event["event"] for event in await depot_.events(first)]


async def test_what_did_not_happen_is_tried_again(migrated_url: str) -> None:
    """C9: the verdict of the provider starts the next attempt, in order."""
    bank = Provider()
    bank.trouble = ConnectionError("refused")
    bank.verdict = StillUnknown()
    async with running(bank.app(), migrated_url) as depot_:
        message_id = await depot_.publish(Posted("a"))
        await depot_.reaches(message_id, "UNKNOWN")
        bank.trouble, bank.verdict = None, DidNotHappen()
        row = await depot_.reaches(message_id, "SUCCEEDED")
        assert 2 == row["attempt"]
        assert 2 == len(bank.charges)
        assert 0 == await depot_.gates()


async def test_a_lost_worker_leaves_unknown_and_nobody_runs_it_again(migrated_url: str) -> None:
    """C23: neither claim, reaper nor due poller repeats an effect that began under a dead worker."""
    bank = Provider()
    app = bank.app()
    hung = asyncio.Event()

    @app.middleware
    async def hang(attempt: object, call_next: object) -> object:
        result = await call_next()  # type: ignore[operator]
        hung.set()
        await asyncio.sleep(60)
        return result

    async with running(app, migrated_url) as depot_:
        message_id = await depot_.publish(Posted("a"))
        await hung.wait()
        await depot_.db.execute("delete from towpath.worker")  # as if it had died and its lease had lapsed
        await depot_.reaches(message_id, "UNKNOWN")
        await depot_.publish(Posted("a"), message_id=message_id)
        await depot_.is_drained()
        assert 1 == len(bank.charges)


async def test_before_the_effect_a_failure_is_an_ordinary_retry(migrated_url: str) -> None:
    """Only what happens after the marker is in doubt."""
    app = depot(retry=QUICK)
    tries = 0

    async def never_asked(call: OnceCall) -> Verdict[None]:
        raise AssertionError

    @app.at_most_once(reconcile=never_asked)
    async def charge(posted: Posted, call: OnceCall) -> None:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise ConnectionError("before")
        async with call.once():
            if tries == 2:
                raise Retry("busy", after="1ms")  # the provider said: nothing was done

    async with running(app, migrated_url) as depot_:
        message_id = await depot_.publish(Posted("a"))
        row = await depot_.reaches(message_id, "SUCCEEDED")
        assert (3, 3) == (tries, row["attempt"])


async def test_a_rejection_ends_it_failed(migrated_url: str) -> None:
    """A returned Reject is a decision, not a doubt."""
    app = depot(retry=QUICK)

    async def never_asked(call: OnceCall) -> Verdict[None]:
        raise AssertionError

    @app.at_most_once(reconcile=never_asked)
    async def charge(posted: Posted, call: OnceCall) -> Reject | None:
        return Reject("card_declined")

    async with running(app, migrated_url) as depot_:
        message_id = await depot_.publish(Posted("a"))
        row = await depot_.reaches(message_id, "FAILED")
        assert "card_declined" == row["reason_code"]


async def test_the_same_step_twice_is_refused(migrated_url: str) -> None:
    """Each `call.once` of a handler has a step name of its own."""
    app = depot(retry=QUICK)
    found: list[str] = []

    async def ask(call: OnceCall) -> Verdict[None]:
        return Happened(None)

    @app.at_most_once(reconcile=ask)
    async def charge(posted: Posted, call: OnceCall) -> None:
        async with call.once("first"):
            pass
        async with call.once("second"):
            pass
        with pytest.raises(Exception, match="name each step") as refused:
            async with call.once("second"):
                pass
        found.append(str(refused.value))

    async with running(app, migrated_url) as depot_:
        await depot_.reaches(await depot_.publish(Posted("a")), "SUCCEEDED")
        assert 1 == len(found)


async def test_a_cancel_inside_the_effect_leaves_it_in_doubt(migrated_url: str) -> None:
    """C9: cancelling cannot undo what may have happened; before the effect it cancels."""
    app = depot(retry=QUICK)
    reached: list[int] = []

    async def ask(call: OnceCall) -> Verdict[None]:
        return StillUnknown()

    @app.at_most_once(reconcile=ask)
    async def charge(posted: Posted, call: OnceCall) -> None:
        if posted.number == 2:
            async with call.once():
                reached.append(posted.number)
                await asyncio.sleep(60)
        reached.append(posted.number)
        await asyncio.sleep(60)

    async with running(app, migrated_url) as depot_:
        before, inside = [await depot_.publish(Posted(f"p{n}", n)) for n in (1, 2)]
        await until(lambda: sorted(reached) == [1, 2])
        await depot_.db.execute("update towpath.task set cancel_requested = true")
        await depot_.reaches(before, "CANCELLED")
        await depot_.reaches(inside, "UNKNOWN")


async def test_an_effect_that_its_worker_gives_up_is_in_doubt_at_once(migrated_url: str) -> None:
    """C9, C23: a rebalance stops the handler inside its effect, and its worker lives on."""
    app = depot(retry=QUICK)
    reached = asyncio.Event()
    calls: list[str] = []

    async def ask(call: OnceCall) -> Verdict[None]:
        return StillUnknown()

    @app.at_most_once(reconcile=ask)
    async def charge(posted: Posted, call: OnceCall) -> None:
        async with call.once():
            calls.append(call.idempotency_key())
            reached.set()
            await asyncio.sleep(600)

    async with bench(app, migrated_url) as depot_, depot_.member() as member:
        message_id = await depot_.publish(Posted("a"))
        await reached.wait()
        subscriber: Any = member.consumer.health.subscriber
        # As the broker's adapter does when another member joins.
        await subscriber._listener.revoking(frozenset(subscriber._held), timeout_seconds=0.05)
        await depot_.reaches(message_id, "UNKNOWN")
        assert await depot_.db.fetchval("select count(*) from towpath.worker") == 1
        assert ["task.unknown"] == [event["event"] for event in await depot_.events(message_id)]
        assert [str(message_id)] == calls
