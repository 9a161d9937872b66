"""The command line's work under the role that is meant for it."""

from typing import Any

import asyncpg
import pytest

from tests.fixtures.graveyard import bury
from towpath.deadletters import Filter, carry_out, make_plan
from towpath.errors import UsageError
from towpath.store.roles import grants


async def test_an_operator_replays_under_its_own_role(db: "asyncpg.Connection[Any]") -> None:
    """X5"""
    await bury(db, ["a", "a", None])
    await bury(db, ["p"], stage="publish")
    prefix = await db.fetchval("select current_database()")  # roles belong to the whole cluster
    await db.execute(grants("towpath", prefix))
    try:
        await db.execute(f"set role {prefix}_operator")

        _, counts = await carry_out(db, await make_plan(db, Filter()), actor="ada")
    finally:
        await db.execute("reset role")
        for role in ("operator", "worker", "producer", "relay", "reader"):
            await db.execute(f"drop owned by {prefix}_{role}; drop role {prefix}_{role}")

    assert counts.done == 4


@pytest.mark.parametrize("prefix", ["", "X", "a b", "a;b", 'a"b', "pg_x", "a" * 60])
def test_a_prefix_that_is_no_plain_identifier_is_refused(prefix: str) -> None:
    """X2"""
    with pytest.raises(UsageError, match="plain lower-case identifier"):
        grants("towpath", prefix)
