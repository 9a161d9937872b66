"""What becomes of a handler that fails for a while or is refused, by its history in the database (A2, A4)."""

from datetime import timedelta
from typing import Any, Final
from uuid import UUID

import asyncpg
import pytest

from tests.acceptance.apps.policy import BASE_SECONDS, CAP_SECONDS
from tests.acceptance.world import World
from towpath.outbox import emit, submit

_ROUNDING: Final = timedelta(milliseconds=5)


async def produced(world: World, kind: str, **script: Any) -> UUID:
    """Commit one message that handles as told; its id."""
    async with world.db.transaction():
        if kind == "step":
            return await emit(world.db, world.messages.step(is_watched=True, **script))
        return (await submit(world.db, world.messages.work(**script))).id


async def task_of(world: World, message_id: UUID) -> "asyncpg.Record":
    """The group's row of a message."""
    query = "select * from towpath.task where consumer_group = $1 and id = $2"
    return await world.db.fetchrow(query, world.group, message_id)


async def history_of(world: World, message_id: UUID) -> "list[asyncpg.Record]":
    """What was recorded of a task, in order."""
    query = "select * from towpath.task_event where consumer_group = $1 and task_id = $2 order by seq"
    return await world.db.fetch(query, world.group, message_id)


@pytest.mark.parametrize("kind", ["step", "work"])
async def test_a_handler_that_fails_twice_is_tried_three_times_and_never_early(
    world: World, kind: str
) -> None:
    """A2, C4, C12: attempts, delays by the database's clock, history, effect once."""
    message_id = await produced(world, kind, key="a", n=1, failing_attempts=2)
    follower_id = await produced(world, kind, key="a", n=2)
    other_id = await produced(world, kind, key="b", n=1)
    world.relay()
    world.consumer()

    await world.until_state("SUCCEEDED", 3)

    task = await task_of(world, message_id)
    assert (task["attempt"], task["run_no"], task["reason_code"]) == (3, 0, None)
    retries = await history_of(world, message_id)
    assert [(line["event"], line["from_state"], line["to_state"], line["attempt"]) for line in retries] == [
        ("task.retry_scheduled", "RUNNING", "WAITING", 1),
        ("task.retry_scheduled", "RUNNING", "WAITING", 2),
    ]
    assert [line["error_class"].rpartition(".")[2] for line in retries] == ["PassingTrouble"] * 2
    calls = await world.db.fetch("select * from outside_call where message_id = $1 order by seq", message_id)
    assert [call["attempt"] for call in calls] == [1, 2, 3]
    for spent, (line, failed, tried) in enumerate(zip(retries, calls, calls[1:], strict=False), 1):
        # Due a delay after the failure, which came behind the call; the line is written a little later.
        longest = min(CAP_SECONDS, BASE_SECONDS * 2**spent)
        assert failed["at"] <= line["at"]
        assert line["due_at"] - failed["at"] >= timedelta(seconds=BASE_SECONDS) - _ROUNDING
        assert line["due_at"] - line["at"] <= timedelta(seconds=longest) + _ROUNDING
        assert line["due_at"] <= tried["at"], "tried before it was due"
    effects = await world.db.fetch("select message_id from effect where key = 'a' order by seq")
    assert [message_id, follower_id] == [row["message_id"] for row in effects]
    assert await history_of(world, other_id) == []
    assert (await task_of(world, other_id))["attempt"] == 1


@pytest.mark.parametrize("kind", ["step", "work"])
async def test_a_rejected_message_fails_at_once(world: World, kind: str) -> None:
    """A4, D1: FAILED with the reason, one attempt, no dead letter, and the key goes on."""
    message_id = await produced(world, kind, key="a", n=1, fate="is_rejected")
    follower_id = await produced(world, kind, key="a", n=2)
    world.relay()
    world.consumer()

    await world.until_state("SUCCEEDED")
    await world.until_state("FAILED")

    task = await task_of(world, message_id)
    reason = {"step": "told_to", "work": "refused_outside"}[kind]
    assert ("FAILED", 1, reason) == (task["state"], task["attempt"], task["reason_code"])
    assert task["finished_at"] is not None
    retries = [
        line for line in await history_of(world, message_id) if line["event"] == "task.retry_scheduled"
    ]
    assert retries == []
    assert await world.db.fetchval("select count(*) from outside_call where message_id = $1", message_id) == 1
    assert await world.db.fetchval("select count(*) from towpath.dead_letter") == 0
    # A returned Reject commits what the handler wrote; a raised refusal does not.
    committed = [message_id, follower_id] if kind == "step" else [follower_id]
    effects = await world.db.fetch("select message_id from effect order by seq")
    assert committed == [row["message_id"] for row in effects]
