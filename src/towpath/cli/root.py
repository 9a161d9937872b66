"""The root command: its nouns, and how every run of it ends."""

import asyncio
import inspect
import logging
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Annotated, Any, Final

import typer
from typer.main import get_command

from towpath import settings
from towpath.cli import broker, config, db, destination, dlq, doctor, outbox, relay, tasks, trace, worker
from towpath.cli.exits import FAILED, INTERRUPTED, OK, USAGE, Stop, explain
from towpath.cli.options import text
from towpath.cli.output import clean
from towpath.errors import UsageError
from towpath.failures import traceback_of
from towpath.telemetry.setup import TRACES_FILE_VARIABLE

app = typer.Typer(
    name="towpath",
    help="Administer and run towpath. Settings come from TOWPATH_… variables: see towpath config show.",
    epilog=(
        "Exit codes: 0 ok, 1 failed, 2 usage or settings, 3 a check says no, 4 a service is out of reach, "
        "130 interrupted."
    ),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_DATABASE = "TOWPATH_DATABASE_URL, TOWPATH_SCHEMA_NAME"
_BROKER = "TOWPATH_BROKER_URL, TOWPATH_BROKER_OPTIONS"
_READS = {
    db: _DATABASE,
    broker: f"{_BROKER}, {_DATABASE}, TOWPATH_RELAY__BROKER_NUMBER",
    destination: _DATABASE,
    outbox: _DATABASE,
    relay: f"TOWPATH_RELAY__…, TOWPATH_TELEMETRY__…, {_DATABASE}, {_BROKER}",
    worker: f"TOWPATH_WORKER__…, TOWPATH_TELEMETRY__…, {_DATABASE}, {_BROKER}",
    tasks: _DATABASE,
    dlq: f"{_DATABASE}, TOWPATH_MAX_PAYLOAD_BYTES",
    trace: TRACES_FILE_VARIABLE,
    config: "all: TOWPATH_…, and the file that TOWPATH_CONFIG_FILE names",
}
"""The settings that commands of a noun read, for their help."""
_EXAMPLE: Final = re.compile(r"(?<=\n\n)(?=(?:\w+=\S+ )*towpath )")
for noun, reads in _READS.items():
    for command in noun.app.registered_commands:
        command.epilog = f"Reads {reads}."
        command.help = _EXAMPLE.sub(
            "\b\n", inspect.getdoc(command.callback) or ""
        )  # to be copied, not folded
    app.add_typer(noun.app)


@app.callback()
def root(
    context: typer.Context,
    config_file: Annotated[
        str | None, typer.Option(help=f"Settings file, TOML ({settings.FILE_VARIABLE}).", metavar="FILE")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="VARIABLE=VALUE", help="A setting for this command; repeatable."),
    ] = None,
    verbose: Annotated[
        int, typer.Option("--verbose", "-v", count=True, help="Say more; -vv shows tracebacks.")
    ] = 0,
) -> None:
    context.obj["verbosity"] = verbose
    context.with_resource(_environment(config_file, set_ or ()))
    if context.invoked_subcommand not in ("relay", "worker") and not verbose:
        # Client libraries log what is raised as well; what is raised becomes the one line.
        logging.getLogger().addHandler(logging.NullHandler())


@contextmanager
def _environment(config_file: str | None, given: Sequence[str]) -> Iterator[None]:
    """What the command line sets, as variables of this process while the command runs."""
    wanted = {} if config_file is None else {settings.FILE_VARIABLE: text(config_file, "--config-file")}
    for setting in given:
        name, equals, value = text(setting, "--set", 100_000).partition("=")
        if not equals or not name.upper().startswith(settings.PREFIX):
            raise UsageError(f"--set is VARIABLE=VALUE, such as TOWPATH_RELAY__LEASE=1m, not {name[:40]!r}")
        wanted[name.upper()] = value
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, old in before.items():
            if old is None:
                del os.environ[name]
            else:
                os.environ[name] = old


app.command(epilog="Reads all settings: towpath config show.")(doctor.doctor)


@app.command()
def version() -> None:
    """Print the version of towpath.

    towpath version
    """
    from towpath.store.installed import library_version  # noqa: PLC0415  not needed otherwise

    print(library_version())


@cache
def _command() -> Any:
    """The tree of commands, made once."""
    return get_command(app)


def run(arguments: Sequence[str]) -> int:
    """Run one command line; returns its exit code. Errors are one line on stderr."""
    state = {"verbosity": 0}
    try:
        result = _command().main(list(arguments), prog_name="towpath", standalone_mode=False, obj=state)
        sys.stdout.flush()
        return result if isinstance(result, int) else OK
    except Stop as stop:
        if stop.line:
            _complain(stop.line)
        return stop.code
    except typer.Abort:
        _complain("stopped, nothing was changed")
        return FAILED
    except typer.TyperException as error:
        context = getattr(error, "ctx", None)
        hint = f" (see {context.command_path} --help)" if context is not None else ""
        message = error.format_message() if hasattr(error, "format_message") else str(error)
        if message.startswith("Usage:"):  # no command was given: the help text, as it is
            print(message, file=sys.stderr)
        elif message:
            _complain(f"{message}{hint}")
        return USAGE
    except (KeyboardInterrupt, asyncio.CancelledError):
        _complain("interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()
        return FAILED
    except Exception as error:  # noqa: BLE001  the outermost edge: everything becomes one line
        if state["verbosity"] >= 2:
            print(traceback_of(error), file=sys.stderr)
        line, code = explain(error)
        _complain(line)
        return code


def _complain(line: str) -> None:
    print(f"towpath: {clean(' '.join(line.split()))}", file=sys.stderr)
