"""The command `towpath`: one file per noun."""

import sys

from towpath.signals import end_on_signals, interrupt_on_signals

_EXTRA = ("typer", "rich", "alembic", "pydantic", "pydantic_settings")


def main() -> None:
    """Run the command line and exit with its code. SIGTERM interrupts it, as Ctrl-C does.

    What serves handles both itself.
    """
    end_on_signals()
    try:
        from towpath.cli.root import run  # noqa: PLC0415  the extra may be absent
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] not in _EXTRA:
            raise
        sys.stderr.write('towpath: the command line needs an extra: pip install "towpath[cli]"\n')
        sys.exit(2)
    interrupt_on_signals()
    sys.exit(run(sys.argv[1:]))
