"""What a handler does and what its task says are one thing."""

import asyncio
import json
from typing import Any

import pytest
from sqlalchemy import text

from tests.integration.engine import EFFECTS, Note, Posted, Sorted, depot, effects, running, until
from towpath.app import App
from towpath.backoff import RetryPolicy
from towpath.context import Call, Tx
from towpath.errors import UsageError
from towpath.messages import Message
from towpath.outcomes import Dead, Reject, Retry
from towpath.telemetry.logging import facts

HASTY = RetryPolicy(attempts=3, base="1ms", cap="10ms")


async def write(tx: Tx, parcel: Posted) -> None:
    await tx.session.execute(
        text("insert into public.effect (parcel, number) values (:parcel, :number)"),
        {"parcel": parcel.parcel, "number": parcel.number},
    )


async def test_the_effect_the_state_and_emitted_events_of_a_transactional_handler_commit_together(
    migrated_url: str,
) -> None:
    """C6."""
    app, seen = depot(), list[tuple[str, int]]()

    @app.transactional()
    async def sort(parcel: Posted, tx: Tx) -> None:
        await write(tx, parcel)
        tx.emit(Sorted(parcel.parcel))
        row = await tx.session.execute(text("select state from towpath.task"))
        seen.extend((state, tx.attempt.attempt) for (state,) in row)

    async with running(app, migrated_url) as engine:
        await engine.db.execute(EFFECTS)
        id_ = await engine.publish(Posted("a"))
        row = await engine.reaches(id_, "SUCCEEDED")
        emitted = await engine.outbox()
        written = await engine.db.fetch("select xmin::text from public.effect")
        settled = await engine.db.fetch("select xmin::text from towpath.task")

        assert await effects(engine) == [("a", 0)]
        assert [(r["type"], r["key"], r["destination"]) for r in emitted] == [
            ("parcel.sorted", "a", "sorted")
        ]
        assert (
            [r["xmin"] for r in written] == [r["xmin"] for r in settled] == [str(r["xid"]) for r in emitted]
        )
        assert (row["attempt"], row["version"], row["token"], row["worker"]) == (1, 2, None, None)
        assert row["held_by"] == "broker", "the broker's message held it to its end"
        assert row["started_at"] <= row["finished_at"]
        assert await engine.events(id_) == [], "a success at the first try is told by the row"
        assert seen == [("RUNNING", 1)]
        await engine.is_drained()


async def test_a_handler_that_raises_rolls_back_its_effect_and_its_events(migrated_url: str) -> None:
    """C6."""
    app = depot(retry=HASTY)

    @app.transactional()
    async def sort(parcel: Posted, tx: Tx) -> None:
        await write(tx, parcel)
        tx.emit(Sorted(parcel.parcel))
        await tx.session.flush()
        raise RuntimeError("no")

    async with running(app, migrated_url) as engine:
        await engine.db.execute(EFFECTS)
        id_ = await engine.publish(Posted("a"))
        await engine.reaches(id_, "DEAD")
        assert await effects(engine) == []
        assert await engine.outbox() == []


async def test_returning_reject_commits_what_was_written_and_ends_failed(migrated_url: str) -> None:
    """D1: a business decision is final, has its reason, and leaves a line of history."""
    app = depot(retry=HASTY)

    @app.transactional()
    async def sort(parcel: Posted, tx: Tx) -> Reject | None:
        await write(tx, parcel)
        tx.emit(Sorted(parcel.parcel))
        return Reject("too_heavy", "31 kg")

    async with running(app, migrated_url) as engine:
        await engine.db.execute(EFFECTS)
        id_ = await engine.publish(Posted("a"))
        row = await engine.reaches(id_, "FAILED")
        (event,) = await engine.events(id_)

        assert await effects(engine) == [("a", 0)]
        assert len(await engine.outbox()) == 1
        assert (row["reason_code"], row["error_message"], row["attempt"]) == ("too_heavy", "31 kg", 1)
        assert (event["event"], event["from_state"], event["to_state"]) == (
            "task.failed",
            "RUNNING",
            "FAILED",
        )
        assert (row["version"], 1, "too_heavy") == (event["version"], event["attempt"], event["reason_code"])
        assert await engine.letters() == []
        await engine.is_drained()


async def test_an_idempotent_handler_may_reject_too(migrated_url: str) -> None:
    """D1."""
    app = depot()

    @app.idempotent()
    async def sort(parcel: Posted, call: Call) -> Reject:
        return Reject("unknown_street", "Elm\0 \ud800" + "x" * 5000)

    async with running(app, migrated_url) as engine:
        id_ = await engine.publish(Posted("a"))
        row = await engine.reaches(id_, "FAILED")
        assert row["reason_code"] == "unknown_street"
        assert len(row["error_message"]) <= 1000
        assert [event["event"] for event in await engine.events(id_)] == ["task.failed"]


@pytest.mark.parametrize("detail", ["Elm\0", "\ud800", "x" * 1_000_000])
async def test_the_detail_of_a_rejection_may_be_any_text(migrated_url: str, detail: str) -> None:
    """C17."""
    app = depot(retry=HASTY)

    @app.transactional()
    async def sort(parcel: Posted, tx: Tx) -> Reject | None:
        return Reject("odd", detail)

    async with running(app, migrated_url) as engine:
        row = await engine.reaches(await engine.publish(Posted("a")), "FAILED", "DEAD")
        assert (row["state"], row["reason_code"], row["attempt"]) == ("FAILED", "odd", 1)
        assert len(row["error_message"]) <= 1000


@pytest.mark.parametrize("result", [{"eta": [1, 2.5, None, True]}, "nul \0", 7, [], False])
async def test_an_idempotent_handlers_result_is_kept_as_json(migrated_url: str, result: Any) -> None:
    """C17."""
    app = depot()

    @app.idempotent()
    async def sort(parcel: Posted, call: Call) -> Any:
        return result

    async with running(app, migrated_url) as engine:
        row = await engine.reaches(await engine.publish(Posted("a")), "SUCCEEDED")
        assert result == json.loads(row["result"])


async def test_a_result_that_is_not_json_is_a_bug_of_the_handler(migrated_url: str) -> None:
    app = depot(retry=RetryPolicy(attempts=9, base="1ms", cap="10ms"))

    @app.idempotent()
    async def sort(parcel: Posted, call: Call) -> Any:
        return object()

    async with running(app, migrated_url) as engine:
        row = await engine.reaches(await engine.publish(Posted("a")), "DEAD")
        assert (row["reason_code"], row["attempt"]) == ("usage", 2)
        assert "sort returned object: return JSON values or None" in row["error_message"]


async def test_a_calls_transaction_settles_the_task_with_what_it_writes(migrated_url: str) -> None:
    """C6."""
    app = depot()

    @app.idempotent()
    async def sort(parcel: Posted, call: Call) -> None:
        async with call.transaction() as tx:
            await write(tx, parcel)
            tx.emit(Sorted(parcel.parcel))

    async with running(app, migrated_url) as engine:
        await engine.db.execute(EFFECTS)
        await engine.reaches(await engine.publish(Posted("a")), "SUCCEEDED")
        rows = await engine.db.fetch(
            "select xmin::text as x from public.effect union select xmin::text from towpath.task "
            "union select xmin::text from towpath.outbox"
        )
        assert len(rows) == 1
        await engine.is_drained()


async def test_a_calls_transaction_that_raises_settles_nothing(migrated_url: str) -> None:
    app, tries = depot(retry=HASTY), list[int]()

    @app.idempotent()
    async def sort(parcel: Posted, call: Call) -> None:
        tries.append(call.attempt.attempt)
        async with call.transaction() as tx:
            await write(tx, parcel)
            if len(tries) < 3:
                raise RuntimeError("not yet")

    async with running(app, migrated_url) as engine:
        await engine.db.execute(EFFECTS)
        row = await engine.reaches(await engine.publish(Posted("a")), "SUCCEEDED", "DEAD")
        assert (row["state"], row["attempt"]) == ("SUCCEEDED", 3)
        assert tries == [1, 2, 3]
        assert await effects(engine) == [("a", 0)]


async def test_a_call_has_one_transaction_only(migrated_url: str, caplog: pytest.LogCaptureFixture) -> None:
    """And a person sees what a handler raised when its task had ended already."""
    app, errors = depot(), list[str]()

    @app.idempotent()
    async def sort(parcel: Posted, call: Call) -> None:
        async with call.transaction() as tx:
            await write(tx, parcel)
        try:
            async with call.transaction() as tx:
                await write(tx, parcel)
        except UsageError as error:
            errors.append(str(error))
            raise

    async with running(app, migrated_url) as engine:
        await engine.db.execute(EFFECTS)
        id_ = await engine.publish(Posted("a"))
        await engine.reaches(id_, "SUCCEEDED")
        await engine.is_drained()
        assert errors == ["call.transaction() ends the task: it can be used once, as the last act"]
        assert await effects(engine) == [("a", 0)]
        assert await engine.state(id_) == "SUCCEEDED", "what came afterwards cannot undo it"
    [told] = [record for record in caplog.records if record.getMessage() == "task.raised_after_settling"]
    assert facts(told) | {"type": "parcel.posted", "message_id": str(id_)} == facts(told)


TAKEN_OVER = """
with other as (
  insert into towpath.worker (id, consumer_group, host, lease_until)
  values (gen_random_uuid(), 'depot', 'other', 'infinity') returning id
)
update towpath.task
set token = gen_random_uuid(), worker = other.id, version = version + 1, held_by = 'database'
from other returning token, version
"""


@pytest.mark.parametrize("effect", ["transactional", "idempotent", "call"])
async def test_a_handler_whose_task_was_taken_over_writes_nothing(migrated_url: str, effect: str) -> None:
    """C7: the token decides, in the handler's own transaction."""
    app, started, go = depot(), asyncio.Event(), asyncio.Event()

    async def wait() -> None:
        started.set()
        await go.wait()

    if effect == "transactional":

        @app.transactional()
        async def sort(parcel: Posted, tx: Tx) -> None:
            await wait()
            await write(tx, parcel)
            tx.emit(Sorted(parcel.parcel))
    elif effect == "idempotent":

        @app.idempotent()
        async def sort_by_call(parcel: Posted, call: Call) -> str:
            await wait()
            return "done"
    else:

        @app.idempotent()
        async def sort_by_call_in_transaction(parcel: Posted, call: Call) -> None:
            await wait()
            async with call.transaction() as tx:
                await write(tx, parcel)
                tx.emit(Sorted(parcel.parcel))

    async with running(app, migrated_url) as engine:
        await engine.db.execute(EFFECTS)
        id_ = await engine.publish(Posted("a"))
        await started.wait()
        other = await engine.db.fetchrow(TAKEN_OVER)
        go.set()
        await engine.is_drained()
        row = await engine.row(id_)

        assert ("RUNNING", other["token"], other["version"]) == (row["state"], row["token"], row["version"])
        assert row["result"] is None
        assert await effects(engine) == []
        assert await engine.outbox() == []


async def test_a_handler_cannot_end_the_engines_transaction(migrated_url: str) -> None:
    """Whatever way it takes, the effect is not committed without the task's state."""
    app = depot(retry=RetryPolicy(attempts=9, base="1ms", cap="10ms"))

    @app.transactional()
    async def sort(parcel: Posted, tx: Tx) -> None:
        await write(tx, parcel)
        match parcel.number:
            case 0:
                await tx.session.commit()
            case 1:
                await tx.session.rollback()
            case 2:
                await tx.session.close()
            case 3:
                await tx.session.reset()
            case 4:
                await tx.session.run_sync(lambda session: session.rollback())

    async with running(app, migrated_url) as engine:
        await engine.db.execute(EFFECTS)
        for number in range(5):
            id_ = await engine.publish(Posted(f"p{number}", number))
            row = await engine.reaches(id_, "DEAD", "SUCCEEDED")
            assert (row["state"], row["reason_code"], row["attempt"]) == ("DEAD", "usage", 2), number
        assert await effects(engine) == []


async def test_savepoints_are_the_handlers_own(migrated_url: str) -> None:
    app = depot()

    @app.transactional()
    async def sort(parcel: Posted, tx: Tx) -> None:
        await write(tx, parcel)
        savepoint = await tx.session.begin_nested()
        await write(tx, Posted("b"))
        tx.emit(Sorted("b"))
        await savepoint.rollback()
        async with tx.session.begin_nested():
            await write(tx, Posted("c"))
            tx.emit(Sorted("c"))

    async with running(app, migrated_url) as engine:
        await engine.db.execute(EFFECTS)
        await engine.reaches(await engine.publish(Posted("a")), "SUCCEEDED")
        assert await effects(engine) == [("a", 0), ("c", 0)]
        assert [row["key"] for row in await engine.outbox()] == ["c"]


async def test_an_event_that_cannot_be_emitted_fails_the_handler_alone(migrated_url: str) -> None:
    app = depot(retry=HASTY)

    @app.transactional()
    async def sort(parcel: Posted, tx: Tx) -> None:
        await write(tx, parcel)
        tx.emit(Sorted("x" * 600))

    async with running(app, migrated_url) as engine:
        await engine.db.execute(EFFECTS)
        row = await engine.reaches(await engine.publish(Posted("a")), "DEAD")
        assert row["reason_code"] == "usage_invalid_message"
        assert await effects(engine) == []


async def test_handlers_take_a_payload_alone_or_with_its_message_or_raw_bytes(migrated_url: str) -> None:
    app, seen = App("depot", ordering="none"), list[Any]()

    @app.transactional()
    async def sort(parcel: Posted) -> None:
        seen.append(parcel)

    @app.idempotent()
    async def read(note: Message[Note]) -> None:
        seen.append((note.payload, note.key, note.type, note.headers))

    @app.idempotent(type="scan", destination="scans")
    async def scan(data: bytes, call: Call) -> None:
        seen.append((data, call.message_id, call.idempotency_key("x")))

    app.foreign("scans", type="scan")
    async with running(app, migrated_url) as engine:
        await engine.publish(Posted("a"))
        await until(lambda: len(seen) == 1)
        await engine.publish(Note(3), headers=(("tenant", b"t1"),))
        await until(lambda: len(seen) == 2)
        await engine.publish_raw("scans", b"\0\1")
        await until(lambda: len(seen) == 3)
        assert Posted("a") == seen[0]
        assert (Note(3), None, "note.left", (("tenant", b"t1"),)) == seen[1]
        assert seen[2][0] == b"\0\1"
        assert f"{seen[2][1]}:x" == seen[2][2]


@pytest.mark.parametrize("outcome", [Retry("later"), Dead("never"), RuntimeError("no")])
async def test_what_a_handler_raises_never_commits(migrated_url: str, outcome: Exception) -> None:
    app = depot(retry=HASTY)

    @app.transactional()
    async def sort(parcel: Posted, tx: Tx) -> None:
        await write(tx, parcel)
        raise outcome

    async with running(app, migrated_url) as engine:
        await engine.db.execute(EFFECTS)
        await engine.reaches(await engine.publish(Posted("a")), "DEAD")
        assert await effects(engine) == []
