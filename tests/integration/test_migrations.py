"""The schema as the migrations make it, and what `check` says when a database has another."""

import asyncio
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from towpath.errors import SchemaMismatch, SettingsError, StoreUnavailable
from towpath.states import FINAL, TRANSITIONS, TaskState, WaitingFor
from towpath.store import fingerprint, installed, migrate
from towpath.store.migrations.scripts import split

Connection = "asyncpg.Connection[Any]"


async def in_thread(function: Any, *arguments: Any) -> Any:
    return await asyncio.to_thread(function, *arguments)


def test_the_committed_fingerprint_is_that_of_the_newest_migration(migrated_url: str, rewrite: bool) -> None:
    found = fingerprint.dump(migrate.shape(migrated_url))
    if rewrite:
        fingerprint.PATH.write_text(found, encoding="utf-8")

    assert found == fingerprint.PATH.read_text(encoding="utf-8"), "run this test with TOWPATH_TEST_REWRITE=1"


def test_a_migrated_database_passes_the_check(migrated_url: str) -> None:
    assert migrate.current(migrated_url) == migrate.head()
    assert migrate.check(migrated_url) == []


def test_an_empty_database_is_told_to_upgrade(database_url: str) -> None:
    assert migrate.current(database_url) is None
    assert migrate.check(database_url) == ["the schema towpath is not installed: run towpath db upgrade"]


def test_upgrading_twice_changes_nothing(migrated_url: str) -> None:
    before = migrate.shape(migrated_url)

    assert migrate.upgrade(migrated_url) == migrate.head()
    assert migrate.shape(migrated_url) == before


def test_eight_upgrades_at_once_make_one_schema(database_url: str) -> None:
    with ThreadPoolExecutor(8) as threads:
        revisions = list(threads.map(lambda _: migrate.upgrade(database_url), range(8)))

    assert revisions == [migrate.head()] * 8
    assert migrate.check(database_url) == []


def test_two_schemas_live_side_by_side_under_their_own_names(migrated_url: str) -> None:
    migrate.upgrade(migrated_url, "second_one")

    assert migrate.check(migrated_url, "second_one") == []
    assert migrate.check(migrated_url) == []


async def test_nothing_of_another_schema_refers_to_the_default_one(database_url: str) -> None:
    await in_thread(migrate.upgrade, database_url, "elsewhere")
    connection = await asyncpg.connect(database_url)
    try:
        shape = await in_thread(migrate.shape, database_url, "elsewhere")
        assert await connection.fetchval("select to_regnamespace('towpath')") is None
        assert not re.search(r"\btowpath\.", fingerprint.dump(shape))
        await connection.execute("select elsewhere.emit('orders', 'order.placed', '{}')")
        assert await connection.fetchval("select count(*) from elsewhere.outbox_message") == 1
    finally:
        await connection.close()


@pytest.mark.parametrize("name", ['a"b', "x; drop table y", "Upper", "", "pg_toast", "a" * 64, "ü"])
def test_a_schema_name_that_is_no_plain_identifier_is_refused(name: str) -> None:
    """X2"""
    for action in (migrate.upgrade, migrate.current, migrate.check):
        with pytest.raises(SettingsError, match="plain lower-case identifier"):
            action("postgresql://nowhere.invalid/x", name)


async def test_the_check_names_each_difference(db: "asyncpg.Connection[Any]", migrated_url: str) -> None:
    await db.execute(
        """
        alter table towpath.task drop constraint task_waits_in_database;
        alter table towpath.task alter column version set default 7;
        alter table towpath.dead_letter add column note text;
        drop index towpath.task_due;
        create or replace function towpath.clock() returns timestamptz
          language sql volatile parallel safe as $$ select now() $$;
        create table towpath.stray (id int);
        create function towpath.tell() returns trigger language plpgsql as $$ begin return null; end $$;
        create trigger tell after insert on towpath.audit execute function towpath.tell();
        """
    )

    assert await in_thread(migrate.check, migrated_url) == [
        "column dead_letter.note is not part of the schema",
        "column stray.id is not part of the schema",
        "column task.version: default is '7', expected '1'",
        "constraint task.task_waits_in_database is missing",
        "function clock(): body is 'select now()', expected 'select clock_timestamp()'",
        "function tell() is not part of the schema",
        "index task_due is missing",
        "relation stray is not part of the schema",
        "trigger audit.tell is not part of the schema",
    ]


async def test_a_schema_that_is_too_new_is_refused_with_the_fix(
    db: "asyncpg.Connection[Any]", migrated_url: str
) -> None:
    """O2"""
    await db.execute(
        """
        update towpath.alembic_version set version_num = '0003';
        update towpath.meta set value = '3' where name = 'schema_version';
        update towpath.meta set value = '2' where name = 'compatible_from';
        """
    )

    expected = (
        "the schema towpath has version 3 and works with towpath of version 2 or newer, this one is of 1: "
        "install a newer towpath"
    )
    assert await in_thread(migrate.check, migrated_url) == [expected]
    with pytest.raises(SchemaMismatch, match="install a newer towpath"):
        await in_thread(migrate.upgrade, migrated_url)


async def test_the_newest_migration_leaves_room_for_the_version_before_it(
    db: "asyncpg.Connection[Any]",
) -> None:
    """Two versions of the library run side by side while a deployment rolls."""
    facts = await db.fetchrow(installed.FACTS)

    assert facts["version"] == installed.SCHEMA_VERSION == int(migrate.head())
    assert facts["compatible_from"] <= max(1, installed.SCHEMA_VERSION - 1)


def test_an_unreachable_database_is_unavailable() -> None:
    """O2"""
    with pytest.raises(StoreUnavailable):
        migrate.current("postgresql://postgres@127.0.0.1:1/postgres")


async def test_a_failing_migration_leaves_nothing_behind(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from towpath.store.migrations import scripts

    render = scripts.render
    monkeypatch.setattr(scripts, "render", lambda *a: render(*a) + ";\nselect no_such_function();")

    with pytest.raises(asyncpg.UndefinedFunctionError):
        await in_thread(migrate.upgrade, database_url)

    assert await in_thread(migrate.current, database_url) is None
    connection = await asyncpg.connect(database_url)
    assert await connection.fetchval("select to_regnamespace('towpath')") is None
    await connection.close()


async def test_the_offline_script_makes_the_same_schema(database_url: str) -> None:
    connection = await asyncpg.connect(database_url)
    await connection.execute(migrate.script())
    await connection.close()

    assert await in_thread(migrate.check, database_url) == []


def test_migrations_only_emit_sql() -> None:
    versions = Path(migrate.__file__).parent / "migrations" / "versions"
    for path in versions.glob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"get_bind|\.connect|fetch|scalar|asyncpg|inspect", text), path.name


async def test_every_table_column_and_view_has_a_comment(db: "asyncpg.Connection[Any]") -> None:
    missing = await db.fetch(
        """
        select c.relname as name from pg_class c
          where c.relnamespace = 'towpath'::regnamespace and c.relkind in ('r', 'p', 'v')
            and obj_description(c.oid, 'pg_class') is null
        union all
        select c.relname || '.' || a.attname from pg_class c join pg_attribute a on a.attrelid = c.oid
          where c.relnamespace = 'towpath'::regnamespace and c.relkind in ('r', 'p')
            and not c.relispartition and a.attnum > 0 and not a.attisdropped
            and col_description(c.oid, a.attnum) is null
        order by 1
        """
    )

    assert [row["name"] for row in missing] == []


async def _words_of_constraint(db: "asyncpg.Connection[Any]", name: str) -> set[str]:
    text = await db.fetchval("select pg_get_constraintdef(oid) from pg_constraint where conname = $1", name)
    return set(re.findall(r"'(\w+)'", text))


async def test_the_states_in_the_database_are_those_of_the_transition_table(
    db: "asyncpg.Connection[Any]",
) -> None:
    """C7"""
    in_table = {state for state in TRANSITIONS if state is not None}
    reachable = frozenset().union(*TRANSITIONS.values())

    assert await _words_of_constraint(db, "task_state_check") == {
        str(state) for state in in_table | reachable
    }
    assert set(TaskState) == in_table
    assert await _words_of_constraint(db, "task_final_has_end") == {str(state) for state in FINAL}
    assert await _words_of_constraint(db, "task_waiting_for_check") == {str(reason) for reason in WaitingFor}


def test_scripts_are_split_at_the_semicolons_that_end_statements() -> None:
    script = """
    -- a comment; with a semicolon
    select ';' as "odd;name"; -- trailing; comment
    create function f() as $body$ begin perform 1; end $body$;
    do $$ select ';'; $$;
    -- the end;
    """

    statements = split(script)

    assert [statement.split()[-1] for statement in statements] == ['"odd;name"', "$body$", "$$"]
