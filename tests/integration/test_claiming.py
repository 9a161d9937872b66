"""A batch is claimed by one statement where nothing is gated, else behind the locks of its gates."""

from collections.abc import AsyncIterator
from typing import Any
from uuid import uuid4

import pytest

from tests.integration.test_settling import work
from towpath.store.claims import ClaimStore
from towpath.store.database import Database


@pytest.fixture
async def store(migrated_url: str) -> AsyncIterator[ClaimStore]:
    database = Database(migrated_url, pool_size=2)
    await database.start()
    yield ClaimStore(database, "depot", uuid4(), is_ordered_by_key=True)
    await database.aclose()


async def test_what_nothing_waits_for_is_claimed_by_one_statement(
    store: ClaimStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C5: also where another member has some of it."""
    works = [work(lane="a"), work(lane="b"), work(lane=None)]
    monkeypatch.delattr(Database, "transaction")
    assert set((await store.claim(works[:2])).started) == set(works[:2])
    claimed = await store.claim([work(works[0].id, "a"), works[2]])
    assert claimed.started == [works[2]]
    assert [each.id for each in claimed.lost] == [works[0].id]


async def test_a_gate_of_one_lane_parks_its_follower_and_lets_the_others_start(
    store: ClaimStore, db: Any
) -> None:
    """C10: of a lane with the same name in another source, too."""
    await db.execute("insert into towpath.key_gate values ('depot', 'notes', 'a', $1)", uuid4())
    follower, other, alone, elsewhere = work(lane="a"), work(lane="b"), work(), work(lane="a")
    elsewhere.source = "parcels"
    claimed = await store.claim([follower, other, alone, elsewhere])
    assert (claimed.parked, set(claimed.started)) == ([follower], {other, alone, elsewhere})
    rows = await db.fetch("select id, state, token from towpath.task")
    assert {row["id"]: (row["state"], row["token"]) for row in rows} == {
        follower.id: ("PARKED", None),
        **{each.id: ("RUNNING", each.token) for each in (other, alone, elsewhere)},
    }
