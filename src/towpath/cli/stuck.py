"""`towpath tasks stuck`: what has not moved, why, and what to do about it."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, Final

import typer

from towpath.backoff import parse_duration
from towpath.cli.options import Groups, Json, Limit, texts
from towpath.cli.output import age, as_json, clean
from towpath.cli.session import connected, run_async
from towpath.errors import UsageError
from towpath.store.repairs import Repairs

_START: Final = "no member of the group is alive: start one (towpath worker run)"

_WHY: Final[Mapping[str, tuple[str, str]]] = {
    "lost_in_effect": (
        "its worker was lost in an at-most-once effect",
        "a member makes it UNKNOWN within seconds",
    ),
    "lost_to_redeliver": ("its worker was lost", "it goes on when the broker brings its message again"),
    "lost_to_reap": ("its worker was lost", "a member takes it back within seconds"),
    "runs_long": (
        "its handler runs and reports no progress",
        "wait for its timeout, or towpath tasks cancel {id}",
    ),
    "message_parked": (
        "its message waits behind one that the broker refused",
        "towpath dlq list --stage publish",
    ),
    "message_paused": (
        "publishing to its destination is paused, or was",
        "towpath outbox status: resume it, or wait for its turn",
    ),
    "message_lost": (
        "its message was published and did not come",
        "a member starts it from its row after a while",
    ),
    "message_unpublished": ("its message is not published", "towpath outbox status"),
    "overdue": (
        "it is due and nobody starts it",
        "its members are busy, or hold its dependency: look at their /readyz",
    ),
    "overdue_behind": (
        "it is due behind {behind}, which runs",
        "wait for that one, or towpath tasks cancel {behind} --group {group}",
    ),
    "group_paused": ("its group is paused", "towpath worker resume --group {group}"),
    "type_paused": ("its type is paused", "towpath worker resume --group {group} --type {type}"),
    "in_doubt": ("its effect may have happened", "ask the provider, then towpath tasks resolve {id}"),
    "parked": (
        "it and {more} others wait behind {behind}, which is {behind_state}",
        "towpath tasks show {behind}",
    ),
}
_FOR_MEMBERS: Final = frozenset(
    {"lost_in_effect", "lost_to_redeliver", "lost_to_reap", "message_lost", "overdue"}
)


def stuck(
    group: Groups = None,
    older_than: Annotated[str, typer.Option(help="Not moved for so long, such as 90s, 5m or 2h.")] = "5m",
    limit: Limit = 50,
    json: Json = False,
) -> None:
    """Say what has not moved, why, and what to do, one line each, the longest first.

    Under dead workers, running without progress, submitted and not started, waiting past its time, held by
    a pause, in doubt, or parked behind another of its key (one line for each key).

    towpath tasks stuck --group billing --older-than 10m
    """
    try:
        seconds = parse_duration(older_than).total_seconds()
    except (ValueError, OverflowError) as error:
        raise UsageError("--older-than is a duration such as 90s, 5m or 2h") from error
    groups = list(texts(group, "--group")) or None

    async def read() -> tuple[datetime, list[dict[str, Any]]]:
        async with connected() as session:
            now = await session.clock()
            rows = await Repairs(session.schema).stuck(
                session.connection, groups, older_than_seconds=seconds, limit=limit
            )
            return now, [
                dict(row) | dict(zip(("because", "todo"), explained(row), strict=True)) for row in rows
            ]

    now, rows = run_async(read())
    if json:
        as_json(rows)
        return
    for row in rows:
        since = age((now - row["since"].astimezone(UTC)).total_seconds())
        head = f"{since} {row['state']} {row['consumer_group']} {row['type']} {row['id']}"
        print(clean(f"{head}: {row['because']}; {row['todo']}"))
    if not rows:
        print(f"nothing has stood still for {older_than}")


def explained(row: Mapping[str, Any]) -> tuple[str, str]:
    """Why it does not move, and what to do."""
    because, todo = _WHY[row["why"]]
    if row["why"] in _FOR_MEMBERS and not row["has_members"]:
        todo = _START
    known = {
        "id": f"{row['id']} --group {row['consumer_group']}",
        "group": row["consumer_group"],
        "type": row["type"],
        "behind": row["behind"],
        "behind_state": row["behind_state"] or "gone: a member lets the next one go",
        "more": "no" if row["count"] == 1 else (row["count"] or 1) - 1,
    }
    return because.format(**known), todo.format(**known)
