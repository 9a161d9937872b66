"""`towpath worker offsets`: how far a group has read at Kafka, and a person's word where that is gone."""

from collections.abc import Mapping
from dataclasses import dataclass
from json import dumps
from typing import Annotated, Any, Final

import typer

from towpath.brokers.ports import Bounds
from towpath.cli import options
from towpath.cli.exits import FAILED, Stop
from towpath.cli.option_groups import Consent
from towpath.cli.options import Actor, Because, DryRun, Json, Yes
from towpath.cli.output import as_json, clean, table
from towpath.cli.session import Session, connected, run_async
from towpath.cli.topology import admin_of_settings
from towpath.errors import UsageError
from towpath.store.audit import AuditStore
from towpath.store.statements import load

_COLUMNS: Final = ("consumer_group", "topic", "partition", "position", "refused", "resume_from", "updated_at")
_PLANNED: Final = ("partition", "refused", "position", "first", "next", "resume_from")
_NAMED: Final = ("recorded", "earliest", "latest")


@dataclass(frozen=True, slots=True)
class _Asked:
    group: str
    topic: str
    to: str


def offsets(
    group: Annotated[str, typer.Option("--group", "-g", help="Consumer group.")],
    topic: Annotated[str | None, typer.Option(help="Topic; needed with --to.")] = None,
    to: Annotated[
        str | None,
        typer.Option(help="Go on at: recorded, earliest, latest, or a time such as --since takes."),
    ] = None,
    reason: Because = "",
    actor: Actor = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    json: Json = False,
) -> None:
    """Show how far a group has read; with --to, say where to go on in the partitions that wait for it.

    towpath worker offsets --group billing --topic orders --to recorded --dry-run
    """
    name = options.text(group, "--group", 100)
    address = None if topic is None else options.text(topic, "--topic", 200)
    if to is None:
        rows = run_async(_rows(name, address))
        if json:
            as_json(rows)
        else:
            table(rows, _COLUMNS, empty=f"group {name} has read nothing where the broker keeps offsets")
            _name_the_fix(name, rows)
        return
    if address is None:
        raise UsageError("say which --topic the word is for")
    asked, consent = _Asked(name, address, to), Consent(dry_run, yes, reason, actor, json)
    who, why = consent.author()
    plan = run_async(_plan(asked))
    if not json:
        table(plan, _PLANNED, empty="")
    given = 0
    if not dry_run:
        consent.ask(f"go on at these offsets in {len(plan)} partitions?")
        given = run_async(_give(asked, plan, who, why))
    if json:
        as_json({"dry_run": dry_run, "given": given, "partitions": plan})
    else:
        print("dry run: nothing was changed" if dry_run else f"said for {given} partitions")


def _name_the_fix(group: str, rows: list[dict[str, Any]]) -> None:
    for topic in sorted({row["topic"] for row in rows if row["refused"] and row["resume_from"] is None}):
        print(
            f"{clean(topic)} waits for a word: towpath worker offsets --group {clean(group)} "
            f"--topic {clean(topic)} "
            "--to recorded | earliest | latest | <time>"
        )


async def _rows(group: str, topic: str | None) -> list[dict[str, Any]]:
    async with connected() as session:
        return await _noted(session, group, topic)


async def _noted(session: Session, group: str, topic: str | None) -> list[dict[str, Any]]:
    sql = load("offsets", session.schema)["list_offsets"]
    topics = None if topic is None else [topic]
    return [dict(row) for row in await session.connection.fetch(sql, [group], topics)]


async def _plan(asked: _Asked) -> list[dict[str, Any]]:
    """The partitions that wait for a word, and where each would go on."""
    async with connected() as session:
        now = await session.clock()
        noted = {row["partition"]: row for row in await _noted(session, asked.group, asked.topic)}
    since = None if asked.to in _NAMED else options.instant(asked.to, "--to", now)
    async with admin_of_settings() as admin:
        bounds = await admin.bounds(asked.topic, since)
    if not bounds:
        raise UsageError("the broker keeps no offsets of groups, so none can be missing")
    plan = [
        _planned(asked, number, noted.get(number, {}), bounds[number])
        for number in sorted(bounds)
        if _waits(noted.get(number))
    ]
    if not plan:
        raise Stop(
            FAILED,
            f"no partition of {asked.topic} waits for a word: {asked.group} goes on from what it committed",
        )
    return plan


def _waits(row: Mapping[str, Any] | None) -> bool:
    return row is None or row["refused"] is not None or row["position"] is None


def _planned(asked: _Asked, number: int, row: Mapping[str, Any], bounds: Bounds) -> dict[str, Any]:
    position = row.get("position")
    targets = {"recorded": position, "earliest": bounds.first, "latest": bounds.next}
    target = targets.get(asked.to, bounds.at)
    if target is None:
        raise UsageError(f"{asked.topic}:{number} has no recorded offset: say earliest, latest or a time")
    if target > bounds.next:
        raise Stop(
            FAILED,
            f"{asked.topic}:{number} was read up to {target} and ends at {bounds.next}: the topic was made "
            "again or lost records; say earliest, latest or a time",
        )
    return {
        "partition": number,
        "refused": row.get("refused"),
        "position": position,
        "first": bounds.first,
        "next": bounds.next,
        "resume_from": target,
    }


async def _give(asked: _Asked, plan: list[dict[str, Any]], actor: str, reason: str) -> int:
    """Write the word down, with who gave it. How many partitions still waited for it."""
    async with connected() as session, session.connection.transaction():
        sql = load("offsets", session.schema)["give_word"]
        given = []
        for row in plan:
            arguments = (asked.group, asked.topic, row["partition"], row["resume_from"])
            if await session.connection.fetchval(sql, *arguments) is not None:
                given.append(row["partition"])
        await AuditStore(session.schema).begin(
            session.connection,
            actor=actor,
            action="worker.offsets",
            reason=reason,
            criteria=dumps({"group": asked.group, "topic": asked.topic, "to": asked.to}),
            counts=dumps({"partitions": len(given)}),
        )
    return len(given)
