"""The verdict on many messages finds each kind of fault that it is there to find (A1, A6)."""

from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import pytest
import pytest_asyncio

from tests.acceptance.ledger import Intention, Ledger, judge
from tests.acceptance.world import BUSINESS_SCHEMA

GROUP = "judged"
Connection = asyncpg.Connection


@pytest_asyncio.fixture
async def kept(db: "Connection[Any]", tmp_path: Path) -> Ledger:
    """Three committed messages of one key, done once and in order, and one that was rolled back."""
    await db.execute(BUSINESS_SCHEMA.read_text())
    ledger = Ledger(tmp_path / "ledger.jsonl")
    intentions = [Intention(uuid4(), "step", "a", n, is_committed=True) for n in (1, 2, 3)]
    ledger.write([*intentions, Intention(uuid4(), "step", "a", 3, is_committed=False)])
    for each in intentions:
        await add_task(db, each.message_id, "SUCCEEDED")
        await add_effect(db, each.message_id, each.n)
    return ledger


async def add_task(db: "Connection[Any]", message_id: UUID, state: str) -> None:
    await db.execute(
        "insert into towpath.task (consumer_group, id, type, kind, source, state, held_by, finished_at)"
        " values ($1, $2, 'acceptance.step', 'event', 'steps', $3, 'database', now())",
        GROUP,
        message_id,
        state,
    )


async def add_effect(db: "Connection[Any]", message_id: UUID, n: int, handler: str = "step") -> None:
    await db.execute(
        "insert into effect (message_id, handler, key, n, attempt) values ($1, $2, 'a', $3, 1)",
        message_id,
        handler,
        n,
    )


async def problems(db: "Connection[Any]", ledger: Ledger) -> list[str]:
    return (await judge(db, GROUP, ledger)).problems()


async def test_a_promise_that_was_kept_has_no_problems(db: "Connection[Any]", kept: Ledger) -> None:
    """The base of the others."""
    assert await problems(db, kept) == []


DEFECTS = {
    "lost": "delete from towpath.task where id = $1",
    "DEAD instead of SUCCEEDED": "update towpath.task set state = 'DEAD' where id = $1",
    "missing effects": "delete from effect where message_id = $1",
    "doubled effects": """
        insert into effect (message_id, handler, key, n, attempt)
        select message_id, handler, key, n, 2 from effect where message_id = $1""",
    "out of order": "update effect set seq = default where message_id = $1",
    "several keys": """
        insert into outside_call (message_id, idempotency_key, attempt)
        values ($1, 'one', 1), ($1, 'other', 2)""",
    "left over: 1 gates": f"""
        insert into towpath.key_gate (consumer_group, source, lane, head)
        values ('{GROUP}', 'steps', 'a', $1)""",
}


@pytest.mark.parametrize("expected", DEFECTS)
async def test_a_planted_defect_is_found_and_nothing_else(
    db: "Connection[Any]", kept: Ledger, expected: str
) -> None:
    """Each by its own name."""
    victim = next(each.message_id for each in kept if each.n == 2)

    await db.execute(DEFECTS[expected], victim)

    (found,) = await problems(db, kept)
    assert found.startswith(expected)


async def test_what_was_rolled_back_and_came_all_the_same_is_found(
    db: "Connection[Any]", kept: Ledger
) -> None:
    """A ghost, as a task and as an effect."""
    ghost = next(each.message_id for each in kept if not each.is_committed)

    await add_task(db, ghost, "SUCCEEDED")
    await add_effect(db, ghost, 3)

    assert [line.partition(":")[0] for line in await problems(db, kept)] == ["ghosts", "ghost effects"]
