"""Options that several commands share, and how their text is read."""

import getpass
import os
import socket
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, TypeAlias
from uuid import UUID

import typer

from towpath.backoff import parse_duration
from towpath.deadletters.criteria import STAGES, STATES
from towpath.errors import UsageError

Json: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Limit: TypeAlias = Annotated[int, typer.Option(min=1, max=100_000, help="Most rows printed.")]
Groups: TypeAlias = Annotated[
    list[str] | None, typer.Option("--group", "-g", help="Consumer group; repeatable.")
]
Types: TypeAlias = Annotated[list[str] | None, typer.Option("--type", "-t", help="Message type; repeatable.")]
Keys: TypeAlias = Annotated[list[str] | None, typer.Option("--key", "-k", help="Ordering key; repeatable.")]
Reasons: TypeAlias = Annotated[
    list[str] | None, typer.Option("--reason-code", help="Reason code of the last death; repeatable.")
]
Fingerprints: TypeAlias = Annotated[
    list[str] | None, typer.Option("--fingerprint", help="Fingerprint of a cause; repeatable.")
]
Stages: TypeAlias = Annotated[
    list[str] | None, typer.Option("--stage", help=f"Where it died: {', '.join(STAGES)}; repeatable.")
]
States: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--state", "-s", help=f"{', '.join(STATES)} or all; repeatable. Default: open."),
]
Ids: TypeAlias = Annotated[
    list[str] | None, typer.Option("--id", help="Catalog id or message id; repeatable.")
]
Since: TypeAlias = Annotated[
    str | None, typer.Option(help="Last death at or after: 2026-01-31T09:00Z, or 2h for two hours ago.")
]
Until: TypeAlias = Annotated[str | None, typer.Option(help="Last death before; written like --since.")]
Actor: TypeAlias = Annotated[
    str | None, typer.Option(help="Who does it, for the audit table; default: user@host.")
]
Because: TypeAlias = Annotated[str, typer.Option("--reason", help="Why, for the audit table.")]
Most: TypeAlias = Annotated[
    int | None, typer.Option("--max", min=1, max=2**31 - 1, help="Most of them acted on.")
]
Rate: TypeAlias = Annotated[float | None, typer.Option(min=0.01, max=1e6, help="Most per second.")]
Yes: TypeAlias = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
DryRun: TypeAlias = Annotated[
    bool, typer.Option("--dry-run", help="Show what would be done, change nothing.")
]

_MAX_ID = 2**63 - 1
_UNIT_ENDS = ("s", "m", "h", "d")


def text(value: str, option: str, limit: int = 1000) -> str:
    """A value that Postgres can take as text. Raises UsageError."""
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise UsageError(f"{option} is not UTF-8 text") from None
    if size > limit or "\0" in value:
        raise UsageError(f"{option} must be text of at most {limit} bytes")
    return value


def texts(values: Sequence[str] | None, option: str) -> tuple[str, ...]:
    """The same for a repeatable option."""
    return tuple(text(value, option) for value in values or ())


def instant(value: str | None, option: str, now: datetime) -> datetime | None:
    """An aware instant, or a duration before `now`. Raises UsageError."""
    if value is None:
        return None
    try:
        if value[:1].isdigit() and value[-1:] in _UNIT_ENDS:
            return now - parse_duration(value)
        read = datetime.fromisoformat(value)
        aware = None if read.tzinfo is None else read.astimezone(UTC)
    except (ValueError, OverflowError):
        raise UsageError(
            f"{option} is neither an instant such as 2026-01-31T09:00Z nor a duration such as 2h"
        ) from None
    if aware is None:
        raise UsageError(f"{option} has no time zone: append Z or an offset such as +02:00")
    return aware


def dead_letter_states(given: Sequence[str] | None) -> tuple[str, ...]:
    """The states of `--state`; none: any. Raises UsageError."""
    names = given or ["open"]
    for name in names:
        if name not in (*STATES, "all"):
            raise UsageError(f"there is no state {name[:40]!r}, only {', '.join(STATES)} and all")
    return () if "all" in names else tuple(names)


def reference(value: str, option: str = "the id") -> int | UUID:
    """A catalog id or a message id. Raises UsageError."""
    is_number = value.isascii() and value.isdigit() and len(value) <= len(str(_MAX_ID))
    if is_number and 0 < int(value) <= _MAX_ID:
        return int(value)
    return message_id(value, f"{option} {value[:60]!r} is neither a catalog id nor a message id")


def message_id(value: str, complaint: str | None = None) -> UUID:
    """A message id. Raises UsageError."""
    try:
        return UUID(value)
    except ValueError:
        raise UsageError(complaint or f"{value[:60]!r} is not a message id") from None


def actor_name(given: str | None) -> str:
    """Who is recorded: what was given, else the user of the operating system and the host."""
    if given is not None:
        return text(given, "--actor", 200)
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = f"uid {os.getuid()}"
    return f"{user}@{socket.gethostname()}"
