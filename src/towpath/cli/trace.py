"""`towpath trace`: one trace out of span files, without a tracing backend."""

import dataclasses
import os
import re
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console

from towpath.cli.exits import SAYS_NO, Stop
from towpath.cli.options import Json
from towpath.cli.output import as_json
from towpath.errors import UsageError
from towpath.telemetry.setup import TRACES_FILE_VARIABLE
from towpath.telemetry.tree import load_trace, render_trace

app = typer.Typer(name="trace", help="Traces out of span files.", no_args_is_help=True)

_TRACE_ID: Final = re.compile(r"[0-9a-fA-F]{32}")


@app.command()
def show(
    trace_id: Annotated[str, typer.Argument(help="32 hex digits, as tasks show and dlq show print them.")],
    file: Annotated[
        list[Path] | None,
        typer.Option("--file", "-f", help=f"File or directory; repeatable; default: {TRACES_FILE_VARIABLE}."),
    ] = None,
    json: Json = False,
) -> None:
    """One trace as a tree: emit, relay, process, retry, replay, with durations.

    Exits with 3 when the files hold no span of it.

    towpath trace show 4bf92f3577b34da6a3ce929d0e0e4736 --file spans.jsonl
    """
    if not _TRACE_ID.fullmatch(trace_id):
        raise UsageError(f"{trace_id[:60]!r} is not a trace id: it has 32 hex digits")
    paths = file or [Path(value) for value in [os.environ.get(TRACES_FILE_VARIABLE)] if value]
    if not paths:
        raise UsageError(f"say which span files to read: --file, or {TRACES_FILE_VARIABLE}")
    for path in paths:
        if not path.exists():
            raise UsageError(f"{str(path)[:200]!r} does not exist")
    trace = load_trace(paths, trace_id)
    if not trace.spans:
        raise Stop(SAYS_NO, f"no span of trace {trace_id} in {', '.join(map(str, paths))}")
    if json:
        as_json(
            [
                {"step": node.step, "depth": depth, **dataclasses.asdict(node.span)}
                for node, depth in trace.walk()
            ]
        )
        return
    Console(soft_wrap=True).print(render_trace(paths, trace_id))
