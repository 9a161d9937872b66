"""The command `towpath`: one file per noun."""

import signal
import sys

_EXTRA = ("typer", "rich", "alembic", "pydantic", "pydantic_settings")


def main() -> None:
    """Run the command line and exit with its code. SIGTERM interrupts it, as Ctrl-C does.

    As process 1 of a container it would be dropped otherwise. What serves handles it itself.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        from towpath.cli.root import run  # noqa: PLC0415  the extra may be absent
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] not in _EXTRA:
            raise
        sys.stderr.write('towpath: the command line needs an extra: pip install "towpath[cli]"\n')
        sys.exit(2)
    sys.exit(run(sys.argv[1:]))
