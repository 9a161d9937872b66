"""Messages of a key run one after another, also over retries, deaths and repairs."""

import asyncio
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest

from tests.integration.engine import EFFECTS, Engine, Note, Posted, bench, depot, effects, running, until
from tests.integration.test_effects import write
from towpath.backoff import RetryPolicy
from towpath.context import Tx
from towpath.outcomes import Dead, Retry

HASTY = RetryPolicy(attempts=3, base="1ms", cap="10ms")


async def test_followers_of_a_waiting_message_park_and_run_after_it_in_order(migrated_url: str) -> None:
    """C10."""
    app, fails, is_mended = depot(retry=RetryPolicy(attempts=999, base="1ms", cap="5ms")), 0, asyncio.Event()

    @app.transactional()
    async def sort(parcel: Posted, tx: Tx) -> None:
        nonlocal fails
        if parcel == Posted("a", 0) and not is_mended.is_set():
            fails += 1
            raise RuntimeError("no")
        await write(tx, parcel)

    async with running(app, migrated_url) as engine:
        await engine.db.execute(EFFECTS)
        ids = [await engine.publish(Posted("a", number)) for number in range(10)]
        other = await engine.publish(Posted("b"))
        for id_ in ids[1:]:
            await engine.reaches(id_, "PARKED")
        await engine.reaches(other, "SUCCEEDED")
        await engine.is_drained()
        assert await engine.gates() == 1
        assert fails > 0
        is_mended.set()
        for id_ in ids:
            await engine.reaches(id_, "SUCCEEDED")
        assert [e for e in await effects(engine) if e[0] == "a"] == [("a", number) for number in range(10)]
        assert await engine.gates() == 0
        row = await engine.row(ids[9])
        assert (row["attempt"], row["held_by"], row["payload"]) == (
            1,
            "database",
            b'{"parcel":"a","number":9}',
        )


async def test_a_follower_that_fails_is_the_head_of_its_lane(migrated_url: str) -> None:
    """C10: every message failing twice keeps the order of all."""
    app, tries = depot(retry=HASTY), dict[int, int]()

    @app.transactional()
    async def sort(parcel: Posted, tx: Tx) -> None:
        tries[parcel.number] = tries.get(parcel.number, 0) + 1
        if tries[parcel.number] < 3:
            raise RuntimeError("no")
        await write(tx, parcel)

    async with running(app, migrated_url) as engine:
        await engine.db.execute(EFFECTS)
        ids = [await engine.publish(Posted("a", number)) for number in range(8)]
        for id_ in ids:
            await engine.reaches(id_, "SUCCEEDED")
        assert await effects(engine) == [("a", number) for number in range(8)]
        assert set(tries.values()) == {3}
        assert await engine.gates() == 0


async def test_what_waits_keeps_its_order_when_other_members_run_it(migrated_url: str) -> None:
    """C10: one member left heads that wait and parked followers; two others run them beside new messages."""
    patient = RetryPolicy(attempts=1000, base="1ms", cap="20ms")
    failing, app = depot(retry=patient), depot(retry=patient)
    tries = dict[tuple[str, int], int]()

    @failing.transactional()
    async def fail(parcel: Posted, tx: Tx) -> None:
        raise RuntimeError("no")

    @app.transactional()
    async def sort(parcel: Posted, tx: Tx) -> None:
        name = parcel.parcel, parcel.number
        tries[name] = tries.get(name, 0) + 1
        if tries[name] == 1 and parcel.number % 2:
            raise Retry("not_yet")
        await write(tx, parcel)

    async with bench(app, migrated_url) as engine:
        await engine.db.execute(EFFECTS)
        ids = [await engine.publish(Posted("abc"[n % 3], n)) for n in range(18)]
        async with engine.member(app=failing):
            await engine.is_drained()
        async with engine.member(), engine.member():
            ids += [await engine.publish(Posted("abc"[n % 3], n)) for n in range(18, 24)]
            for id_ in ids:
                await engine.reaches(id_, "SUCCEEDED")
        found = await effects(engine)
        for first, key in enumerate("abc"):
            assert [number for parcel, number in found if parcel == key] == list(range(first, 24, 3))
        assert await engine.gates() == 0


async def test_a_full_lane_holds_its_followers_back_at_the_broker_and_goes_on_in_order(
    migrated_url: str,
) -> None:
    """C10: a cap per key pauses, and loses nothing."""
    app, seen, is_away = depot(retry=RetryPolicy(attempts=1000, base="20ms", cap="20ms")), list[int](), [True]

    @app.transactional()
    async def sort(parcel: Posted) -> None:
        if parcel.number == 0 and is_away[0]:
            raise Retry("away")
        if parcel.parcel == "a":
            seen.append(parcel.number)

    async with running(app, migrated_url, max_parked_per_key=3) as engine:
        ids = [await engine.publish(Posted("a", number)) for number in range(10)]
        other = await engine.publish(Posted("b", 1))
        await engine.reaches(ids[3], "PARKED")
        await engine.reaches(other, "SUCCEEDED")
        assert [await engine.row(id_) for id_ in ids[4:]] == [None] * 6
        assert engine.unacknowledged() >= 6
        is_away[0] = False
        for id_ in ids:
            await engine.reaches(id_, "SUCCEEDED")
        await engine.is_drained()
        assert seen == list(range(10))
        assert await engine.gates() == 0


async def test_a_dead_head_is_skipped_and_its_letter_says_how_many_passed(migrated_url: str) -> None:
    """C10: its followers go on."""
    app, go = depot(retry=RetryPolicy(attempts=2, base="1h", cap="1h")), asyncio.Event()

    @app.transactional()
    async def sort(parcel: Posted, tx: Tx) -> None:
        if parcel.number == 0:
            await go.wait()
            raise RuntimeError("no")
        await write(tx, parcel)

    async with running(app, migrated_url) as engine:
        await engine.db.execute(EFFECTS)
        ids = [await engine.publish(Posted("a", number)) for number in range(4)]
        await engine.reaches(ids[0], "RUNNING")
        go.set()
        await engine.reaches(ids[3], "PARKED")
        await engine.db.execute("update towpath.task set due_at = towpath.clock() where id = $1", ids[0])
        for id_ in ids[1:]:
            await engine.reaches(id_, "SUCCEEDED")
        (letter,) = await engine.letters()
        assert (letter["message_id"], letter["followers_passed"]) == (ids[0], 3)
        assert await effects(engine) == [("a", 1), ("a", 2), ("a", 3)]
        assert await engine.gates() == 0


async def test_a_rejected_head_lets_its_followers_go_on(migrated_url: str) -> None:
    """C10."""
    app, tries = depot(retry=HASTY), list[int]()

    @app.transactional()
    async def sort(parcel: Posted, tx: Tx) -> Any:
        from towpath.outcomes import Reject

        tries.append(parcel.number)
        if parcel.number == 0 and len(tries) == 1:
            raise RuntimeError("no")
        return Reject("no_room") if parcel.number == 0 else None

    async with running(app, migrated_url) as engine:
        ids = [await engine.publish(Posted("a", number)) for number in range(3)]
        for id_, state in zip(ids, ["FAILED", "SUCCEEDED", "SUCCEEDED"], strict=True):
            await engine.reaches(id_, state)
        assert tries == [0, 0, 1, 2]
        assert await engine.gates() == 0


async def test_order_by_partition_holds_messages_of_different_keys_together(migrated_url: str) -> None:
    """C10: the partition is the lane."""
    app, tries = depot(ordering="partition", retry=HASTY), list[int]()

    @app.transactional()
    async def sort(parcel: Posted, tx: Tx) -> None:
        tries.append(parcel.number)
        if parcel.number == 0 and len(tries) == 1:
            raise RuntimeError("no")
        await write(tx, parcel)

    async with bench(app, migrated_url) as engine:
        await engine.db.execute(EFFECTS)
        engine.broker.hub.create("parcels", 1)
        async with engine.member():
            ids = [await engine.publish(Posted(f"k{number}", number)) for number in range(6)]
            for id_ in ids:
                await engine.reaches(id_, "SUCCEEDED")
        assert [number for _, number in await effects(engine)] == list(range(6))
        assert {row["lane"] for row in [await engine.row(id_) for id_ in ids]} == {"parcels:0"}


@pytest.mark.parametrize(("ordering", "payload"), [("none", Posted("a")), ("key", Note())])
async def test_without_order_nothing_waits_for_a_failure(
    migrated_url: str, ordering: Any, payload: Any
) -> None:
    app = depot(ordering=ordering, retry=RetryPolicy(attempts=5, base="1h", cap="1h"))
    is_first = True

    @app.idempotent()
    async def sort(parcel: Posted) -> None:
        await act()

    @app.idempotent()
    async def read(note: Note) -> None:
        await act()

    async def act() -> None:
        nonlocal is_first
        if is_first:
            is_first = False
            raise RuntimeError("no")

    async with running(app, migrated_url) as engine:
        ids = [await engine.publish(payload) for _ in range(5)]
        address = "notes" if isinstance(payload, Note) else "parcels"
        await engine.is_drained(address)
        states = sorted([str(await engine.state(id_)) for id_ in ids])
        assert states == ["SUCCEEDED"] * 4 + ["WAITING"]
        assert await engine.gates() == 0


async def lane_row(engine: Engine, state: str, number: int, **columns: Any) -> UUID:
    """A row of lane `a`, as an engine would have left it."""
    id_ = uuid4()
    values = {
        "consumer_group": "depot",
        "id": id_,
        "type": "parcel.posted",
        "kind": "event",
        "source": "parcels",
        "key": "a",
        "lane": "a",
        "position": number,
        "state": state,
        "held_by": "database",
        "payload": b'{"parcel":"a","number":%d}' % number,
        "content_type": "application/json",
    } | columns
    marks = ", ".join(f"${place}" for place in range(1, len(values) + 1))
    await engine.db.execute(
        f"insert into towpath.task ({', '.join(values)}) values ({marks})", *values.values()
    )
    return id_


async def gate(engine: Engine, head: UUID) -> None:
    await engine.db.execute(
        "insert into towpath.key_gate (consumer_group, source, lane, head) "
        "values ('depot', 'parcels', 'a', $1)",
        head,
    )


async def test_a_gate_whose_head_is_gone_moves_on_to_the_least_follower(migrated_url: str) -> None:
    """C15: somebody deleted or cancelled the head by hand."""
    app = depot()

    @app.transactional()
    async def sort(parcel: Posted, tx: Tx) -> None:
        await write(tx, parcel)

    async with bench(app, migrated_url) as engine:
        await engine.db.execute(EFFECTS)
        parked = [await lane_row(engine, "PARKED", number) for number in (5, 3, 4)]
        oldest = await lane_row(engine, "PARKED", 1, position=None)
        await gate(engine, uuid4())
        async with engine.member():
            for id_ in (*parked, oldest):
                await engine.reaches(id_, "SUCCEEDED")
        assert await effects(engine) == [("a", 1), ("a", 3), ("a", 4), ("a", 5)]
        assert await engine.gates() == 0


async def test_a_lane_gated_behind_the_back_of_a_dead_worker_goes_on(migrated_url: str) -> None:
    """C10: a replay gated the lane while its next ran, and that one's worker died: the head could not
    start because of the RUNNING row, nor the row be claimed because of the gate."""
    app = depot()

    @app.transactional()
    async def sort(parcel: Posted, tx: Tx) -> None:
        await write(tx, parcel)

    async with bench(app, migrated_url) as engine:
        await engine.db.execute(EFFECTS)
        id_ = await engine.publish(Posted("a", 2))
        await lane_row(engine, "RUNNING", 2, id=id_, held_by="broker", worker=uuid4(), token=uuid4())
        head = await lane_row(
            engine,
            "WAITING",
            1,
            waiting_for="replay",
            due_at=await engine.db.fetchval("select clock_timestamp()"),
        )
        await gate(engine, head)
        async with engine.member():
            await engine.reaches(id_, "SUCCEEDED")
            await engine.is_drained()
        assert await effects(engine) == [("a", 1), ("a", 2)]
        assert await engine.gates() == 0


async def test_a_lane_does_not_stand_still_when_its_partition_leaves_and_returns(migrated_url: str) -> None:
    """S1: a handler that outlasts the revoke is handed back; its message comes again."""
    app, starts, go = depot(), list[int](), asyncio.Event()

    @app.idempotent()
    async def sort(parcel: Posted) -> None:
        starts.append(parcel.number)
        await go.wait()

    async with bench(app, migrated_url) as engine, engine.member():
        id_ = await engine.publish(Posted("a", 1))
        await until(lambda: starts == [1])
        hub = engine.broker.hub
        (member,) = hub.group("depot").members
        listener = member._listener  # type: ignore[attr-defined]
        await listener.revoking(
            frozenset({"parcels:0", "parcels:1", "parcels:2", "parcels:3"}), timeout_seconds=0
        )
        member._drop()  # type: ignore[attr-defined]
        member.assign(hub.partitions("parcels"))
        await until(lambda: starts == [1, 1])
        go.set()
        row = await engine.reaches(id_, "SUCCEEDED")
        assert (row["deliveries"], row["attempt"]) == (1, 1), "the first start was unspent"
        await engine.publish(Posted("a", 2))
        await engine.is_drained()


async def test_a_message_of_one_lane_whose_lane_runs_elsewhere_waits_for_it(migrated_url: str) -> None:
    """C10: the index of running lanes has the last word."""
    app = depot()

    @app.transactional()
    async def sort(parcel: Posted, tx: Tx) -> None:
        await write(tx, parcel)

    async with bench(app, migrated_url) as engine:
        await engine.db.execute(EFFECTS)
        worker = uuid4()
        await engine.db.execute(
            "insert into towpath.worker (id, consumer_group, host, lease_until) "
            "values ($1, 'depot', 'h', 'infinity')",
            worker,
        )
        other = await lane_row(engine, "RUNNING", 1, worker=worker, token=uuid4())
        async with engine.member():
            id_ = await engine.publish(Posted("a", 2))
            bystander = await engine.publish(Posted("b", 1))
            await engine.reaches(bystander, "SUCCEEDED")
            await asyncio.sleep(0.3)
            assert await engine.state(id_) is None
            await engine.db.execute("delete from towpath.worker where id = $1", worker)
            await engine.reaches(id_, "SUCCEEDED")
            await engine.reaches(other, "SUCCEEDED")
        # The row had no gate, so nothing but its running held the message back.
        assert sorted(number for parcel, number in await effects(engine) if parcel == "a") == [1, 2]


async def test_a_member_hands_back_only_what_it_does_not_run(migrated_url: str) -> None:
    """The look for strays leaves running work alone."""
    app, go = depot(), asyncio.Event()

    @app.idempotent()
    async def sort(parcel: Posted) -> None:
        await go.wait()

    async with running(app, migrated_url, reap_every=timedelta(milliseconds=20)) as engine:
        id_ = await engine.publish(Posted("a"))
        first = await engine.reaches(id_, "RUNNING")
        await asyncio.sleep(0.3)
        last = await engine.row(id_)
        assert (first["token"], first["version"]) == (last["token"], last["version"])
        go.set()
        await engine.reaches(id_, "SUCCEEDED")


async def test_a_key_dies_while_others_of_it_wait_at_the_broker(migrated_url: str) -> None:
    """D1, C10."""
    app, done = depot(), list[int]()

    @app.transactional()
    async def sort(parcel: Posted) -> None:
        if parcel.number == 0:
            raise Dead("hopeless")
        done.append(parcel.number)

    async with running(app, migrated_url) as engine:
        for number in range(20):
            await engine.publish(Posted("a", number))
        await engine.is_drained()
        assert done == list(range(1, 20))
