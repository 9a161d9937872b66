"""Failures become rows that wait, and end: attempts, delays, classes of errors, deaths."""

import asyncio
import time
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import httpx
import pytest
from sqlalchemy import text
from uuid_utils.compat import uuid7

from tests.integration.engine import Note, Posted, Weigh, bench, depot, running, until
from towpath.backoff import RetryPolicy
from towpath.consumer import endings
from towpath.context import Call, Tx
from towpath.outcomes import Dead, Retry, Snooze

HASTY = RetryPolicy(attempts=3, base="1ms", cap="10ms")


async def test_a_retry_never_starts_early_by_the_databases_clock_and_has_its_history(
    migrated_url: str,
) -> None:
    """A2, C4, C12."""
    app = depot(retry=RetryPolicy(attempts=5, base="30ms", cap="60ms"))
    starts = list[datetime]()

    @app.transactional()
    async def sort(parcel: Posted, tx: Tx) -> None:
        starts.append((await tx.session.execute(text("select clock_timestamp()"))).scalar_one())
        if len(starts) < 3:
            raise RuntimeError(f"try {len(starts)}")

    async with running(app, migrated_url) as engine:
        id_ = await engine.publish(Posted("a"))
        row = await engine.reaches(id_, "SUCCEEDED", "DEAD")
        events = await engine.events(id_)

        assert (row["state"], row["attempt"], row["deliveries"]) == ("SUCCEEDED", 3, 1)
        assert (row["reason_code"], row["error_message"], row["due_at"]) == (None, None, None)
        assert [("task.retry_scheduled", "RUNNING", "WAITING", n) for n in (1, 2)] == [
            (e["event"], e["from_state"], e["to_state"], e["attempt"]) for e in events
        ]
        for event, failed, start in zip(events, starts, starts[1:], strict=False):
            assert start >= event["due_at"], "it started early"
            assert event["due_at"] - failed >= timedelta(milliseconds=30)
            assert event["due_at"] - event["at"] <= timedelta(milliseconds=61)
        assert [e["error_message"] for e in events] == ["try 1", "try 2"]
        assert [e["version"] for e in events] == [2, 4]
        assert all(e["worker"] for e in events)
        await engine.is_drained()


async def test_a_waiting_message_is_acknowledged_and_runs_from_its_row(migrated_url: str) -> None:
    """C3: its body, headers and position are in the row before the broker may forget it."""
    app, seen = depot(retry=RetryPolicy(attempts=3, base="1ms", cap="1ms")), list[Any]()

    @app.idempotent()
    async def sort(parcel: Posted, call: Call) -> None:
        seen.append((parcel, call.attempt.envelope, call.idempotency_key()))
        if len(seen) == 1:
            raise Retry("later", after="1h")

    async with running(app, migrated_url) as engine:
        id_ = await engine.publish(Posted("a", 7), headers=(("tenant", b"\xff\0"), ("tenant", b"2")))
        row = await engine.reaches(id_, "WAITING")
        await engine.is_drained()
        assert (row["held_by"], row["position"], row["lane"]) == ("database", 1, "a")
        assert row["payload"] == b'{"parcel":"a","number":7}'
        await engine.db.execute("update towpath.task set due_at = clock_timestamp()")
        await engine.reaches(id_, "SUCCEEDED")
        assert seen[0] == seen[1]
        assert seen[1][1].headers == (("tenant", b"\xff\0"), ("tenant", b"2"))


async def test_a_sent_task_keeps_its_body_over_a_retry(migrated_url: str) -> None:
    """C3: a task from another database has no row with its body; its message brought it."""
    app, seen = depot(retry=HASTY), list[Weigh]()

    @app.transactional()
    async def weigh(parcel: Weigh, tx: Tx) -> None:
        seen.append(parcel)
        if len(seen) == 1:
            raise RuntimeError("no")

    async with running(app, migrated_url) as engine:
        id_ = await engine.publish(Weigh("a", 3))
        row = await engine.reaches(id_, "SUCCEEDED", "DEAD")
        assert (row["state"], row["kind"], row["attempt"]) == ("SUCCEEDED", "task", 2)
        assert [Weigh("a", 3)] * 2 == seen


async def test_a_submitted_task_runs_from_its_row_over_retries(migrated_url: str) -> None:
    """C3."""
    app, seen = depot(retry=HASTY), list[Any]()

    @app.transactional()
    async def weigh(parcel: Weigh, tx: Tx) -> None:
        seen.append((parcel, tx.attempt.owner, tx.attempt.attempt))
        if len(seen) == 1:
            raise RuntimeError("no")

    async with running(app, migrated_url) as engine:
        id_ = await engine.submit(Weigh("a", 3), owner="ann", headers='[["tenant","t1"]]')
        row = await engine.reaches(id_, "SUCCEEDED", "DEAD")
        assert (row["state"], row["attempt"], row["lane"]) == ("SUCCEEDED", 2, "a")
        assert [(Weigh("a", 3), "ann", 1), (Weigh("a", 3), "ann", 2)] == seen
        await engine.is_drained("tasks.depot")


async def test_delays_grow_to_their_cap_and_attempts_bound_them(migrated_url: str) -> None:
    """C12."""
    app = depot(retry=RetryPolicy(attempts=7, base="2ms", cap="20ms"))

    @app.idempotent()
    async def sort(parcel: Posted) -> None:
        raise RuntimeError("no")

    async with running(app, migrated_url) as engine:
        id_ = await engine.publish(Posted("a"))
        row = await engine.reaches(id_, "DEAD")
        *waits, end = await engine.events(id_)
        assert row["attempt"] == 7
        assert list(range(1, 7)) == [e["attempt"] for e in waits]
        assert all(e["due_at"] - e["at"] <= timedelta(milliseconds=21) for e in waits)
        assert (end["event"], end["to_state"], end["attempt"]) == ("task.dead", "DEAD", 7)


async def test_age_bounds_a_message_too(migrated_url: str) -> None:
    """C12."""
    app = depot(retry=RetryPolicy(attempts=1000, max_age="150ms", base="20ms", cap="20ms"))

    @app.idempotent()
    async def sort(parcel: Posted) -> None:
        raise RuntimeError("no")

    async with running(app, migrated_url) as engine:
        row = await engine.reaches(await engine.publish(Posted("a")), "DEAD")
        assert row["attempt"] < 1000
        assert row["finished_at"] - row["started_at"] >= timedelta(milliseconds=150)


async def test_clearly_transient_errors_are_tried_again_in_place(migrated_url: str) -> None:
    """The tries in place count as attempts, and never exceed them."""
    app, tries = depot(retry=RetryPolicy(attempts=4, base="1ms", cap="5ms", in_place=2)), list[int]()

    @app.idempotent()
    async def sort(parcel: Posted, call: Call) -> None:
        tries.append(call.attempt.attempt)
        raise ConnectionResetError("reset")

    async with running(app, migrated_url) as engine:
        id_ = await engine.publish(Posted("a"))
        row = await engine.reaches(id_, "DEAD")
        assert 4 == row["attempt"] == len(tries), "three in place, and the one left"
        assert [e["attempt"] for e in await engine.events(id_)] == [3, 4]


async def test_the_loser_of_a_race_in_the_database_is_tried_again_in_place_for_free(
    migrated_url: str,
) -> None:
    """C17: serialization failures and deadlocks are nobody's fault."""
    app, tries = depot(retry=RetryPolicy(attempts=1, base="1ms", cap="5ms")), list[int]()

    @app.transactional()
    async def sort(parcel: Posted, tx: Tx) -> None:
        tries.append(tx.attempt.attempt)
        if len(tries) < 7:
            await tx.session.execute(text("do $$ begin raise sqlstate '40001'; end $$"))

    async with running(app, migrated_url) as engine:
        id_ = await engine.publish(Posted("a"))
        row = await engine.reaches(id_, "SUCCEEDED", "DEAD")
        assert (row["state"], row["attempt"], tries) == ("SUCCEEDED", 1, [1] * 7)
        assert {"sqlstate_40001"} == {e["reason_code"] for e in await engine.events(id_)}


def refuse(status: int, **headers: str) -> None:
    request = httpx.Request("POST", "https://carrier.example/ship")
    httpx.Response(status, request=request, headers=headers).raise_for_status()


class CardDeclined(Exception):
    pass


async def test_a_dependency_that_says_when_to_come_again_is_obeyed(migrated_url: str) -> None:
    """C12: Retry-After is a floor."""
    app, starts = depot(retry=HASTY), list[float]()

    @app.idempotent()
    async def sort(parcel: Posted) -> None:
        starts.append(time.monotonic())
        if len(starts) == 1:
            refuse(429, **{"Retry-After": "1"})

    async with running(app, migrated_url) as engine:
        id_ = await engine.publish(Posted("a"))
        await engine.reaches(id_, "SUCCEEDED")
        (event,) = await engine.events(id_)
        assert starts[1] - starts[0] >= 1
        assert (event["reason_code"], event["attempt"]) == ("http_429", 1)


UNMIGRATED = "select * from public.not_migrated_yet"
TWICE = "insert into public.stamp values (1)"


@pytest.mark.parametrize(
    ("case", "state", "reason", "attempt"),
    [
        ("404", "DEAD", "http_404", 1),
        ("503", "DEAD", "http_503", 3),
        ("dead", "DEAD", "hopeless", 1),
        ("declined", "FAILED", "card_declined", 1),
        ("unique", "DEAD", "sqlstate_23505", 3),
        ("null byte", "DEAD", "sqlstate_22021", 1),
        ("typo", "DEAD", "attribute_error", 2),
        ("own", "DEAD", "card_trouble", 3),
    ],
)
async def test_what_a_failure_is_decides_how_it_ends(
    migrated_url: str, case: str, state: str, reason: str, attempt: int
) -> None:
    """D1."""
    from towpath.outcomes import Reject

    app = depot(retry=HASTY)
    app.classify(CardDeclined, Reject("card_declined"))

    class CardTrouble(Exception):
        pass

    app.classify(CardTrouble, Retry)

    @app.transactional()
    async def sort(parcel: Posted, tx: Tx) -> None:
        match case:
            case "404" | "503":
                refuse(int(case))
            case "dead":
                raise Dead("hopeless")
            case "declined":
                raise CardDeclined
            case "unique":
                await tx.session.execute(text(TWICE))
            case "null byte":
                await tx.session.execute(text("select :text || 'x'"), {"text": "\0"})
            case "typo":
                raise AttributeError("naem")
            case _:
                raise ExceptionGroup("several", [CardTrouble("a")])

    async with running(app, migrated_url) as engine:
        await engine.db.execute(f"create table public.stamp (id int unique); {TWICE}")
        id_ = await engine.publish(Posted("a"))
        row = await engine.reaches(id_, "DEAD", "FAILED")
        assert (state, reason, attempt) == (row["state"], row["reason_code"], row["attempt"])
        assert (state == "DEAD") == bool(await engine.letters())


@pytest.mark.parametrize("case", ["missing table", "missing grant", "401"])
async def test_a_deploy_ahead_of_its_migration_puts_nothing_into_the_dead_letters(
    migrated_url: str, case: str
) -> None:
    """C22: waits without spending attempts until a person has mended the deployment."""
    app, tries, is_mended = (
        depot(retry=RetryPolicy(attempts=1, base="1ms", cap="5ms")),
        list[int](),
        asyncio.Event(),
    )

    @app.transactional()
    async def sort(parcel: Posted, tx: Tx) -> None:
        tries.append(tx.attempt.attempt)
        if is_mended.is_set():
            return
        if case == "missing table":
            await tx.session.execute(text(UNMIGRATED))
        elif case == "missing grant":
            await tx.session.execute(text("set local role pg_monitor"))
            await tx.session.execute(text("select * from public.secret"))
        else:
            refuse(401)

    async with running(app, migrated_url) as engine:
        await engine.db.execute("create table public.secret (id int)")
        id_ = await engine.publish(Posted("a"))
        await until(lambda: len(tries) > 4)
        assert await engine.letters() == []
        is_mended.set()
        row = await engine.reaches(id_, "SUCCEEDED", "DEAD")
        assert ("SUCCEEDED", 1, {1}) == (row["state"], row["attempt"], set(tries))


async def test_an_outage_uses_up_neither_attempts_nor_age(migrated_url: str) -> None:
    """C13."""
    app = depot(retry=RetryPolicy(attempts=2, max_age="200ms", base="40ms", cap="40ms"))
    tries = list[int]()

    @app.transactional()
    async def sort(parcel: Posted, tx: Tx) -> None:
        tries.append(1)
        if len(tries) < 10:
            await tx.session.execute(text("do $$ begin raise sqlstate '57P03'; end $$"))

    async with running(app, migrated_url) as engine:
        row = await engine.reaches(await engine.publish(Posted("a")), "SUCCEEDED", "DEAD")
        assert (row["state"], row["attempt"]) == ("SUCCEEDED", 1)


async def test_a_snooze_spends_neither_attempt_nor_age(migrated_url: str) -> None:
    app, tries = depot(retry=RetryPolicy(attempts=2, max_age="10m", base="1ms", cap="1ms")), list[int]()

    @app.idempotent()
    async def sort(parcel: Posted, call: Call) -> None:
        tries.append(call.attempt.attempt)
        if len(tries) == 1:
            raise Snooze("1h", reason="not_picked_yet")
        if len(tries) == 2:
            raise RuntimeError("its first failure")

    async with running(app, migrated_url) as engine:
        id_ = await engine.publish(Posted("a"))
        row = await engine.reaches(id_, "WAITING")
        (event,) = await engine.events(id_)
        assert (row["waiting_for"], row["attempt"]) == ("snooze", 0)
        assert (event["event"], event["reason_code"]) == ("task.snooze_scheduled", "not_picked_yet")
        assert timedelta(minutes=59) < event["due_at"] - event["at"] <= timedelta(hours=1)
        await engine.db.execute(  # an hour goes by
            "update towpath.task set due_at = clock_timestamp(), started_at = started_at - interval '1h'"
        )
        row = await engine.reaches(id_, "SUCCEEDED", "DEAD")
        assert (row["state"], row["attempt"], tries) == ("SUCCEEDED", 2, [1, 1, 2])


async def test_an_exhausted_message_is_dead_with_one_catalog_row_and_one_copy_in_one_transaction(
    migrated_url: str,
) -> None:
    """D1, A3."""
    app = depot(retry=HASTY)

    @app.idempotent()
    async def sort(parcel: Posted) -> None:
        raise RuntimeError("password=hunter2 in Elm Street")

    async with running(app, migrated_url) as engine:
        id_ = await engine.publish(Posted("a", 7), headers=(("tenant", b"\xff"),))
        row = await engine.reaches(id_, "DEAD")
        (letter,) = await engine.letters()
        (copy,) = await engine.outbox("copy")
        xmins = await engine.db.fetch(
            "select xmin::text from towpath.task union select xmin::text from towpath.dead_letter "
            "union select xid::text from towpath.outbox"
        )

        assert len(xmins) == 1
        assert (id_, "handle", "open", 1, 3) == (
            letter["message_id"],
            letter["stage"],
            letter["state"],
            letter["death_count"],
            letter["attempts"],
        )
        assert (
            letter["payload"],
            letter["key"],
            letter["source"],
            letter["position"],
        ) == (b'{"parcel":"a","number":7}', "a", "parcels", 1)
        assert (letter["reason_code"], letter["error_class"]) == ("runtime_error", "RuntimeError")
        assert "hunter2" not in letter["error_message"]
        assert (row["fingerprint"], row["reason_code"]) == (letter["fingerprint"], letter["reason_code"])
        assert "tenant" in letter["headers"]
        assert ("depot.parcels.dlq", id_, letter["payload"], "a") == (
            copy["destination"],
            copy["message_id"],
            copy["payload"],
            copy["key"],
        )
        for name in (
            '"ce_id"',
            '"tenant"',
            '["towpath-dead-group","depot"]',
            f'["towpath-dead-letter","{letter["id"]}"]',
            '["towpath-dead-stage","handle"]',
            '["towpath-dead-reason","runtime_error"]',
            '["towpath-dead-error","RuntimeError"]',
            '["towpath-dead-attempts","3"]',
            '["towpath-dead-body","inline"]',
        ):
            assert name in copy["headers"]
        await engine.is_drained()


async def test_the_copy_of_a_large_dead_letter_carries_its_story_alone(migrated_url: str) -> None:
    """D7."""
    app = depot()

    @app.idempotent()
    async def sort(parcel: Posted) -> None:
        raise Dead("hopeless")

    async with running(app, migrated_url) as engine:
        id_ = await engine.publish(Posted("a" * 500, 10**4))
        await engine.reaches(id_, "DEAD")
        large = await engine.publish_bytes(Posted, b'{"parcel":"b","number":1' + b" " * 20_000 + b"}")
        await engine.reaches(large, "DEAD")
        small_copy, large_copy = await engine.outbox("copy")
        _, letter = await engine.letters()
        assert '["towpath-dead-body","inline"]' in small_copy["headers"]
        assert '["towpath-dead-body","catalog"]' in large_copy["headers"]
        assert (large_copy["payload"], len(letter["payload"]) // 1000 * 1000) == (b"", 20_000)


async def test_an_error_while_burying_loses_nothing_and_holds_up_no_other_key(
    migrated_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D2: neither a dead row without its letter, nor an acknowledged message."""
    monkeypatch.setattr(endings, "_TROUBLE_SECONDS", 0.05)
    app = depot()

    @app.idempotent()
    async def sort(parcel: Posted) -> None:
        if parcel.parcel == "a":
            raise Dead("hopeless")

    async with running(app, migrated_url) as engine:
        await engine.db.execute("alter table towpath.dead_letter rename column fingerprint to finger")
        id_ = await engine.publish(Posted("a"))
        await engine.publish_raw("parcels", b"no envelope", key="b")
        others = [await engine.publish(Posted(f"k{number}")) for number in range(8)]
        for other in others:
            await engine.reaches(other, "SUCCEEDED")
        await until(lambda: asyncio.sleep(0.2, result=True))
        assert await engine.state(id_) != "DEAD"
        unfinished = await engine.db.fetch("select id from towpath.task where state <> 'SUCCEEDED'")
        assert [row["id"] for row in unfinished] == [id_], "the other one has no row yet"
        assert engine.unacknowledged() > 0
        await engine.db.execute("alter table towpath.dead_letter rename column finger to fingerprint")
        row = await engine.reaches(id_, "DEAD")
        await until(lambda: _counted(engine, 2, "select count(*) from towpath.dead_letter"))
        await engine.is_drained()
        assert row["attempt"] == 1, "the trouble was not the message's"


async def _counted(engine: Any, expected: int, query: str) -> bool:
    return bool(expected == await engine.db.fetchval(query))


async def test_a_retry_keeps_other_keys_going(migrated_url: str) -> None:
    """C4."""
    app = depot(retry=RetryPolicy(attempts=9, base="10m", cap="10m"))

    @app.transactional()
    async def sort(parcel: Posted, tx: Tx) -> None:
        if parcel.parcel == "stuck":
            raise RuntimeError("no")

    async with running(app, migrated_url) as engine:
        stuck = [await engine.publish(Posted("stuck", number)) for number in range(20)]
        others = [await engine.publish(Posted(f"k{number}")) for number in range(20)]
        for other in others:
            await engine.reaches(other, "SUCCEEDED")
        await engine.is_drained()
        assert [await engine.state(id_) for id_ in stuck] == ["WAITING"] + ["PARKED"] * 19


async def test_due_work_and_new_messages_do_not_starve_each_other(migrated_url: str) -> None:
    """C4."""
    app, gate = depot(ordering="none"), asyncio.Event()

    @app.idempotent()
    async def read(note: Note) -> None:
        if note.number == 0:
            await gate.wait()

    async with bench(app, migrated_url, concurrency=4) as engine:
        id_: UUID = uuid7()
        await engine.db.execute(
            "insert into towpath.task (consumer_group, id, type, kind, source, state, held_by, due_at, "
            "waiting_for, payload, content_type) values ('depot', $1, 'note.left', 'event', 'notes', "
            "'WAITING', 'database', clock_timestamp(), 'retry', $2, 'application/json')",
            id_,
            b'{"number": 1}',
        )
        async with engine.member():
            for _ in range(30):
                await engine.publish(Note(0))
            await engine.reaches(id_, "SUCCEEDED")
            gate.set()
            await engine.is_drained("notes")


async def test_the_pool_and_planner_settings_do_not_reach_handlers(migrated_url: str) -> None:
    app, seen = depot(), list[str]()

    @app.transactional()
    async def sort(parcel: Posted, tx: Tx) -> None:
        for name in ("enable_seqscan", "plan_cache_mode"):
            seen.append((await tx.session.execute(text(f"show {name}"))).scalar_one())

    async with running(app, migrated_url) as engine:
        await engine.reaches(await engine.publish(Posted("a")), "SUCCEEDED")
        assert seen == ["on", "auto"]
