"""A consumer dies by SIGKILL at each of its crash points, and a second one finishes the work."""

import os
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

LONG_SCALE: Final = 2.0

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


def cases() -> list[tuple[str, str, CrashPoint]]:
    """Broker, kind and point: each point with each kind and each broker, in a long run each pair of these."""
    is_long = float(os.environ.get("TOWPATH_TEST_SCALE", "1")) >= LONG_SCALE
    brokers = ("kafka", "rabbitmq")
    return [
        (broker, kind, point)
        for index, point in enumerate(SCRIPTS)
        for number, kind in enumerate(("step", "work"))
        for broker in (brokers if is_long else brokers[(index + number) % 2 :][:1])
    ]


@pytest.mark.parametrize(("wire", "kind", "point"), cases(), indirect=["wire"])
async def test_what_a_dying_consumer_left_is_finished_once(
    world: World, kind: str, point: CrashPoint
) -> None:
    """C6, D1, R4: effects once in the database, at least once under one key outside, nothing lost."""
    ids = await produced(world, kind, SCRIPTS[point])
    world.relay()
    world.consumer("dies", **HASTY, **{ENVIRONMENT_VARIABLE: point})
    await world.died("dies")

    world.consumer("finishes", **HASTY)
    await world.until_counted(3, "select count(*) from towpath.task where finished_at is not null")

    await _check(world, kind, ids, SCRIPTS[point])


async def _check(world: World, kind: str, ids: list[UUID], script: dict[str, Any]) -> None:
    """Each message once, in order, under one key outside; a crash spends no attempt."""
    succeeded = ids[1:] if "fate" in script else ids
    attempts = {ids[0]: 1 + script.get("failing_attempts", 0), ids[1]: 1, ids[2]: 1}
    tasks = await world.db.fetch("select id, attempt from towpath.task")
    assert attempts == {task["id"]: task["attempt"] for task in tasks}
    effects = await world.db.fetch("select message_id from effect order by key, seq")
    assert succeeded == [effect["message_id"] for effect in effects]
    calls = await world.db.fetch("select message_id, idempotency_key from outside_call")
    called = {(id_, f"{id_}:act") for id_ in ids} if kind == "work" else set()
    assert called == {(call["message_id"], call["idempotency_key"]) for call in calls}
    letters = await world.db.fetch("select message_id, death_count from towpath.dead_letter")
    dead = [(id_, 1) for id_ in ids if id_ not in succeeded]
    assert dead == [(letter["message_id"], letter["death_count"]) for letter in letters]
    assert await world.db.fetchval("select count(*) from towpath.key_gate") == 0


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
    assert [tuple(letter) for letter in letters] == [(b"\xff garbage", 1)]
    assert await world.states() == {"SUCCEEDED": 1, "DEAD": 1}
