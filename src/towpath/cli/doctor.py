"""`towpath doctor`: everything that towpath needs, one line each with what to do."""

import asyncio
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Annotated, Final

import typer

from towpath.cli.exits import SAYS_NO, UNREACHABLE, USAGE, Stop
from towpath.cli.options import Json, text
from towpath.cli.output import as_json, clean

if TYPE_CHECKING:
    from towpath.cli.checkup.model import Finding

_PRECEDENCE: Final = (USAGE, UNREACHABLE)


def doctor(
    apps: Annotated[
        list[str] | None,
        typer.Option("--app", metavar="MODULE:APP", help="Also what this consumer group needs; repeatable."),
    ] = None,
    json: Json = False,
) -> None:
    """Check everything that towpath needs, and say what to do about each failure.

    Every check runs, whatever the others found. Exits with 2 for wrong settings, 4 when a service is out
    of reach, 3 when a check fails; warnings change nothing.

    towpath doctor --app billing.consumer:app
    """
    paths = [text(path, "--app") for path in apps or ()]
    found = asyncio.run(_examine(paths, is_shown=not json))
    codes = {finding.code for _, finding in found} - {0}
    if json:
        checks = [
            {"check": name, "status": finding.status, "message": finding.text} for name, finding in found
        ]
        as_json({"ok": not codes, "checks": checks})
    if codes:
        raise Stop(next((code for code in _PRECEDENCE if code in codes), SAYS_NO))


async def _examine(paths: list[str], *, is_shown: bool) -> "list[tuple[str, Finding]]":
    from towpath.cli.checkup import CHECKS  # noqa: PLC0415  the engines are heavy
    from towpath.cli.checkup.model import Site, carry_out  # noqa: PLC0415

    found = []
    width = max(len(check.name) for check in CHECKS)
    async with AsyncExitStack() as stack:
        async for name, finding in carry_out(CHECKS, Site(paths, stack)):
            found.append((name, finding))
            if is_shown:
                line = " ".join(clean(finding.text).split())
                print(f"{finding.status:<11}  {name:<{width}}  {line}", flush=True)
    return found
