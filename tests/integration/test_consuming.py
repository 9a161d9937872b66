"""What arrives: undecodable, foreign, unknown, repeated, poisonous, and too much at once."""

import asyncio
import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest

from tests.integration.engine import (
    EFFECTS,
    INSTALLATION,
    Note,
    Posted,
    Weigh,
    bench,
    depot,
    effects,
    running,
    until,
)
from tests.integration.test_effects import write
from towpath.backoff import RetryPolicy
from towpath.context import Call, Tx
from towpath.errors import StoreUnavailable
from towpath.messages import Message
from towpath.outcomes import Retry
from towpath.store.claims import Claimed, ClaimStore
from towpath.store.work import Finding, Work

HASTY = RetryPolicy(attempts=3, base="1ms", cap="10ms")
RUNNING = "select count(*) from towpath.task where state = 'RUNNING'"


@pytest.mark.parametrize("body", [b"\0\xff", b"{", b'{"parcel": 1}', b"[" * 10_000, b"1" * 5_000, b""])
async def test_undecodable_bytes_reach_the_catalog_unchanged_and_the_partition_moves_on(
    migrated_url: str, body: bytes
) -> None:
    """C11, A5, X6."""
    app, seen = depot(), list[Posted]()

    @app.transactional()
    async def sort(parcel: Posted) -> None:
        seen.append(parcel)

    async with running(app, migrated_url) as engine:
        bad = await engine.publish_bytes(Posted, body, key="a")
        good = await engine.publish(Posted("a"))
        await engine.reaches(good, "SUCCEEDED")
        row = await engine.reaches(bad, "DEAD")
        (letter,) = await engine.letters()
        (event,) = await engine.events(bad)
        assert (letter["message_id"], letter["stage"], letter["payload"]) == (bad, "decode", body)
        assert letter["reason_code"] in ("decode_not_json", "decode_wrong_shape", "not_json", "wrong_shape")
        assert (letter["attempts"], row["attempt"]) == (0, 0), "the handler never saw it"
        assert (event["event"], event["to_state"]) == ("task.dead", "DEAD")
        assert json.loads(letter["origin"])["offset"] == 0
        assert seen == [Posted("a")]
        await engine.is_drained()


async def test_a_message_without_our_headers_reaches_the_catalog_once(migrated_url: str) -> None:
    """C11: also when it comes again."""
    app = depot()

    @app.transactional()
    async def sort(parcel: Posted) -> None: ...

    async with bench(app, migrated_url) as engine:
        await engine.publish_raw("parcels", b"\0\xff", (("x", b"\0"), ("y", b"\xff")), key="k\0")
        async with engine.member():
            await engine.is_drained()
        engine.broker.hub.group("depot").committed.clear()
        async with engine.member():
            await engine.is_drained()
        (letter,) = await engine.letters()
        (row,) = await engine.db.fetch("select * from towpath.task")
        (event,) = await engine.events(row["id"])
        (copy,) = await engine.outbox("copy")
        assert (letter["stage"], letter["reason_code"]) == ("decode", "missing_header")
        assert (letter["payload"], letter["death_count"], letter["key"]) == (b"\0\xff", 1, r"k\x00")
        assert (row["state"], row["type"]) == ("DEAD", "undecodable")
        assert (event["event"], event["from_state"], event["to_state"]) == ("task.dead", None, "DEAD")
        assert copy["payload"] == b"\0\xff"


async def test_a_null_value_is_none_for_those_who_take_it_and_undecodable_for_others(
    migrated_url: str,
) -> None:
    """C11."""
    app, seen, notes = depot(), list[Any](), list[Any]()

    @app.transactional()
    async def sort(parcel: Posted) -> None: ...

    @app.transactional()
    async def read(note: Note | None) -> None:
        notes.append(note)

    @app.idempotent(type="scan", destination="scans")
    async def scan(data: bytes) -> None:
        seen.append(data)
        if len(seen) == 1:
            raise Retry("again", after="1ms")

    app.foreign("scans", type="scan")
    async with running(app, migrated_url) as engine:
        bad = await engine.publish_bytes(Posted, None, key="a")
        empty = await engine.publish_bytes(Note, None)
        await engine.publish_raw("scans", None)
        await engine.reaches(empty, "SUCCEEDED")
        await engine.reaches(bad, "DEAD")
        await until(lambda: len(seen) == 2)
        await engine.is_drained("parcels", "scans")
        (letter,) = await engine.letters()
        assert seen == [None, None]
        assert notes == [None]
        assert (letter["reason_code"], letter["payload"]) == ("wrong_shape", None)


async def test_repeats_of_a_message_are_skipped(migrated_url: str) -> None:
    """C5, A8."""
    app, calls = depot(ordering="none"), list[Any]()

    @app.transactional()
    async def sort(parcel: Posted, tx: Tx) -> None:
        calls.append(tx.message_id)
        await write(tx, parcel)
        await asyncio.sleep(0.05)

    async with running(app, migrated_url) as engine:
        await engine.db.execute(EFFECTS)
        id_ = await engine.publish(Posted("a"), times=5)
        await engine.is_drained()
        await engine.publish(Posted("a"), message_id=id_)
        await engine.is_drained()
        row = await engine.row(id_)
        assert calls == [id_]
        assert await effects(engine) == [("a", 0)]
        assert (row["deliveries"], row["version"]) == (1, 2)


async def test_repeats_are_looked_up_before_they_are_claimed(
    migrated_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C5: one that was settled already makes the next be looked up first; what is new among them runs."""
    app, calls, asked = depot(), list[str](), list[UUID]()
    claim, findings = ClaimStore.claim, ClaimStore.findings

    async def asking(store: ClaimStore, batch: Sequence[Work], **options: bool) -> Claimed:
        asked.extend(work.id for work in batch)
        return await claim(store, batch, **options)

    @app.idempotent()
    async def sort(parcel: Posted) -> None:
        calls.append(parcel.parcel)

    monkeypatch.setattr(ClaimStore, "claim", asking)
    async with running(app, migrated_url) as engine:
        old = [await engine.publish(Posted(f"old {number}")) for number in range(40)]
        await engine.is_drained()
        await engine.publish(Posted("old 0"), message_id=old[0])
        await engine.is_drained()
        asked.clear()
        for number, id_ in enumerate(old):
            await engine.publish(Posted(f"old {number}"), message_id=id_)
        await engine.is_drained()
        assert asked == []

        async def unanswered(_store: ClaimStore, _ids: Sequence[UUID]) -> dict[UUID, Finding]:
            monkeypatch.setattr(ClaimStore, "findings", findings)
            raise StoreUnavailable("no answer")

        monkeypatch.setattr(ClaimStore, "findings", unanswered)
        await engine.publish(Posted("old 1"), message_id=old[1])
        await engine.is_drained()
        assert asked == [old[1]], "what could not be looked up is claimed"

        new = await engine.publish(Posted("new"))
        unreadable = await engine.publish_bytes(Posted, b"{", message_id=old[2])
        await engine.reaches(new, "SUCCEEDED")
        await engine.is_drained()
        assert unreadable == old[2]
        assert sorted(calls) == sorted(["new", *(f"old {number}" for number in range(40))])
        assert {(await engine.row(id_))["version"] for id_ in [*old, new]} == {2}


async def test_a_late_duplicate_does_not_start_a_waiting_retry_early(migrated_url: str) -> None:
    """C20."""
    app, calls = depot(retry=RetryPolicy(attempts=3, base="1h", cap="1h")), list[int]()

    @app.transactional()
    async def sort(parcel: Posted) -> None:
        calls.append(1)
        raise RuntimeError("no")

    async with running(app, migrated_url) as engine:
        id_ = await engine.publish(Posted("a"))
        first = await engine.reaches(id_, "WAITING")
        await engine.publish(Posted("a"), message_id=id_, times=3)
        await engine.is_drained()
        last = await engine.row(id_)
        assert calls == [1]
        assert (last["state"], last["due_at"], last["version"]) == (
            "WAITING",
            first["due_at"],
            first["version"],
        )


async def test_a_message_that_another_member_runs_is_neither_acknowledged_nor_run_twice(
    migrated_url: str,
) -> None:
    """C6: as after a rebalance, when two members hold one message for a while."""
    app, calls, go = depot(ordering="none"), list[int](), asyncio.Event()

    @app.idempotent()
    async def read(note: Note) -> None:
        calls.append(1)
        await go.wait()

    async with bench(app, migrated_url) as engine, engine.member(), engine.member():
        id_ = await engine.publish(Note(1))
        await engine.reaches(id_, "RUNNING")
        hub = engine.broker.hub
        (record,) = hub.records("notes")
        for partition in hub.partitions("notes"):
            hub.log(partition).append(record)
        hub.wake()
        await until(lambda: sum(each._intake.count for each in hub.group("depot").members) == 5)  # type: ignore[attr-defined]
        await asyncio.sleep(0.3)
        assert engine.unacknowledged("notes") == 5
        go.set()
        await engine.is_drained("notes")
        row = await engine.row(id_)
        assert (calls, row["state"], row["deliveries"]) == ([1], "SUCCEEDED", 1)


async def test_a_message_that_killed_its_process_every_time_reaches_the_catalog(migrated_url: str) -> None:
    """D5: with the last permitted delivery gone, it is not run again."""
    app, calls = depot(), list[Any]()

    @app.idempotent()
    async def sort(parcel: Posted, call: Call) -> None:
        calls.append(parcel.number)

    async with bench(app, migrated_url, max_deliveries=3) as engine:
        ids = [await engine.publish(Posted(f"k{number}", number)) for number in range(2)]
        for id_, number in zip(ids, range(2), strict=True):
            await engine.db.execute(
                "insert into towpath.task (consumer_group, id, type, kind, source, key, lane, state, "
                "held_by, worker, token, deliveries) values ('depot', $1, 'parcel.posted', 'event', "
                "'parcels', $2, $2, 'RUNNING', 'broker', gen_random_uuid(), gen_random_uuid(), $3)",
                id_,
                f"k{number}",
                3 - number,
            )
        async with engine.member():
            dead = await engine.reaches(ids[0], "DEAD")
            last = await engine.reaches(ids[1], "SUCCEEDED")
            await engine.is_drained()
        (letter,) = await engine.letters()
        assert (dead["reason_code"], dead["attempt"], letter["payload"]) == (
            "deliveries_exhausted",
            0,
            b'{"parcel":"k0","number":0}',
        )
        assert "started 3 times without an outcome" in letter["error_message"]
        assert (last["deliveries"], calls) == (3, [1])


async def test_an_outcome_begins_the_count_of_deliveries_anew(migrated_url: str) -> None:
    """D5: twenty retries are no poison."""
    app = depot(retry=RetryPolicy(attempts=12, base="1ms", cap="1ms"))

    @app.idempotent()
    async def sort(parcel: Posted, call: Call) -> None:
        if call.attempt.attempt < 12:
            raise RuntimeError("no")

    async with running(app, migrated_url, max_deliveries=2) as engine:
        row = await engine.reaches(await engine.publish(Posted("a")), "SUCCEEDED", "DEAD")
        assert (row["state"], row["attempt"], row["deliveries"]) == ("SUCCEEDED", 12, 1)


async def test_a_type_without_handler_is_held_for_a_rolling_deploy(migrated_url: str) -> None:
    """It waits without spending anything, and the next version of the group handles it."""
    old, new = depot(retry=HASTY), depot(retry=HASTY)

    @old.idempotent()
    async def read(parcel: Posted) -> None: ...

    @new.idempotent(destination="parcels")
    async def read_new(note: Note) -> None: ...

    async with bench(old, migrated_url) as engine:
        async with engine.member():
            spec_of_note = await engine.publish(Note(1), address="parcels")
            row = await engine.reaches(spec_of_note, "WAITING")
            await engine.is_drained()
            assert (row["attempt"], row["reason_code"]) == (0, "unknown_type")
            assert (
                row["error_message"] == "depot has no handler for 'note.left': deploy one, or app.ignore it"
            )
        async with engine.member(app=new):
            row = await engine.reaches(spec_of_note, "SUCCEEDED")
            assert row["attempt"] == 1


async def test_a_type_that_nobody_handled_for_too_long_is_dead(migrated_url: str) -> None:
    app = depot(retry=RetryPolicy(attempts=1, base="20ms", cap="20ms"), unknown_max_age="200ms")

    @app.idempotent()
    async def read(parcel: Posted) -> None: ...

    async with running(app, migrated_url) as engine:
        id_ = await engine.publish(Note(1), address="parcels")
        row = await engine.reaches(id_, "DEAD")
        assert row["reason_code"] == "unknown_type"
        assert row["finished_at"] - row["created_at"] >= timedelta(milliseconds=200)
        assert len(await engine.letters()) == 1


async def test_an_ignored_type_is_acknowledged_without_a_row(migrated_url: str) -> None:
    app = depot()

    @app.idempotent()
    async def read(parcel: Posted) -> None: ...

    app.ignore("note.left")
    async with running(app, migrated_url) as engine:
        id_ = await engine.publish(Note(1), address="parcels")
        await engine.is_drained()
        assert await engine.row(id_) is None


async def test_foreign_messages_are_named_by_their_record_and_run_once(migrated_url: str) -> None:
    """C24."""
    app, seen = depot(), list[Any]()

    @app.transactional(type="scan", destination="scans")
    async def scan(data: Message[bytes], tx: Tx) -> None:
        seen.append((data.payload, data.key, data.headers))
        if len(seen) == 1:
            raise RuntimeError("once more")

    app.foreign("scans", type="scan")
    async with bench(app, migrated_url) as engine:
        await engine.publish_raw("scans", b"one", (("h", b"\xff"),), key="a")
        async with engine.member():
            await until(lambda: len(seen) == 2)
            await engine.is_drained("scans")
        engine.broker.hub.group("depot").committed.clear()
        async with engine.member():
            await engine.is_drained("scans")
        (row,) = await engine.db.fetch("select * from towpath.task")
        assert seen == [(b"one", "a", (("h", b"\xff"),))] * 2
        assert (row["state"], row["type"], row["attempt"]) == ("SUCCEEDED", "scan", 2)


async def test_a_foreign_rule_is_found_where_its_destination_has_another_address(migrated_url: str) -> None:
    app, seen = depot(), list[bytes]()

    @app.idempotent(type="scan", destination="scans")
    async def scan(data: bytes) -> None:
        seen.append(data)

    app.foreign("scans", type="scan")
    async with bench(app, migrated_url) as engine:
        await engine.db.execute("insert into towpath.destination values ('scans', 0, 'eu.scans.v2')")
        async with engine.member():
            await engine.publish_raw("eu.scans.v2", b"one")
            await until(lambda: seen == [b"one"])
            await engine.is_drained("eu.scans.v2")


async def test_a_task_of_another_database_reaches_the_catalog(migrated_url: str) -> None:
    """Its body is in a row that this database never had."""
    app = depot()

    @app.transactional()
    async def weigh(parcel: Weigh) -> None: ...

    async with running(app, migrated_url) as engine:
        id_ = await engine.publish(Weigh("a"), body="row")
        row = await engine.reaches(id_, "DEAD")
        await engine.is_drained("tasks.depot")
        assert row["reason_code"] == "wrong_database"


async def test_a_task_of_ours_whose_row_expired_is_acknowledged(migrated_url: str) -> None:
    app = depot()

    @app.transactional()
    async def weigh(parcel: Weigh) -> None: ...

    async with bench(app, migrated_url) as engine:
        await engine.db.execute(
            "update towpath.meta set value = $1 where name = 'installation_id'", INSTALLATION
        )
        async with engine.member():
            id_ = await engine.publish(Weigh("a"), body="row")
            await engine.is_drained("tasks.depot")
            assert await engine.row(id_) is None
            assert await engine.letters() == []


async def test_a_message_that_cannot_be_stored_is_found_in_its_batch_and_buried_alone(
    migrated_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C17: the others of the batch are claimed."""
    from towpath.consumer import receiving

    app, seen = depot(), list[int]()

    @app.idempotent()
    async def sort(parcel: Posted) -> None:
        seen.append(parcel.number)

    real = receiving.read

    def spoil(*arguments: Any, **options: Any) -> Any:
        work = real(*arguments, **options)
        if work.key == "k5":
            work.key = "nul \0"
        if work.key == "k6":
            work.type = None
        return work

    monkeypatch.setattr(receiving, "read", spoil)
    async with bench(app, migrated_url) as engine:
        for number in range(12):
            await engine.publish(Posted(f"k{number}", number))
        async with engine.member():
            await engine.is_drained()
        letters = await engine.letters()
        assert sorted(seen) == [0, 1, 2, 3, 4, 7, 8, 9, 10, 11]
        assert [(each["stage"], each["reason_code"]) for each in letters] == [("decode", "not_storable")] * 2
        assert {b'{"parcel":"k5","number":5}', b'{"parcel":"k6","number":6}'} == {
            each["payload"] for each in letters
        }


async def test_intake_is_bounded_while_handlers_are_slow(migrated_url: str) -> None:
    """C16."""
    app, go = depot(ordering="none"), asyncio.Event()

    @app.idempotent()
    async def read(note: Note) -> None:
        await go.wait()

    async with bench(app, migrated_url, concurrency=4, max_in_flight=20) as engine:
        for number in range(200):
            await engine.publish(Note(number))
        async with engine.member():
            await until(
                lambda: _counted(engine, 4, "select count(*) from towpath.task where state = 'RUNNING'")
            )
            (member,) = engine.broker.hub.group("depot").members
            assert member._intake.count == 20  # type: ignore[attr-defined]
            assert await _counted(engine, 4, "select count(*) from towpath.task")
            go.set()
            await engine.is_drained("notes")
        assert await _counted(engine, 200, "select count(*) from towpath.task where state = 'SUCCEEDED'")


async def _counted(engine: Any, expected: int, query: str) -> bool:
    return bool(expected == await engine.db.fetchval(query))


async def test_a_batch_is_claimed_by_one_statement(
    migrated_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No round trip per message, and a token per batch."""
    app, go = depot(), asyncio.Event()

    @app.idempotent()
    async def sort(parcel: Posted) -> None:
        await go.wait()

    async with bench(app, migrated_url, concurrency=50) as engine:
        for number in range(50):
            await engine.publish(Posted(f"k{number}"))
        async with engine.member():
            await until(
                lambda: _counted(engine, 50, "select count(*) from towpath.task where state = 'RUNNING'")
            )
            tokens = await engine.db.fetchval("select count(distinct token) from towpath.task")
            assert tokens <= 3
            go.set()


async def test_messages_of_two_groups_are_two_tasks(migrated_url: str) -> None:
    """D1: one outcome per message and group."""
    from towpath.app import App

    one, two = depot(), App("office", retry=RetryPolicy(attempts=1))

    @one.transactional()
    async def sort(parcel: Posted) -> None: ...

    @two.transactional()
    async def sort_too(parcel: Posted) -> None:
        raise RuntimeError("no")

    async with bench(one, migrated_url) as engine, engine.member(), engine.member(app=two):
        id_ = await engine.publish(Posted("a"))
        await engine.reaches(id_, "SUCCEEDED")
        await until(lambda: _counted(engine, 1, "select count(*) from towpath.dead_letter"))
        rows = await engine.db.fetch("select consumer_group, state from towpath.task where id = $1", id_)
        assert {(row["consumer_group"], row["state"]) for row in rows} == {
            ("depot", "SUCCEEDED"),
            ("office", "DEAD"),
        }


async def test_suspects_that_leave_while_another_is_taken_over_are_not_taken_over(
    migrated_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C19, S1: their partition was revoked in the middle of a claim."""
    app, calls, is_released = depot(), list[int](), False

    @app.idempotent()
    async def sort(parcel: Posted) -> None:
        calls.append(parcel.number)

    async with bench(app, migrated_url) as engine:
        for number in range(4):
            id_ = await engine.publish(Posted(f"k{number}", number))
            await engine.db.execute(
                "insert into towpath.task (consumer_group, id, type, kind, source, key, lane, state, "
                "held_by, worker, token, deliveries) values ('depot', $1, 'parcel.posted', 'event', "
                "'parcels', $2, $2, 'RUNNING', 'broker', gen_random_uuid(), gen_random_uuid(), 1)",
                id_,
                f"k{number}",
            )
        real = ClaimStore.claim

        async def claim(self: ClaimStore, batch: Any, *, takes_over: bool = False) -> Any:
            nonlocal is_released
            if takes_over and not is_released:
                is_released = True
                (member,) = engine.broker.hub.group("depot").members
                member._listener._held.release()  # type: ignore[attr-defined]
            return await real(self, batch, takes_over=takes_over)

        monkeypatch.setattr(ClaimStore, "claim", claim)
        async with engine.member() as member:
            await engine.is_drained()
            assert not member.task.done()
        assert sorted(calls) == [0, 1, 2, 3]


@pytest.mark.parametrize("method", ["claim", "start_due"])
async def test_a_claim_that_is_under_way_at_shutdown_goes_back_unspent(
    migrated_url: str, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """S4: it is committed, its handler never began, and its message is no suspect afterwards."""
    app = depot()
    asked = asyncio.Event()
    real = getattr(ClaimStore, method)

    @app.idempotent()
    async def post(note: Note) -> None: ...

    async def unanswered(*args: Any, **options: Any) -> Any:
        found = await real(*args, **options)
        if not (found.started if isinstance(found, Claimed) else found):
            return found
        asked.set()
        return await asyncio.Event().wait()

    async with bench(app, migrated_url, reap_every=timedelta(minutes=1)) as office:
        with monkeypatch.context() as patched:
            patched.setattr(ClaimStore, method, unanswered)
            message_id = await (office.publish(Note()) if method == "claim" else office.submit_due(Note()))
            async with office.member():
                await asked.wait()
        row = await office.row(message_id)
    assert ("ACCEPTED" if method == "claim" else "WAITING", 0) == (row["state"], row["deliveries"])
