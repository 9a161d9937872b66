"""Run one consumer group of this package.

python -m consumers list
python -m consumers init agents     # create the group's business tables
python -m consumers run agents      # settings come from TOWPATH_*; SIGTERM drains
"""

import sys

from towpath.signals import end_on_signals

if __name__ == "__main__":
    end_on_signals()

import argparse
import asyncio
import pkgutil
from collections.abc import Sequence
from importlib.resources import files
from typing import Final

import asyncpg

import consumers.groups
from towpath.consumer.service import load_app, run
from towpath.errors import TowpathError
from towpath.failures import problem_of
from towpath.settings import Settings, load
from towpath.store.database import plain_url, store_errors

EXIT_FAILED: Final = 1


def groups() -> list[str]:
    """The groups that can be run, sorted."""
    return sorted(module.name for module in pkgutil.iter_modules(consumers.groups.__path__))


def business_schema(group: str) -> str:
    """The SQL that creates a group's business tables; it can be run again."""
    return (files(consumers.groups) / group / "schema.sql").read_text(encoding="utf-8")


async def create_tables(group: str, settings: Settings) -> None:
    """Create the business tables of a group. Raises StoreUnavailable."""
    with store_errors():
        connection = await asyncpg.connect(plain_url(settings.database_url.get_secret_value()))
        try:
            await connection.execute(business_schema(group))
        finally:
            await connection.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. 0: done, 1: failed with one line that says why, 2: wrong usage."""
    parser = argparse.ArgumentParser(prog="consumers", description=__doc__, formatter_class=_RAW)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="the groups that can be run")
    for name, text in (("run", "consume until SIGTERM"), ("init", "create the group's business tables")):
        commands.add_parser(name, help=text).add_argument("group", choices=groups())
    options = parser.parse_args(arguments)
    if options.command == "list":
        sys.stdout.writelines(f"{group}\n" for group in groups())
        return 0
    try:
        settings = load()
        if options.command == "init":
            asyncio.run(create_tables(options.group, settings))
        else:
            run(load_app(f"consumers.groups.{options.group}.app:app"), settings)
    except TowpathError as error:
        sys.stderr.write(f"{parser.prog}: {problem_of(error)}\n")
        return EXIT_FAILED
    return 0


_RAW: Final = argparse.RawDescriptionHelpFormatter

if __name__ == "__main__":
    sys.exit(main())
