"""`towpath tasks cancel | resolve`: what an operator decides about one task."""

import asyncio
import json
from typing import Any
from uuid import UUID, uuid4

import pytest

from tests.fixtures.fix_cli import Run
from tests.fixtures.json_documents import check_document

GATE = """insert into towpath.key_gate (consumer_group, source, lane, head)
          values ('billing', 'tasks.billing', 'o1', $1)"""
COLUMNS = "consumer_group, id, type, kind, source, key, lane, state, held_by, payload, position"


async def add(db: Any, state: str, *, position: int = 1, **extra: Any) -> UUID:
    """A task of one lane in a state."""
    id_ = uuid4()
    names = "".join(f", {name}" for name in extra)
    marks = "".join(f", ${number}" for number in range(4, 4 + len(extra)))
    await db.execute(
        f"""insert into towpath.task ({COLUMNS}{names})
            values ('billing', $1, 'payment.charge', 'task', 'tasks.billing', 'o1', 'o1', $2, 'database',
                    '{{}}', $3{marks})""",
        id_,
        state,
        position,
        *extra.values(),
    )
    return id_


async def in_doubt(db: Any) -> tuple[UUID, UUID]:
    """A task in doubt at the head of its lane, and its parked follower."""
    head = await add(db, "UNKNOWN", effect_state="started", effect_step="effect", attempt=1)
    follower = await add(db, "PARKED", position=2)
    await db.execute(
        GATE,
        head,
    )
    return head, follower


async def states(db: Any, *ids: UUID) -> list[str]:
    return [await db.fetchval("select state from towpath.task where id = $1", id_) for id_ in ids]


@pytest.mark.parametrize(
    ("outcome", "state", "followers"),
    [
        ("succeeded", "SUCCEEDED", "WAITING"),
        ("failed", "FAILED", "WAITING"),
        ("dead", "DEAD", "WAITING"),
        ("retry", "WAITING", "PARKED"),
    ],
)
async def test_a_task_in_doubt_becomes_what_the_operator_says(
    towpath: Run, db: Any, outcome: str, state: str, followers: str
) -> None:
    """C9: an operator decides, the key goes on, and it is recorded who said so."""
    head, follower = await in_doubt(db)
    command = f"tasks resolve {head} --group billing --as {outcome} --reason asked --json".split()
    ran = await asyncio.to_thread(towpath, *command)
    assert 0 == ran.code, ran.err
    check_document(command, ran.out)
    assert outcome == json.loads(ran.out)["outcome"]
    assert [state, followers] == await states(db, head, follower)
    audit = await db.fetchrow("select action, reason, actor from towpath.audit")
    assert ("tasks.resolve", "asked") == (audit["action"], audit["reason"])
    assert 1 == await db.fetchval("select count(*) from towpath.task_event where task_id = $1", head)
    assert (1 if outcome == "dead" else 0) == await db.fetchval("select count(*) from towpath.dead_letter")


async def test_what_is_not_in_doubt_cannot_be_resolved(towpath: Run, db: Any) -> None:
    parked = await add(db, "PARKED")
    ran = await asyncio.to_thread(
        towpath, "tasks", "resolve", str(parked), "--group", "billing", "--as", "succeeded"
    )
    assert 1 == ran.code
    assert f"group billing has no task {parked} in doubt" in ran.err
    assert 0 == await db.fetchval("select count(*) from towpath.audit")
    ran = await asyncio.to_thread(
        towpath, "tasks", "resolve", str(parked), "--group", "billing", "--as", "magic"
    )
    assert 2 == ran.code


async def test_cancelling_a_waiting_task_lets_its_key_go_on(towpath: Run, db: Any) -> None:
    """C15: the next of the lane is due."""
    head = await add(db, "PARKED")
    await db.execute(
        "update towpath.task set state = 'WAITING', due_at = now(), waiting_for = 'retry' where id = $1", head
    )
    follower = await add(db, "PARKED", position=2)
    await db.execute(
        GATE,
        head,
    )
    ran = await asyncio.to_thread(
        towpath, "tasks", "cancel", str(head), "--group", "billing", "--reason", "asked"
    )
    assert (0, f"cancelled {head}") == (ran.code, ran.out.strip())
    assert ["CANCELLED", "WAITING"] == await states(db, head, follower)
    again = await asyncio.to_thread(towpath, "tasks", "cancel", str(head), "--group", "billing")
    assert 0 == again.code
    ran = await asyncio.to_thread(towpath, "tasks", "cancel", str(uuid4()), "--group", "billing")
    assert 1 == ran.code
