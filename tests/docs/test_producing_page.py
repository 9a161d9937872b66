"""docs/producing.md, then docs/ordering.md: each block runs, in their order, against a real database."""

import ast
import asyncio
import contextlib
import inspect
import io
import json
from collections.abc import AsyncIterator
from types import CodeType
from typing import Any
from uuid import uuid4

import psycopg
import pytest_asyncio

from tests.docs.pages import REPOSITORY, blocks, fenced
from tests.fixtures.fix_postgres import PROGRAMS
from towpath import tasks
from towpath.messages import limits
from towpath.outbox import DEFAULT_MAX_PAYLOAD_BYTES
from towpath.store.database import sqlalchemy_url
from towpath.testing.services import PgBouncerServer

PAGE = "docs/producing.md"


async def run(text: str, names: dict[str, Any]) -> None:
    code: CodeType = compile(text, PAGE, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    result = eval(code, names)
    if inspect.isawaitable(result):
        await result


@pytest_asyncio.fixture
async def page(db: Any, migrated_url: str) -> AsyncIterator[dict[str, Any]]:
    """The names that the pages' Python blocks define, with their tables made."""
    names: dict[str, Any] = {"__name__": "page"}
    for block in [*blocks(PAGE), *blocks("docs/ordering.md")]:
        if block.language == "python":
            text = block.text.replace("postgresql+asyncpg://localhost/shop", sqlalchemy_url(migrated_url))
            await run(text, names)
    async with names["engine"].begin() as connection:
        await connection.run_sync(names["Base"].metadata.create_all)
    yield names
    await names["engine"].dispose()


async def keys(db: Any) -> list[str]:
    return [row["key"] for row in await db.fetch("select key from towpath.outbox order by id")]


async def test_emitting_and_submitting_work_as_shown(db: Any, page: dict[str, Any]) -> None:
    await page["place"]("o-1", 5)
    await page["import_orders"](db, ["o-2", "o-3"])

    assert await keys(db) == ["o-1", "o-1", "o-2", "o-3"]
    await page["look"](await db.fetchval("select id from towpath.task"))


async def test_the_example_of_the_reference_reads_a_task_and_its_result(
    db: Any, page: dict[str, Any]
) -> None:
    """The only block that the site takes from a docstring."""
    await page["place"]("o-1", 5)
    await db.execute(
        "update towpath.task set state = 'SUCCEEDED', started_at = now(), finished_at = now(), result = '7'"
    )
    (example,) = fenced(tasks.__doc__ or "")
    page["task_id"] = await db.fetchval("select id from towpath.task")

    async with page["AsyncSession"](page["engine"]) as page["session"]:
        await run(example.text, page)

    assert (page["task"].state, page["value"]) == ("SUCCEEDED", 7)


async def test_a_command_to_another_database_travels_with_its_body(db: Any, page: dict[str, Any]) -> None:
    await page["hand_over"]("o-1")

    row = await db.fetchrow("select kind, destination, key, payload from towpath.outbox")
    assert tuple(row) == ("task", "tasks.courier", "o-1", b'{"order_id":"o-1"}')
    assert await db.fetchval("select count(*) from towpath.task") == 0


async def test_a_producer_behind_a_pooler_by_transaction_works_as_shown(
    db: Any, page: dict[str, Any], migrated_url: str, transaction_pooler: PgBouncerServer
) -> None:
    """P4"""
    engine = page["behind_a_pooler"](sqlalchemy_url(transaction_pooler.before(migrated_url)))
    for order_id in ("o-1", "o-2"):
        async with page["AsyncSession"](engine) as session, session.begin():
            page["emit"](session, page["OrderPlaced"](order_id, 1))
    await engine.dispose()

    assert await keys(db) == ["o-1", "o-2"]


async def test_messages_for_later_wait_as_shown(db: Any, page: dict[str, Any]) -> None:
    await page["remind"]("o-1")

    assert await keys(db) == []
    assert await db.fetchval("select count(*) from towpath.scheduled where due_at > now()") == 2
    assert await db.fetchval("select state from towpath.task") == "WAITING"


async def test_the_examples_of_order_do_what_they_say(db: Any, page: dict[str, Any]) -> None:
    await page["import_orders"](db, ["o-1"])
    await page["pay"]("o-1", 2)
    await page["pay_on"](db, "o-1")
    await page["pay_too_late"](db, "o-1")
    await page["note"](db, "o-1", "o-1/1")

    assert await db.fetchval("select paid from shop_order where id = 'o-1'") == 4
    assert await keys(db) == ["o-1"] * 5


async def test_outside_a_transaction_the_error_says_what_to_do(page: dict[str, Any]) -> None:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        await page["without_a_transaction"]()

    assert "begin one first" in printed.getvalue()


async def test_the_sql_runs(db: Any, page: dict[str, Any]) -> None:
    emitting, granting = [block.text for block in blocks(PAGE) if block.language == "sql"]
    prefix = f"t{uuid4().hex[:10]}"
    await db.execute(emitting)
    async with asyncio.timeout(120), db.transaction():
        await db.execute(f"create role {prefix}_producer; create role {prefix}_shop")
        await db.execute(
            granting.replace("towpath_producer", f"{prefix}_producer").replace("shop", f"{prefix}_shop")
        )
        await db.execute(f"drop role {prefix}_producer; drop role {prefix}_shop")

    assert await keys(db) == ["o-7", "o-7"]
    assert await db.fetchval("select key from towpath.task") == "o-7"


async def test_the_psql_script_runs(db: Any, page: dict[str, Any], migrated_url: str) -> None:
    (script,) = [block.text for block in blocks(PAGE) if block.language == "sh"]
    environment = {"PATH": f"{PROGRAMS}:/usr/bin:/bin", "DATABASE_URL": migrated_url}
    process = await asyncio.create_subprocess_exec("bash", "-ec", script, env=environment)
    assert await process.wait() == 0

    assert await keys(db) == ["o-8"]
    body = {"order_id": "o-8", "amount": 5}
    assert json.loads(await db.fetchval("select payload from towpath.outbox")) == body
    assert await db.fetchval("select count(*) from shop_order where id = 'o-8'") == 1


async def test_psycopg_works_as_shown(db: Any, page: dict[str, Any], migrated_url: str) -> None:
    with psycopg.connect(migrated_url) as connection:
        page["import_order"](connection, "o-1")

    assert await keys(db) == ["o-1", "o-1"]


def test_the_table_of_limits_is_that_of_the_code() -> None:
    """P7 P11"""
    table = (REPOSITORY / PAGE).read_text(encoding="utf-8").partition("## Limits")[2]
    numbers = [
        DEFAULT_MAX_PAYLOAD_BYTES,
        limits.TYPE_LIMIT,
        limits.DESTINATION_LIMIT,
        limits.KEY_LIMIT_BYTES,
        limits.OWNER_LIMIT,
        limits.DEDUPE_KEY_LIMIT_BYTES,
        limits.GROUP_LIMIT,
        limits.HEADER_NAME_LIMIT,
        limits.HEADERS_LIMIT_BYTES,
    ]
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    named = dict(
        zip(("payload", "type", "destination", "key", "owner", "dedupe key", "group"), numbers, strict=False)
    )
    for row in rows:
        what = row.split("|")[1].strip()
        if what in named:
            assert f"{named[what]:,}" in row
    assert all(f"{number:,}" in table for number in numbers)
