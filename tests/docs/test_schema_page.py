"""docs/schema.md is generated from the comments in the database: TOWPATH_TEST_REWRITE=1 writes it."""

from typing import Any

import asyncpg

from tests.docs.pages import REPOSITORY

PAGE = REPOSITORY / "docs" / "schema.md"

_INTRODUCTION = """\
Generated from the comments in the database, which `towpath db upgrade` puts there. The schema is called
`towpath` unless `TOWPATH_SCHEMA_NAME` says otherwise."""
_TABLES = """
select c.oid, c.relname as name, c.relkind = 'v' as is_view, obj_description(c.oid, 'pg_class') as comment
  from pg_class c
 where c.relnamespace = 'towpath'::regnamespace and c.relkind in ('r', 'p', 'v') and not c.relispartition
 order by c.oid
"""
_COLUMNS = """
select a.attname as name, format_type(a.atttypid, a.atttypmod) as type, a.attnotnull as is_required,
       col_description(a.attrelid, a.attnum) as comment
  from pg_attribute a where a.attrelid = $1 and a.attnum > 0 and not a.attisdropped order by a.attnum
"""


async def page(db: "asyncpg.Connection[Any]") -> str:
    parts = ["# Tables", _INTRODUCTION]
    for table in await db.fetch(_TABLES):
        parts += [f"## {table['name']}{' (view)' if table['is_view'] else ''}", table["comment"]]
        if not table["is_view"]:
            lines = ["| column | type | |", "|---|---|---|"]
            for column in await db.fetch(_COLUMNS, table["oid"]):
                type_ = column["type"] + ("" if column["is_required"] else ", may be null")
                lines.append(
                    f"| `{column['name']}` | {type_} | {column['comment'].replace('|', chr(92) + '|')} |"
                )
            parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


async def test_the_page_of_tables_is_up_to_date(db: "asyncpg.Connection[Any]", rewrite: bool) -> None:
    text = await page(db)
    if rewrite:
        PAGE.write_text(text, encoding="utf-8")

    assert text == PAGE.read_text(encoding="utf-8"), "run this test with TOWPATH_TEST_REWRITE=1"
