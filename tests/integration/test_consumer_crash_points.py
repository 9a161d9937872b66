"""A consumer dies by SIGKILL at each of its crash points, and a second one finishes the work."""

from typing import Any, Final
from uuid import UUID

import pytest

from tests.acceptance.brokers import WireMessage
from tests.acceptance.world import World
from towpath.crashpoints import ENVIRONMENT_VARIABLE, CrashPoint
from towpath.outbox import emit, submit

SCRIPTS: Final[dict[CrashPoint, dict[str, Any]]] = {
    CrashPoint.RECEIVED_BEFORE_CLAIM: {},
    CrashPoint.CLAIMED_BEFORE_HANDLE: {},
    CrashPoint.HANDLED_BEFORE_SETTLE: {},
    CrashPoint.SETTLED_BEFORE_COMMIT: {},
    CrashPoint.COMMITTED_BEFORE_ACK: {},
    CrashPoint.WAITING_BEFORE_ACK: {"failing_attempts": 1},
    CrashPoint.DUE_STARTED: {"failing_attempts": 1},
    CrashPoint.BURIED_BEFORE_ACK: {"fate": "dies"},
}
"""The consumer's crash points, and what the first message must do to pass them."""

# A dead worker is missed at once: the tests wait for that.
HASTY: Final = {
    "TOWPATH_WORKER__LEASE": "3s",
    "TOWPATH_WORKER__BEAT_EVERY": "500ms",
    "TOWPATH_WORKER__REAP_EVERY": "500ms",
}


async def produced(world: World, kind: str, script: dict[str, Any]) -> list[UUID]:
    """Commit a message that does as told, its follower, and one of another key."""
    ids: list[UUID] = []
    async with world.db.transaction():
        for key, n, how in (("a", 1, script), ("a", 2, {}), ("b", 1, {})):
            message = getattr(world.messages, kind)(key=f"{kind} {key}", n=n, **how)
            if kind == "step":
                ids.append(await emit(world.db, message))
            else:
                ids.append((await submit(world.db, message)).id)
    return ids


@pytest.mark.parametrize("point", SCRIPTS)
async def test_what_a_dying_consumer_left_is_finished_once(world: World, point: CrashPoint) -> None:
    """C6, D1, R4: effects once in the database, at least once under one key outside, nothing lost."""
    worlds = {"step": world, "work": await world.sibling()}
    ids = {kind: await produced(each, kind, SCRIPTS[point]) for kind, each in worlds.items()}
    world.relay()
    for kind, each in worlds.items():
        each.consumer(f"{kind}-dies", **HASTY, **{ENVIRONMENT_VARIABLE: point})
    for kind, each in worlds.items():
        await each.died(f"{kind}-dies")

    for kind, each in worlds.items():
        each.consumer(f"{kind}-finishes", **HASTY)
    is_death = point is CrashPoint.BURIED_BEFORE_ACK
    for each in worlds.values():
        await each.until_state("SUCCEEDED", 2 if is_death else 3)
        await each.until_state("DEAD", int(is_death))

    for kind, each in worlds.items():
        await _check(each, kind, ids[kind], is_death=is_death)


async def _check(world: World, kind: str, ids: list[UUID], *, is_death: bool) -> None:
    rows = await world.db.fetch("select id from towpath.task where consumer_group = $1", world.group)
    assert set(ids) == {row["id"] for row in rows}
    effects = await world.db.fetch("select message_id from effect where handler = $1 order by key, seq", kind)
    assert ids[1 if is_death else 0 :] == [row["message_id"] for row in effects]
    query = "select message_id, idempotency_key from outside_call where message_id = any($1::uuid[])"
    calls = await world.db.fetch(query, ids)
    assert {"step": set(), "work": {(id_, f"{id_}:act") for id_ in ids}}[kind] == {
        tuple(row) for row in calls
    }
    query = "select message_id, death_count from towpath.dead_letter where consumer_group = $1"
    letters = await world.db.fetch(query, world.group)
    assert ([(ids[0], 1)] if is_death else []) == [tuple(row) for row in letters]
    assert await world.db.fetchval(
        "select count(*) from towpath.key_gate where consumer_group = $1", world.group
    ) == 0


async def test_an_undecodable_message_is_buried_once_whoever_dies_behind_it(world: World) -> None:
    """C6, C11, D1: the catalog row of bytes that no claim can hold is written once."""
    address = world.steps
    await world.broker.send([WireMessage(address, b"a", (), b"\xff garbage", "0.x")])
    world.relay()
    world.consumer("dies", **HASTY, **{ENVIRONMENT_VARIABLE: CrashPoint.BURIED_BEFORE_ACK})
    await world.died("dies")
    world.consumer("finishes", **HASTY)
    async with world.db.transaction():
        await emit(world.db, world.messages.step(key="a", n=1))

    await world.until_state("SUCCEEDED")

    letters = await world.db.fetch("select payload, death_count from towpath.dead_letter")
    assert [tuple(row) for row in letters] == [(b"\xff garbage", 1)]
    assert await world.states() == {"SUCCEEDED": 1, "DEAD": 1}
