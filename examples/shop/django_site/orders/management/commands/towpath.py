"""`manage.py towpath …`: the command line, on Django's database."""

import sys
from argparse import REMAINDER
from typing import Any

from django.core.management.base import BaseCommand, CommandParser

from examples.shop.django_site.orders.database import use
from towpath.cli.root import run


class Command(BaseCommand):  # type: ignore[misc]
    """Hands its arguments on and ends with the command's exit code."""

    help = "Run the towpath command line on Django's default database."
    requires_system_checks: list[str] = []  # noqa: RUF012

    def run_from_argv(self, argv: list[str]) -> None:
        """All arguments are the command line's, its options and --help, too."""
        use()
        sys.exit(run(argv[2:]))

    def add_arguments(self, parser: CommandParser) -> None:
        """For `call_command`."""
        parser.add_argument("arguments", nargs=REMAINDER)

    def handle(self, *_: Any, **options: Any) -> None:
        """The same from code: `call_command("towpath", "dlq", "summary")`."""
        use()
        if code := run(options["arguments"]):
            sys.exit(code)
