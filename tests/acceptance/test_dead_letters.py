"""What is hopeless is in the catalog and in the broker's queue, once, and comes back by replay (A3, A5)."""

import json
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import pytest

from tests.acceptance.apps.policy import ATTEMPTS
from tests.acceptance.brokers import WireMessage
from tests.acceptance.world import World
from towpath.outbox import emit, submit

GARBAGE = b"\xff\xfe not \x00 json"


async def dead_letters_of(world: World) -> "list[asyncpg.Record]":
    """The group's catalog."""
    query = "select * from towpath.dead_letter where consumer_group = $1 order by id"
    return await world.db.fetch(query, world.group)


@pytest.mark.parametrize("kind", ["step", "work"])
async def test_an_exhausted_message_is_dead_once_and_succeeds_when_it_is_replayed(
    world: World, kind: str
) -> None:
    """A3, D1, D3, D4: one catalog row, one copy at the broker, replay by the CLI, effect once."""
    await world.db.execute("insert into cause values ('standing')")
    async with world.db.transaction():
        message = getattr(world.messages, kind)(key="a", n=1, fate="fails_while_caused")
        if kind == "step":
            message_id: UUID = await emit(world.db, message)
        else:
            message_id = (await submit(world.db, message)).id
    world.relay()
    world.consumer()

    await world.until_state("DEAD")
    await world.until_sent()

    address = world.steps if kind == "step" else world.tasks
    (letter,) = await dead_letters_of(world)
    assert (message_id, "handle", "open", 1, ATTEMPTS) == (
        letter["message_id"],
        letter["stage"],
        letter["state"],
        letter["death_count"],
        letter["attempts"],
    )
    assert letter["error_class"].endswith("StandingTrouble")
    assert json.loads(letter["payload"])["fate"] == "fails_while_caused"
    (copy,) = await world.broker.dead_letters(world.group, address)
    assert str(message_id) == copy.header("ce_id")
    assert (letter["payload"], letter["reason_code"]) == (copy.body, copy.header("towpath-dead-reason"))
    assert await world.db.fetchval("select count(*) from effect") == 0
    listed = json.loads(await world.cli("dlq", "list", "--group", world.group, "--json"))
    assert str(message_id) in json.dumps(listed)

    await world.db.execute("delete from cause")
    await world.cli("dlq", "replay", "--group", world.group, "--yes", "--reason", "the cause is gone")
    await world.until_state("SUCCEEDED")

    assert await world.db.fetchval("select count(*) from effect where message_id = $1", message_id) == 1
    (letter,) = await dead_letters_of(world)
    assert (letter["state"], letter["replay_count"]) == ("replayed", 1)
    audit = await world.db.fetchrow("select * from towpath.audit")
    assert (audit["action"], audit["reason"]) == ("dlq.replay", "the cause is gone")
    calls = await world.db.fetch(
        "select distinct idempotency_key from outside_call where message_id = $1", message_id
    )
    assert (1 if kind == "work" else 0) == len(calls)
    assert list(await world.broker.dead_letters(world.group, address)) == []


async def test_undecodable_bytes_reach_the_catalog_unchanged_and_the_next_message_proceeds(
    world: World,
) -> None:
    """A5, C11: a garbled body, and bytes without any of our headers."""
    await world.broker.listen(world.steps)
    world.relay()
    world.consumer()
    good = await _one_step(world, "a", 1)
    await world.until_state("SUCCEEDED")
    (wire,) = await world.broker.heard(world.steps)
    assert str(good) == wire.header("ce_id")

    garbled_id = uuid4()
    garbled = wire.changed(headers={"ce_id": str(garbled_id)}, body=GARBAGE)
    alien = WireMessage(wire.address, wire.key, (), GARBAGE, wire.routing_key)
    await world.broker.send([garbled, alien])
    following = await _one_step(world, "a", 2)
    await world.until_state("SUCCEEDED", 2)
    await world.until_state("DEAD", 2)
    await world.until_sent()

    letters = {row["reason_code"]: row for row in await dead_letters_of(world)}
    assert {"not_json", "missing_header"} == {reason.removeprefix("decode_") for reason in letters}
    assert [letter["payload"] for letter in letters.values()] == [GARBAGE] * 2
    assert garbled_id in {letter["message_id"] for letter in letters.values()}
    assert await world.db.fetchval("select count(*) from towpath.task where attempt > 1") == 0
    effects = await world.db.fetch("select message_id from effect order by seq")
    assert [good, following] == [row["message_id"] for row in effects]
    copies = await world.broker.dead_letters(world.group, world.steps)
    assert [copy.body for copy in copies] == [GARBAGE] * 2


async def _one_step(world: World, key: str, n: int, **script: Any) -> UUID:
    async with world.db.transaction():
        return await emit(world.db, world.messages.step(key=key, n=n, **script))
