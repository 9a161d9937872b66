"""Messages claimed together run and settle together, and no handler notices."""

import asyncio
from collections.abc import Sequence
from contextvars import ContextVar
from datetime import timedelta

import pytest

from tests.integration.engine import Engine, Note, Posted, bench, depot, until
from towpath import App, Batch, Call, RetryPolicy
from towpath.consumer import slots, waves
from towpath.store.claims import Claimed, ClaimStore
from towpath.store.settles import SettleStore
from towpath.store.successes import Settled
from towpath.store.work import Work

WHO: ContextVar[str] = ContextVar("who", default="nobody")


async def settled_together(app: App, url: str, monkeypatch: pytest.MonkeyPatch, count: int) -> list[int]:
    """How many successes each statement settled, of `count` messages that wait when a member starts."""
    sizes: list[int] = []
    succeed = SettleStore.succeed

    async def counted(store: SettleStore, batch: Sequence[tuple[Work, bytes | None]]) -> Settled:
        sizes.append(len(batch))
        return await succeed(store, batch)

    monkeypatch.setattr(SettleStore, "succeed", counted)
    monkeypatch.setattr(waves, "_TURN_SECONDS", 60.0)  # a busy machine takes turns of its own
    async with bench(app, url, concurrency=count) as office:
        for number in range(count):
            await office.publish(Posted(f"p{number}", number))
        async with office.member():
            await office.is_drained()
    return sizes


async def test_what_is_claimed_together_and_waits_for_nothing_is_settled_in_one_statement(
    migrated_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quick handler costs no statement, task or turn of the loop of its own."""
    app = depot()
    tasks: set[object] = set()

    @app.idempotent()
    async def post(posted: Posted, call: Call) -> None:
        tasks.add(asyncio.current_task())

    sizes = await settled_together(app, migrated_url, monkeypatch, 200)
    assert 200 == sum(sizes)
    assert len(sizes) <= 10
    assert len(tasks) <= 10


async def test_a_handler_that_waits_holds_up_none_of_those_claimed_with_it(migrated_url: str) -> None:
    """C10: the rest of its wave runs and is acknowledged meanwhile, whoever was before or behind it."""
    app = depot()
    may_end = asyncio.Event()
    done: list[int] = []

    @app.idempotent()
    async def post(note: Note, call: Call) -> None:
        if note.number == 5:
            await may_end.wait()
        done.append(note.number)

    async with bench(app, migrated_url) as office:
        for number in range(10):
            await office.publish(Note(number))
        async with office.member():
            await until(lambda: len(done) == 9)
            await until(lambda: office.unacknowledged("notes") < 10)
            may_end.set()
            await office.is_drained("notes")
    assert 5 == done[-1]


async def test_the_next_handler_does_not_see_what_one_left_in_its_context(migrated_url: str) -> None:
    """As if each had a task of its own."""
    app = depot()
    seen: list[str] = []

    @app.idempotent()
    async def post(note: Note, call: Call) -> None:
        seen.append(WHO.get())
        WHO.set(f"note {note.number}")

    async with bench(app, migrated_url) as office:
        for number in range(10):
            await office.publish(Note(number))
        async with office.member():
            await office.is_drained("notes")
    assert ["nobody"] * 10 == seen


async def test_a_task_that_a_handler_cancelled_takes_no_other_message_with_it(migrated_url: str) -> None:
    """The others of its wave are settled all the same, and it comes again."""
    app = depot()
    seen: list[int] = []

    @app.idempotent()
    async def post(note: Note, call: Call) -> None:
        task = asyncio.current_task()
        seen.append(note.number)
        if seen.count(5) == 1 and note.number == 5 and task is not None:
            task.cancel()

    async with bench(app, migrated_url) as office:
        for number in range(10):
            await office.publish(Note(number))
        async with office.member():
            await office.is_drained("notes")
    assert sorted([*range(10), 5]) == sorted(seen)


@pytest.mark.parametrize("is_batch", [False, True])
async def test_a_handler_whose_own_wait_was_cancelled_has_failed(migrated_url: str, is_batch: bool) -> None:
    """C12: it spends an attempt and ends dead, and nobody beside it notices."""
    app = depot(retry=RetryPolicy(attempts=2, base="5ms", cap="10ms"))

    async def wait(number: int) -> None:
        if number == 5:
            waited_for = asyncio.get_running_loop().create_future()
            waited_for.cancel()
            await waited_for

    if is_batch:

        @app.batch(max_size=10, max_wait="50ms")
        async def sort(batch: Batch[Note]) -> None:
            for note in batch.payloads:
                await wait(note.number)
    else:

        @app.idempotent()
        async def post(note: Note, call: Call) -> None:
            await wait(note.number)

    async with bench(app, migrated_url) as office:
        ids = [await office.publish(Note(number)) for number in range(10)]
        async with office.member():
            for number, message_id in enumerate(ids):
                await office.reaches(message_id, "DEAD" if number == 5 else "SUCCEEDED")
            await office.is_drained("notes")
        row = await office.row(ids[5])
    assert ("handler_cancelled", 2) == (row["reason_code"], row["attempt"])


async def test_handlers_that_compute_for_long_let_the_loop_come_round(migrated_url: str) -> None:
    """C8: the lease is renewed and the endpoints answer while a wave computes."""
    app = depot()
    begun, turned = 0, set[int]()

    @app.idempotent()
    async def post(note: Note, call: Call) -> None:
        nonlocal begun
        begun += 1
        until_at = asyncio.get_running_loop().time() + 0.03
        while asyncio.get_running_loop().time() < until_at:
            pass

    async def note_turns() -> None:
        while True:
            await asyncio.sleep(0)
            turned.add(begun)

    async with bench(app, migrated_url, beat_every=timedelta(seconds=1)) as office:
        for number in range(16):
            await office.publish(Note(number))
        counting = asyncio.create_task(note_turns())
        async with office.member():
            await office.is_drained("notes")
        counting.cancel()
    assert len(turned - {0, 16}) >= 4, f"only at {turned}"


@pytest.mark.parametrize(("of_the_worker", "of_its_own"), [(3, None), (30, 3)])
async def test_quick_handlers_are_claimed_ahead_of_their_slots_and_run_no_more_at_once(
    migrated_url: str, monkeypatch: pytest.MonkeyPatch, of_the_worker: int, of_its_own: int | None
) -> None:
    """C10: while a claim is on its way slots do not idle, and `concurrency` holds all the same."""
    app = depot(ordering="none")
    claimed, ended, running = 0, 0, 0
    most_claimed, most_running = 0, 0
    claim = ClaimStore.claim

    async def claiming(store: ClaimStore, batch: Sequence[Work], **options: bool) -> Claimed:
        nonlocal claimed
        found = await claim(store, batch, **options)
        claimed += len(found.started)
        return found

    @app.idempotent(concurrency=of_its_own)
    async def post(note: Note, call: Call) -> None:
        nonlocal ended, running, most_claimed, most_running
        running += 1
        most_running, most_claimed = max(most_running, running), max(most_claimed, claimed - ended)
        await asyncio.sleep(0.001)
        running, ended = running - 1, ended + 1

    monkeypatch.setattr(ClaimStore, "claim", claiming)
    monkeypatch.setattr(slots, "_AHEAD_SECONDS", 60.0)  # a busy machine makes no handler slow
    async with bench(app, migrated_url, concurrency=of_the_worker) as office:
        ids = [await office.publish(Note(number)) for number in range(60)]
        async with office.member():
            await office.is_drained("notes")
        assert {(await office.row(id_))["state"] for id_ in ids} == {"SUCCEEDED"}
    assert (3, True) == (most_running, most_claimed > 3)


async def test_one_that_was_claimed_ahead_does_not_see_what_the_one_before_it_left(
    migrated_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It begins when that one ends, in a context of its own."""
    app = depot(ordering="none")
    monkeypatch.setattr(slots, "_AHEAD_SECONDS", 60.0)
    seen: set[str] = set()

    @app.idempotent(concurrency=1)
    async def post(note: Note, call: Call) -> None:
        seen.add(WHO.get())
        WHO.set(str(note.number))
        await asyncio.sleep(0.001)

    async with bench(app, migrated_url) as office:
        for number in range(30):
            await office.publish(Note(number))
        async with office.member():
            await office.is_drained("notes")
    assert seen == {"nobody"}


async def test_what_was_claimed_ahead_goes_back_unspent_at_shutdown(
    migrated_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S4: it never began; another member runs it."""
    app = depot(ordering="none")
    monkeypatch.setattr(slots, "_AHEAD_SECONDS", 60.0)
    may_end, seen = asyncio.Event(), list[int]()

    @app.idempotent()
    async def post(note: Note, call: Call) -> None:
        seen.append(note.number)
        await (asyncio.sleep(0) if note.number < 10 else may_end.wait())

    async with bench(app, migrated_url, concurrency=2, drain_timeout=timedelta(milliseconds=10)) as office:
        for number in range(10):
            await office.publish(Note(number))
        async with office.member():
            await office.is_drained("notes")
            ids = [await office.publish(Note(number)) for number in range(10, 14)]
            await until(lambda: _running(office, 4))
        rows = [await office.row(id_) for id_ in ids]
        assert {(row["state"], row["attempt"], row["deliveries"]) for row in rows} == {("ACCEPTED", 0, 0)}
        assert len(seen) == 12, "two began, two did not"
        may_end.set()
        async with office.member():
            await office.is_drained("notes")
        assert {(await office.row(id_))["state"] for id_ in ids} == {"SUCCEEDED"}


async def _running(office: Engine, count: int) -> bool:
    query = "select count(*) from towpath.task where state = 'RUNNING'"
    return bool(await office.db.fetchval(query) == count)
