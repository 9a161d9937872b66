"""`towpath relay check` and `towpath worker check`: the health endpoint of a process on this machine."""

import json
from http.client import HTTPException
from typing import Annotated, Any, Final, TypeAlias
from urllib.error import HTTPError
from urllib.request import ProxyHandler, build_opener

import typer

from towpath.cli.exits import SAYS_NO, UNREACHABLE, USAGE, Stop
from towpath.cli.output import as_json, clean

Live: TypeAlias = Annotated[
    bool, typer.Option("--live", help="Ask only whether its loops progress, as a restart probe should.")
]
_SECONDS: Final = 5
_EVERYWHERE: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104  not bound here


def check(noun: str, host: str, port: int, *, is_live: bool, is_json: bool) -> None:
    """Print what the process says of itself; Stop with 3 if it says no, 4 if nothing answers."""
    if not port:
        variable = f"TOWPATH_{noun.upper()}__HEALTH_PORT"
        raise Stop(USAGE, f"there is no health port to ask: set {variable}, here and for the process")
    facts = asked(noun, host, port, is_live=is_live)
    if is_json:
        as_json(facts)
    else:
        for name, value in facts.items():
            print(clean(f"{name}: {value}"))
    if not facts["ok"]:
        raise Stop(SAYS_NO)


def asked(noun: str, host: str, port: int, *, is_live: bool = False) -> dict[str, Any]:
    """What the process says of itself, with `ok`. Stop with 4 if nothing answers."""
    bare = host.strip("[]")
    bare = _EVERYWHERE.get(bare, bare)
    url = f"http://{f'[{bare}]' if ':' in bare else bare}:{port}/{'livez' if is_live else 'readyz'}"
    try:
        facts = _ask(url)
        return facts | {"ok": bool(facts["ok"])}
    except (OSError, HTTPException, ValueError, LookupError, TypeError) as error:
        raise Stop(UNREACHABLE, f"no {noun} answers at {url}: {error}") from None


def _ask(url: str) -> dict[str, Any]:
    try:
        with build_opener(ProxyHandler({})).open(url, timeout=_SECONDS) as answer:  # it is on this machine
            text = answer.read()
    except HTTPError as error:
        if error.code != 503:
            raise
        text = error.read()
    facts: dict[str, Any] = json.loads(text)
    return facts
