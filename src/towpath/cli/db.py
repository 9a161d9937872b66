"""`towpath db`: the schema in the database."""

from typing import Annotated

import typer

from towpath import settings
from towpath.cli.exits import SAYS_NO, Stop
from towpath.cli.options import Json, text
from towpath.cli.output import as_json, clean
from towpath.cli.session import database_of
from towpath.store.roles import grants

app = typer.Typer(
    name="db", help="The schema in the database: install, upgrade, check, grant.", no_args_is_help=True
)


@app.command()
def upgrade() -> None:
    """Bring the schema to the newest version: one transaction, safe to run twice, at once and under load.

    towpath db upgrade
    """
    from towpath.store import migrate  # noqa: PLC0415  SQLAlchemy is heavy

    revision = migrate.upgrade(*database_of(settings.load()))
    print(f"the schema is at revision {clean(revision)}{_if_ahead(revision, migrate.head())}")


@app.command()
def sql(
    since: Annotated[
        str | None,
        typer.Option("--from", help="The revision that is there: towpath db current. Default: none."),
    ] = None,
    upto: Annotated[
        str | None, typer.Option("--to", help="The last one wanted; default: the newest.")
    ] = None,
) -> None:
    """Print what db upgrade would run, for those who run SQL by hand; asks no database.

    towpath db sql --from 0001 | psql --set ON_ERROR_STOP=1
    """
    from towpath.store import migrate  # noqa: PLC0415  SQLAlchemy is heavy

    schema = settings.load_offline().schema_name
    print(migrate.script(schema, since=_revision(since, "--from"), upto=_revision(upto, "--to")), end="")


def _revision(given: str | None, option: str) -> str | None:
    return None if given is None else text(given, option, 40)


def _if_ahead(revision: str | None, newest: str) -> str:
    return "" if revision == newest else f", newer than {newest} of this towpath, which works with it"


@app.command()
def current(json: Json = False) -> None:
    """Print the revision the schema is at; exit 3 when it is not the newest.

    towpath db current
    """
    from towpath.store import migrate  # noqa: PLC0415  SQLAlchemy is heavy

    revision, newest = migrate.current(*database_of(settings.load())), migrate.head()
    if json:
        as_json({"revision": revision, "newest": newest})
    else:
        print(f"{clean(revision or 'not installed')}, newest is {newest}")
    if revision != newest:
        raise Stop(SAYS_NO)


@app.command()
def check(json: Json = False) -> None:
    """Compare the schema with what the migrations make; exit 3 when it differs.

    towpath db check --json
    """
    from towpath.store import migrate  # noqa: PLC0415  SQLAlchemy is heavy

    database = database_of(settings.load())
    problems, revision = migrate.check(*database), migrate.current(*database)
    if json:
        as_json({"ok": not problems, "problems": problems})
    else:
        for problem in problems:
            print(clean(problem))
        if not problems and (ahead := _if_ahead(revision, migrate.head())):
            print(f"the schema is at revision {clean(revision or '')}{ahead}")
        elif not problems:
            print("the schema is as the migrations make it")
    if problems:
        raise Stop(SAYS_NO)


@app.command()
def roles(
    prefix: Annotated[str, typer.Option(help="First part of the role names.")] = "towpath",
) -> None:
    """Print SQL that makes the least-privilege roles; review it, then pipe it into psql.

    towpath db roles | psql
    """
    print(grants(settings.load_offline().schema_name, prefix), end="")
