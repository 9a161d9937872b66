"""`towpath worker status`, `pause` and `resume`: consumer groups as the database has them."""

from typing import Annotated, Any, Final

import typer

from towpath.cli import pausing
from towpath.cli.option_groups import Consent, grouped
from towpath.cli.options import Groups, Json, Types, text, texts
from towpath.cli.output import age, as_json, table
from towpath.cli.session import connected, run_async
from towpath.errors import UsageError
from towpath.store.census import COUNTED
from towpath.store.pauses import EVERY_TYPE, PauseStore, Target
from towpath.store.statements import load

_COLUMNS: Final = (
    "group", "alive", "accepted", "running", "oldest_running", "waiting", "due", "oldest_due", "parked",
    "unknown", "dead_letters",
)  # fmt: skip
_MEMBERS: Final = ("group", "worker", "host", "version", "started_at", "lease_until", "is_alive", "running")


def status(group: Groups = None, json: Json = False) -> None:
    """Members, work and pauses by consumer group, as the database has them: also while none runs.

    Counts stop at 10,000. Open breakers are known to their process alone: towpath worker check, /metrics.

    towpath worker status --group billing
    """
    report = run_async(_status(list(texts(group, "--group")) or None))
    if json:
        as_json(report)
        return
    rows = [
        each
        | {
            "group": each["consumer_group"],
            "oldest_running": age(each["oldest_running_seconds"] or None),
            "oldest_due": age(each["oldest_due_seconds"] or None),
        }
        for each in report
    ]
    table(rows, _COLUMNS, empty="no group has a task or a worker")
    members = [
        worker | {"group": each["consumer_group"], "worker": worker["id"]}
        for each in report
        for worker in each["workers"]
    ]
    if members:
        table(members, _MEMBERS, empty="")
    pausing.tell([pause | {"name": each["consumer_group"]} for each in report for pause in each["pauses"]])


@grouped
def pause(
    group: Annotated[str, typer.Option("--group", "-g", help="Consumer group.")],
    type: Types = None,  # noqa: A002  the option's name
    *,
    consent: Consent,
) -> None:
    """Start no work of a group, or of one message type, until it is resumed; what runs goes on to its end.

    Members obey with their next heartbeat. Waiting spends neither attempts nor age; deadlines go on.

    towpath worker pause --group billing --type payment.charge --reason "provider is down"
    """
    targets = _targets(group, type)
    pausing.act(pausing.Request("pause", "start", targets, False, consent))


@grouped
def resume(
    group: Annotated[str, typer.Option("--group", "-g", help="Consumer group.")],
    type: Types = None,  # noqa: A002  the option's name
    *,
    consent: Consent,
) -> None:
    """Let a group start work again, each key in its order: all that is paused of it, or one message type.

    towpath worker resume --group billing
    """
    targets = _targets(group, type)
    pausing.act(pausing.Request("resume", "start", targets, not type, consent))


def _targets(group: str, types: list[str] | None) -> list[Target]:
    name = text(group, "--group", 100)
    if not name:
        raise UsageError("--group is empty")
    return [Target("start", name, type_) for type_ in texts(types, "--type") or (EVERY_TYPE,)]


async def _status(only: list[str] | None) -> list[dict[str, Any]]:
    async with connected(is_pinned=True) as session:
        connection, sql = session.connection, load("status", session.schema)
        groups = [row["name"] for row in await connection.fetch(sql["groups"], only)]
        members = [dict(row) for row in await connection.fetch(sql["workers"], groups)]
        pauses = await PauseStore(session.schema).open(connection, "start")
        census = load("work", session.schema)["census"]
        counts = {group: dict(await connection.fetchrow(census, group, COUNTED) or {}) for group in groups}
    return [
        {
            "consumer_group": group,
            "alive": sum(row["is_alive"] for row in members if row["consumer_group"] == group),
            **counts[group],
            "pauses": [_without(row, "name") for row in pauses if row["name"] == group],
            "workers": [_without(row, "consumer_group") for row in members if row["consumer_group"] == group],
        }
        for group in groups
    ]


def _without(row: Any, name: str) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key != name}
