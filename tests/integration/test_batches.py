"""Batch handlers: one transaction for many messages, and only the culprit fails."""

from datetime import timedelta
from typing import Any, Final
from uuid import UUID

import pytest
from sqlalchemy import text

from tests.integration.engine import EFFECTS, Note, Posted, bench, depot, effects, running
from towpath import App, Batch, RetryPolicy, Tx
from towpath.errors import UsageError

PATIENT: Final[dict[str, Any]] = {"quiet": timedelta(hours=2)}
"""For batches that are collected for long."""
INSERT = text(
    "insert into public.effect (parcel, number)"
    " select p, n from unnest(cast(:p as text[]), cast(:n as int[])) x(p, n)"
)


def sorting_office(seen: list[int], *, bad: int | None = None, max_wait: str = "50ms") -> App:
    app = depot(retry=RetryPolicy(attempts=2, base="5ms", cap="10ms"))

    @app.batch(max_size=50, max_wait=max_wait)
    async def sort(batch: Batch[Posted], tx: Tx) -> None:
        seen.append(len(batch))
        parcels = [posted.parcel for posted in batch.payloads]
        await tx.session.execute(INSERT, {"p": parcels, "n": [posted.number for posted in batch.payloads]})
        if any(message.payload.number == bad for message in batch):
            raise RuntimeError("one of them is bad")

    return app


async def test_messages_of_many_keys_share_one_transaction(migrated_url: str) -> None:
    """C6: effects and states of a batch commit together, each once."""
    seen: list[int] = []
    async with running(
        sorting_office(seen, max_wait="1m"), migrated_url, concurrency=100, **PATIENT
    ) as office:
        await office.db.execute(EFFECTS)
        ids = [await office.publish(Posted(f"p{number}", number)) for number in range(100)]
        for message_id in ids:
            await office.reaches(message_id, "SUCCEEDED")
        assert [(f"p{number}", number) for number in range(100)] == sorted(
            await effects(office), key=lambda effect: effect[1]
        )
        assert seen == [50, 50]
        assert await office.db.fetchval("select count(distinct xmin::text) from public.effect") == 2


async def test_only_the_culprit_of_a_batch_dies(migrated_url: str) -> None:
    """C17: a failing batch is rolled back and run one by one."""
    seen: list[int] = []
    async with running(sorting_office(seen, bad=7), migrated_url) as office:
        await office.db.execute(EFFECTS)
        ids = [await office.publish(Posted(f"p{number}", number)) for number in range(20)]
        for number, message_id in enumerate(ids):
            await office.reaches(message_id, "DEAD" if number == 7 else "SUCCEEDED")
        assert {number for number in range(20) if number != 7} == {
            number for _, number in await effects(office)
        }
        assert len(await effects(office)) == 19
        assert [ids[7]] == [letter["message_id"] for letter in await office.letters()]


async def test_a_key_is_in_a_batch_once_and_in_order(migrated_url: str) -> None:
    """C10: followers of a key wait for the next batch."""
    seen: list[int] = []
    async with running(sorting_office(seen), migrated_url) as office:
        await office.db.execute(EFFECTS)
        ids = [await office.publish(Posted(f"p{number % 3}", number)) for number in range(15)]
        for message_id in ids:
            await office.reaches(message_id, "SUCCEEDED")
        done = await effects(office)
        for parcel in ("p0", "p1", "p2"):
            of_key = [number for name, number in done if name == parcel]
            assert sorted(of_key) == of_key
        assert max(seen) <= 3


async def test_what_waits_behind_a_batch_starts_it(migrated_url: str) -> None:
    """C17: where order alone keeps it small it does not wait for others to come."""
    seen: list[int] = []
    office_of_one_key = sorting_office(seen, max_wait="1h")
    async with running(
        office_of_one_key, migrated_url, **PATIENT, drain_timeout=timedelta(milliseconds=1)
    ) as office:
        await office.db.execute(EFFECTS)
        ids = [await office.publish(Posted("p", number)) for number in range(5)]
        for message_id in ids[:-1]:
            await office.reaches(message_id, "SUCCEEDED")
        assert seen == [1] * 4
        assert await office.state(ids[-1]) != "SUCCEEDED"


async def test_a_taken_over_member_drops_out_and_the_others_commit(migrated_url: str) -> None:
    """C7: the token of each member is checked in the batch's transaction."""
    app = depot(retry=RetryPolicy(attempts=2, base="5ms", cap="10ms"))
    taken: list[int] = []

    async with bench(app, migrated_url) as office:
        await office.db.execute(EFFECTS)

        @app.batch(max_size=5, max_wait="200ms")
        async def sort(batch: Batch[Note], tx: Tx) -> None:
            with pytest.raises(UsageError):
                _ = tx.attempt
            if not taken:
                taken.append(batch.payloads[0].number)
                await office.db.execute(
                    "update towpath.task set token = id, worker = id where id = $1",
                    batch.messages[0].id,
                )
            parcels = ["note"] * len(batch)
            await tx.session.execute(INSERT, {"p": parcels, "n": [note.number for note in batch.payloads]})

        async with office.member():
            for number in range(5):
                await office.publish(Note(number))
            await office.is_drained("notes")
        assert sorted(range(5)) == sorted(number for _, number in await effects(office))


@pytest.mark.parametrize("is_due_first", [True, False])
async def test_a_batch_of_messages_from_broker_and_database_gives_back_what_each_took(
    migrated_url: str, is_due_first: bool
) -> None:
    """C17: every broker message is acknowledged, and no slot stays taken by either."""
    app = depot()
    seen: list[int] = []

    @app.batch(max_size=2, max_wait="1m")
    async def sort(batch: Batch[Note], tx: Tx) -> None:
        seen.append(len(batch))

    async with running(app, migrated_url, concurrency=4, **PATIENT) as office:

        async def retry() -> UUID:
            return await office.submit_due(Note())

        async def arrive() -> UUID:
            return await office.publish(Note())

        for _ in range(6):
            first, second = (retry, arrive) if is_due_first else (arrive, retry)
            ids = [await first()]
            await office.reaches(ids[0], "RUNNING")
            ids.append(await second())
            for message_id in ids:
                await office.reaches(message_id, "SUCCEEDED")
        await office.is_drained("notes")
    assert [2] * 6 == seen
